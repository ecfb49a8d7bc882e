"""Whom a run tells of its steps: the store, which keeps each as a span linked to its evidence, and shows its alarms.

What the store does not take is told with the next step; what a killed run could not tell, it tells when it goes on. The store keeps a
step once, however often it is told; of one that was done again, the last telling.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from agl_otel.errors import AglError
from agl_otel.types import TrainingStep

_logger = logging.getLogger(__name__)
_NO_METRICS = frozenset({"step", "weights_version", "next_version", "started_at", "ended_at", "attempts", "rollout_ids"})
"""Fields of a report that have a place of their own in a TrainingStep, or are too long."""


class StepStore(Protocol):
    """What a run log needs of a store; `agl_otel.store.Store` is one."""

    async def record_figures(self, figures: Mapping[str, float], *, algorithm: str) -> None:
        """Show them in the stack's metrics."""
        ...

    async def record_steps(self, steps: Sequence[TrainingStep]) -> int:
        """Keep these steps; how many were new."""
        ...


class RunLog:
    """Tells `store` of the steps of one run; a run does not end because nobody listens."""

    def __init__(self, store: StepStore, *, run_id: str, algorithm: str) -> None:
        self.run_id = run_id
        self.algorithm = algorithm
        self._store = store
        self._untold: list[TrainingStep] = []

    async def begin(self, done: Sequence[TrainingStep]) -> None:
        """The steps that the run had done when it was stopped."""
        self._untold = list(done)
        await self._tell()

    async def note(self, step: TrainingStep, figures: Mapping[str, float]) -> None:
        """A step that has just been done."""
        try:
            await self._store.record_figures(figures, algorithm=self.algorithm)
        except AglError as error:
            _logger.warning("the figures of step %d are in no metrics: %s", step.step, error)
        self._untold.append(step)
        await self._tell()

    async def end(self) -> None:
        """Tell what is left."""
        await self._tell()
        if self._untold:
            _logger.warning(
                "%d steps of run %s, the first of them %d, are in no trace: a run that is kept tells them when it is started again",
                len(self._untold), self.run_id, self._untold[0].step,
            )  # fmt: skip

    async def _tell(self) -> None:
        if not self._untold:
            return
        try:
            await self._store.record_steps(self._untold)
        except AglError as error:
            _logger.warning("step %d is in no trace yet: %s", self._untold[-1].step, error)
            return
        self._untold = []


def step_of(report: Any, log: RunLog, *, resources_id: str) -> TrainingStep:
    """A report of GRPO or SFT as what is told of it."""
    return TrainingStep(
        run_id=log.run_id,
        algorithm=log.algorithm,
        step=report.step,
        resources_id=resources_id,
        version_before=report.weights_version,
        version_after=report.next_version,
        samples=report.trajectories,
        refused=sum(report.refused.values()),
        start_time=report.started_at,
        end_time=report.ended_at,
        metrics=flat({name: value for name, value in asdict(report).items() if name not in _NO_METRICS}),
        attempts=[(rollout_id, attempt_id) for rollout_id, attempt_id in report.attempts],
    )


def flat(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Numbers and texts by name, those of an inner object as `outer.inner`; lists are left out."""
    found: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        elif isinstance(value, int | float | str):
            found[prefix + name] = value
    return found
