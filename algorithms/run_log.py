"""Record the steps of a run in the store, as spans linked to their attempts, and in metric sinks.

Steps that the store did not accept are sent again with the next one, and those of a killed run when it resumes. The store keeps each
step once, in the version that was sent last.
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
"""Fields of a report that TrainingStep has as its own fields, or that are too long."""


class StepStore(Protocol):
    """The part of `agl_otel.store.Store` that a run log uses."""

    async def record_figures(self, figures: Mapping[str, float], *, algorithm: str) -> None:
        """Export figures in the stack's metrics."""
        ...

    async def record_steps(self, steps: Sequence[TrainingStep]) -> int:
        """Store steps; return how many were new."""
        ...


class RunLog:
    """Records the steps of one run in `store` and `sinks`. Their errors do not end the run. Use `async with`, then `begin`."""

    def __init__(
        self, store: StepStore, *, run_id: str, algorithm: str, folder: Path | None = None, sinks: Sequence[MetricSink] = ()
    ) -> None:
        self.run_id = run_id
        self.algorithm = algorithm
        self._store = store
        self._folder = folder
        self._sinks = list(sinks)
        self._active: list[MetricSink] = []
        self._pending: list[TrainingStep] = []

    async def __aenter__(self) -> RunLog:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for sink in [*self._active]:
            await asyncio.to_thread(self._safely, sink, sink.close)
        if error is None:
            await self._end()

    async def begin(self, done: Sequence[TrainingStep]) -> None:
        """Start the sinks, with the steps that the run had done when it was stopped. Raises what a sink's `begin` raises."""
        for sink in self._sinks:
            await asyncio.to_thread(sink.begin, self.run_id, self._folder, done)
            self._active.append(sink)
        self._pending = list(done)
        await self._flush()

    async def note(self, step: TrainingStep, figures: Mapping[str, float]) -> None:
        """Record a step that has just been done."""
        try:
            await self._store.record_figures(figures, algorithm=self.algorithm)
        except AglError as error:
            _logger.warning("the figures of step %d were not exported as metrics: %s", step.step, error)
        for sink in [*self._active]:
            await asyncio.to_thread(self._safely, sink, partial(sink.step, step))
        self._pending.append(step)
        await self._flush()

    def _safely(self, sink: MetricSink, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  # third-party code that only displays figures
            _logger.warning("run %s continues without %s: %r", self.run_id, type(sink).__name__, error)
            if sink in self._active:
                self._active.remove(sink)

    async def _end(self) -> None:
        """Send the remaining steps."""
        await self._flush()
        if self._pending:
            _logger.warning(
                "%d steps of run %s, from step %d on, are not stored as spans: a run with a folder sends them when it is started again",
                len(self._pending), self.run_id, self._pending[0].step,
            )  # fmt: skip

    async def _flush(self) -> None:
        if not self._pending:
            return
        try:
            await self._store.record_steps(self._pending)
        except AglError as error:
            _logger.warning("step %d is not stored as a span yet: %s", self._pending[-1].step, error)
            return
        self._pending = []


def open_log(store: StepStore, algorithm: str, run: RunFolder | None, metrics: Sinks | None) -> RunLog:
    """Make the log of a run in the folder `run`, or in memory (None)."""
    run_id, folder = (run.run_id, run.folder) if run is not None else (new_run_id(algorithm), None)
    return RunLog(store, run_id=run_id, algorithm=algorithm, folder=folder, sinks=sinks_of(metrics, has_folder=run is not None))


def training_step(report: Any, log: RunLog, *, resources_id: str) -> TrainingStep:
    """Convert a report of GRPO or SFT to the step that is recorded."""
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
    """Flatten nested mappings to {`outer.inner`: number or text}; lists are left out."""
    found: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        elif isinstance(value, int | float | str):
            found[prefix + name] = value
    return found
