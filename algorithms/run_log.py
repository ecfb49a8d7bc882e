"""Record the steps of a run and its outcome in the store, and the steps in metric sinks, too; validations in the sinks alone.

Steps that the store did not accept are sent again with the next one, and those of a killed run when it resumes. The store keeps each
step once, in the version that was sent last.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Final, Protocol

from agl_otel.algorithms.metric_sinks import MetricSink, Sinks, sinks_of
from agl_otel.algorithms.outcome import OutcomeStore, outcome_recorded
from agl_otel.algorithms.run_folder import OTHER_CODE, RunFolder, forced_in, new_run_id, other_code
from agl_otel.algorithms.validation import figures_of, validations
from agl_otel.errors import AglError
from agl_otel.types import TrainingStep

_logger = logging.getLogger(__name__)
SINK_SECONDS: Final = 60.0  # a sink draws or uploads a step in seconds; a run continues without one that takes longer
_NO_METRICS = frozenset({"step", "weights_version", "next_version", "started_at", "ended_at", "attempts", "rollout_ids"})
"""Fields of a report that TrainingStep has as its own fields, or that are too long."""


class StepStore(OutcomeStore, Protocol):
    """The part of `agl_otel.store.Store` that a run log uses."""

    async def record_figures(self, figures: Mapping[str, float], *, algorithm: str) -> None:
        """Export figures in the stack's metrics."""
        ...

    async def record_steps(self, steps: Sequence[TrainingStep]) -> int:
        """Store steps; return how many were new."""
        ...


class RunLog:
    """Records the steps of one run in `store` and `sinks`, and in `store` how the block ended. Use `async with`, then `begin`.

    Their errors do not end the run, nor does a sink's `step` or `close` that takes longer than `sink_seconds` hold it.
    """

    def __init__(
        self,
        store: StepStore,
        *,
        run_id: str,
        algorithm: str,
        folder: Path | None = None,
        sinks: Sequence[MetricSink] = (),
        sink_seconds: float = SINK_SECONDS,
    ) -> None:
        self.run_id = run_id
        self.algorithm = algorithm
        self._store = store
        self._folder = folder
        self._sinks = list(sinks)
        self._sink_seconds = sink_seconds
        self._threads: list[_SinkThread] = []
        self._pending: list[TrainingStep] = []
        self._ends: dict[int, float] = {0: time.time()}
        """{step: when it ended, in Unix seconds} of the steps so far, 0 for the start."""
        self._forced: list[dict[str, Any]] = []
        self._outcome = outcome_recorded(store, run_id, algorithm)
        self._steps = 0
        self._shown: set[int] = set()
        """Steps whose validations the sinks have."""

    async def __aenter__(self) -> RunLog:
        self._forced = forced_in(self._folder)
        await self._outcome.__aenter__()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            await asyncio.gather(*(self._call(thread, thread.sink.close) for thread in self._threads))
            if error is None:
                await self._end()
        finally:
            for thread in self._threads:
                thread.end()
            await self._outcome.__aexit__(kind, error, trace)

    async def begin(self, done: Sequence[TrainingStep]) -> None:
        """Start the sinks, with the steps that the run had done when it was stopped, and their validations in the run's folder.

        Raises what a sink's `begin` raises; DataError for a damaged validation.json.
        """
        done = [self._with_other_code(step) for step in done]
        self._ends |= {step.step: step.end_time for step in done}
        shown = sorted([*done, *self._new_validations()], key=lambda step: step.step)  # stable: a validation is after its step
        for sink in self._sinks:
            self._threads.append(thread := _SinkThread(sink))
            await thread.call(partial(sink.begin, self.run_id, self._folder, shown))
            thread.in_use = True
        self._pending = list(done)
        await self._flush()

    async def note(self, step: TrainingStep, figures: Mapping[str, float]) -> None:
        """Record a step that has just been done."""
        step = self._with_other_code(step)
        try:
            await self._store.record_figures(figures, algorithm=self.algorithm)
        except AglError as error:
            _logger.warning("the figures of step %d were not exported as metrics: %s", step.step, error)
        self._ends[step.step] = step.end_time
        await self._show(step)
        self._pending.append(step)
        await self._flush()

    def _with_other_code(self, step: TrainingStep) -> TrainingStep:
        """Count a step, and name its code where the run was begun with other."""
        self._steps += 1
        named = other_code(self._forced, self._steps)
        return step.model_copy(update={"metrics": {**step.metrics, OTHER_CODE: named}}) if named else step

    async def note_validations(self) -> None:
        """Show new validations of the steps so far, which are in the run's folder. Raises DataError for a damaged validation.json.

        The store has them already, as the rewards of their rollouts.
        """
        for step in self._new_validations():
            await self._show(step)

    def _new_validations(self) -> list[TrainingStep]:
        """Return the validations, as steps for the sinks, that they do not have; a later one waits for its step."""
        found = validations(self._folder) if self._folder is not None else []
        new = [each for each in found if each.step in self._ends and each.step not in self._shown]
        self._shown |= {each.step for each in new}
        return [
            TrainingStep(
                run_id=self.run_id,
                algorithm=self.algorithm,
                step=each.step,
                start_time=self._ends[each.step],
                end_time=self._ends[each.step],
                metrics=figures_of(each.scored),
            )
            for each in new
        ]

    async def _show(self, step: TrainingStep) -> None:
        await asyncio.gather(*(self._call(thread, partial(thread.sink.step, step)) for thread in self._threads))

    async def _call(self, thread: _SinkThread, work: Callable[[], None]) -> None:
        """Have a sink that is in use do `work`, and wait for it at most `sink_seconds`."""
        if not thread.in_use:
            return
        try:
            async with asyncio.timeout(self._sink_seconds):
                await thread.call(partial(self._safely, thread, work))
        except TimeoutError:
            self._leave_out(thread, f"it has not returned for {self._sink_seconds:g} s")

    def _safely(self, thread: _SinkThread, work: Callable[[], None]) -> None:
        """Do `work` in the sink's thread, unless an earlier call has failed since."""
        if not thread.in_use:
            return
        try:
            work()
        except BaseException as error:  # noqa: BLE001  # third-party code that only displays figures
            self._leave_out(thread, repr(error))

    def _leave_out(self, thread: _SinkThread, why: str) -> None:
        if thread.in_use:  # a call that returns too late may fail, too
            thread.in_use = False
            _logger.warning("run %s continues without %s: %s", self.run_id, type(thread.sink).__name__, why)

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


class _SinkThread:
    """Makes all calls of one sink, one after the other, in a daemon thread: one that does not return does not delay the process's exit."""

    def __init__(self, sink: MetricSink) -> None:
        self.sink = sink
        self.in_use = False
        """Whether it has begun and has not failed."""
        self._calls: SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = SimpleQueue()
        threading.Thread(target=self._run, name=f"agl-{type(sink).__name__}", daemon=True).start()

    async def call(self, work: Callable[[], None]) -> None:
        """Do `work` after the earlier calls, even if the caller is cancelled. Raises what it raises."""
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()
        self._calls.put((work, done))
        await asyncio.wrap_future(done)

    def end(self) -> None:
        """End the thread after the calls so far."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            work, done = call
            try:
                done.set_result(work())
            except BaseException as error:  # noqa: BLE001  # raised again by `call`
                done.set_exception(error)


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
        metrics=flat({name: value for name, value in report.row.items() if name not in _NO_METRICS}),
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
