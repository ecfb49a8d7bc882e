"""Whom a run tells of its steps: the store, which keeps each as a span linked to its evidence, and shows its alarms; and metric sinks.

What the store does not take is told with the next step; what a killed run could not tell, it tells when it goes on. The store keeps a
step once, however often it is told; of one that was done again, the last telling.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from agl_otel.algorithms.metric_sinks import MetricSink, Sinks, sinks_of
from agl_otel.algorithms.run_folder import RunFolder, new_run_id
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
    """Tells `store` and `sinks` of the steps of one run; a run does not end because nobody listens. Use `async with`, then `begin`."""

    def __init__(
        self, store: StepStore, *, run_id: str, algorithm: str, folder: Path | None = None, sinks: Sequence[MetricSink] = ()
    ) -> None:
        self.run_id = run_id
        self.algorithm = algorithm
        self._store = store
        self._folder = folder
        self._sinks = list(sinks)
        self._begun: list[MetricSink] = []
        self._untold: list[TrainingStep] = []

    async def __aenter__(self) -> RunLog:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for sink in [*self._begun]:
            await asyncio.to_thread(self._safely, sink, sink.close)
        if error is None:
            await self._end()

    async def begin(self, done: Sequence[TrainingStep]) -> None:
        """The steps that the run had done when it was stopped. Raises what a sink's `begin` raises."""
        for sink in self._sinks:
            await asyncio.to_thread(sink.begin, self.run_id, self._folder, done)
            self._begun.append(sink)
        self._untold = list(done)
        await self._tell()

    async def note(self, step: TrainingStep, figures: Mapping[str, float]) -> None:
        """A step that has just been done."""
        try:
            await self._store.record_figures(figures, algorithm=self.algorithm)
        except AglError as error:
            _logger.warning("the figures of step %d are in no metrics: %s", step.step, error)
        for sink in [*self._begun]:
            await asyncio.to_thread(self._safely, sink, partial(sink.step, step))
        self._untold.append(step)
        await self._tell()

    def _safely(self, sink: MetricSink, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  # somebody else's code, which shows what is kept elsewhere
            _logger.warning("run %s goes on without %s: %r", self.run_id, type(sink).__name__, error)
            if sink in self._begun:
                self._begun.remove(sink)

    async def _end(self) -> None:
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


def log_of(store: StepStore, algorithm: str, run: RunFolder | None, metrics: Sinks | None) -> RunLog:
    """The log of a run that is kept in `run`, or in memory."""
    run_id, folder = (run.run_id, run.folder) if run is not None else (new_run_id(algorithm), None)
    return RunLog(store, run_id=run_id, algorithm=algorithm, folder=folder, sinks=sinks_of(metrics, kept=run is not None))


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
        metrics=flat({name: value for name, value in {**report.figures, **asdict(report)}.items() if name not in _NO_METRICS}),
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
