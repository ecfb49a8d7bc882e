"""Run the rollouts of verl's sessions; requests that arrive together are enqueued, watched and read in one batch. Does not import verl.

A rollout's id is made of run, mode, step, task and session, so that a step that is repeated after a stop finds its earlier rollouts.
Succeeded ones are read again. Others may wait for a model server that is gone: they are cancelled and run again under a new id.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from agl_otel.algorithms.grpo.groups import REWARD_SECONDS, RewardWait
from agl_otel.algorithms.utils import sampling_seed
from agl_otel.algorithms.verl.held import Held
from agl_otel.algorithms.verl.samples import Counts, Sample, to_samples
from agl_otel.algorithms.verl.spec import Spec
from agl_otel.errors import AgentError
from agl_otel.store import Store
from agl_otel.types import TERMINAL_STATUSES, AttemptedRollout, EnqueueRolloutRequest, Rollout, RolloutMode

GATHER_SECONDS: Final = 0.01  # batching delay for requests; the sessions of a step start within it
READ_GATHER_SECONDS: Final = 2.0  # batching delay for reads, which cost tens of milliseconds each; the last read is not delayed
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RolloutRequest:
    """The rollout that one of verl's sessions requests."""

    task: Any
    """Any JSON value."""
    mode: RolloutMode
    step: int
    index: int
    """Index of the task in its data set."""
    session: int
    """0, 1, …: index of the rollout among those of this task."""

    @property
    def name(self) -> str:
        """Unique in a run."""
        return f"{self.mode}-{self.step:06d}-{self.index:06d}-{self.session:03d}"

    @property
    def group(self) -> str:
        """The name of its group (samples.group_of)."""
        return f"{self.step}-{self.index}"


@dataclass
class RolloutResult:
    """The samples of one rollout."""

    rollout_id: str
    samples: list[Sample]


@dataclass(eq=False)
class _Session:
    request: RolloutRequest
    done: asyncio.Future[RolloutResult]
    rollout_id: str = ""


@dataclass
class Rollouts:
    """The rollouts of one process, in one event loop."""

    store: Store
    spec: Spec
    on_counts: Callable[[RolloutMode, Counts], Any] = lambda mode, counts: None
    """Called with the counts before the sessions continue; may be async."""
    _waiting: list[_Session] = field(default_factory=list["_Session"])
    _tasks: set[asyncio.Task[None]] = field(default_factory=set["asyncio.Task[None]"])

    def __post_init__(self) -> None:
        self._rules = self.spec.sample_rules

    async def run(self, request: RolloutRequest) -> RolloutResult:
        """Run the rollout and read its samples. Raises what the store raises."""
        session = _Session(request, asyncio.get_running_loop().create_future())
        self._waiting.append(session)
        if len(self._waiting) == 1:
            task = asyncio.create_task(self._serve())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await session.done

    async def _serve(self) -> None:
        await asyncio.sleep(GATHER_SECONDS)
        sessions, self._waiting = self._waiting, []
        modes = {session.request.mode for session in sessions}
        await asyncio.gather(*(self._serve_mode([each for each in sessions if each.request.mode == mode]) for mode in modes))

    async def _serve_mode(self, sessions: Sequence[_Session]) -> None:
        try:
            await self._enqueue(sessions)
            await self._read_all(sessions)
        except Exception as error:  # noqa: BLE001 - raised in each session, where verl counts it
            for session in sessions:
                if not session.done.done():
                    session.done.set_exception(error)

    # --- enqueue

    async def _enqueue(self, sessions: Sequence[_Session]) -> None:
        """Assign a rollout to each session: one that succeeded in an earlier start, or one that runs now."""
        left = list(sessions)
        for start in range(1, self.spec.start + 1):
            rollouts = await self.store.enqueue([self._request(session.request, start) for session in left])
            stale: list[_Session] = []
            for session, rollout in zip(left, rollouts, strict=True):
                session.rollout_id = rollout.rollout_id
                if rollout.status != "succeeded" and (rollout.metadata or {}).get("start") != self.spec.start:
                    stale.append(session)
                    if rollout.status not in TERMINAL_STATUSES:
                        await self.store.set_status([rollout.rollout_id], "cancelled")
            left = stale
            if not left:
                return

    def _request(self, request: RolloutRequest, start: int) -> EnqueueRolloutRequest:
        metadata: dict[str, Any] = {"run": self.spec.run_id, "step": request.step, "group": request.index, "start": self.spec.start}
        if self.spec.seed is not None:
            metadata["sampling_seed"] = sampling_seed(self.spec.seed, request.name)
        again = f"-{start}" if start > 1 else ""
        return EnqueueRolloutRequest(
            input=request.task,
            mode=request.mode,
            resources_id=self.spec.resources_id(request.mode),
            config=self.spec.config,
            rollout_id=f"ro-{self.spec.run_id}-{request.name}{again}",
            metadata=metadata,
        )

    # --- wait and read

    async def _read_all(self, sessions: Sequence[_Session]) -> None:
        by_id: dict[str, list[_Session]] = {}
        for session in sessions:
            by_id.setdefault(session.rollout_id, []).append(session)
        finished: asyncio.Queue[Rollout | AttemptedRollout | None] = asyncio.Queue()

        async def watch() -> None:
            try:
                async for rollout in self.store.watch(list(by_id), timeout_seconds=self.spec.step_seconds):
                    finished.put_nowait(rollout)
            finally:
                finished.put_nowait(None)

        watching = asyncio.create_task(watch())
        try:
            await self._read_ended(finished, by_id)
            await watching
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(watching, return_exceptions=True)
        waited_for = [rollout_id for rollout_id, sessions in by_id.items() if not all(session.done.done() for session in sessions)]
        await self._give_up(waited_for, by_id)

    async def _read_ended(self, finished: asyncio.Queue[Rollout | AttemptedRollout | None], by_id: dict[str, list[_Session]]) -> None:
        """Read the rollouts from the queue, until None, as soon as nothing holds them back."""
        deadline = time.monotonic() + (math.inf if self.spec.step_seconds is None else self.spec.step_seconds)
        requests = {rollout_id: sessions[0].request for rollout_id, sessions in by_id.items()}
        mode = next(iter(requests.values())).mode
        held = Held(self._groups(requests, mode), self._reward_wait(mode))
        no_more = False
        while held.groups:
            left = max(0.0, deadline - time.monotonic())
            if no_more:
                batch: list[Rollout | AttemptedRollout] = []
                await asyncio.sleep(min(left, REWARD_SECONDS))
            else:
                batch, no_more = await _batch(finished, REWARD_SECONDS if held.is_waiting else None)
            if ready := await held.take(batch, no_more=no_more, is_late=time.monotonic() >= deadline):
                await self._read(ready, by_id)

    def _groups(self, requests: Mapping[str, RolloutRequest], mode: RolloutMode) -> Collection[Sequence[str]]:
        """Return the ids of the rollouts that are read together: with credit by calls those of a task, which are compared."""
        if mode != "train" or not self._rules.advantages.of_calls:
            return [[rollout_id] for rollout_id in requests]
        groups: dict[str, list[str]] = {}
        for rollout_id, request in requests.items():
            groups.setdefault(request.group, []).append(rollout_id)
        return groups.values()

    def _reward_wait(self, mode: RolloutMode) -> RewardWait | None:
        """Return how the rollouts that are trained on wait for rewards; None: they do not."""
        if mode != "train" or not self.spec.reward_wait_seconds:
            return None
        return RewardWait(self.spec.reward_wait_seconds, partial(self.store.rewarded, sources=self.spec.reward_sources))

    async def _read(self, batch: Sequence[Rollout | AttemptedRollout], by_id: dict[str, list[_Session]]) -> None:
        mode = by_id[batch[0].rollout_id][0].request.mode
        traces = await self.store.traces(batch, tree=mode == "train" and self._rules.advantages.of_calls)
        if mode == "train":
            traces = traces.trusting(self.spec.reward_sources)
        began = time.thread_time()
        try:
            found, counts = to_samples(traces, self._rules)
        except AgentError as error:  # the trainer ends the run; verl would go on without these rollouts
            await self._report_counts(mode, Counts(errors=Counter([str(error)])))
            raise
        counts.cpu_seconds = time.thread_time() - began
        for rollout in batch:
            if rollout.rollout_id not in found:  # deleted in the meantime
                found[rollout.rollout_id] = []
                counts.add(_not_finished(by_id[rollout.rollout_id][0].request))
        await self._report_counts(mode, counts)
        for rollout_id, samples in found.items():
            for session in by_id[rollout_id]:
                if not session.done.done():
                    session.done.set_result(RolloutResult(rollout_id, samples))

    async def _give_up(self, rollout_ids: Sequence[str], by_id: dict[str, list[_Session]]) -> None:
        """Cancel rollouts that have not finished in time or were deleted, and count them."""
        for rollout_id in rollout_ids:
            with contextlib.suppress(ValueError):  # NotFoundError: deleted
                await self.store.set_status([rollout_id], "cancelled")
            request = by_id[rollout_id][0].request
            await self._report_counts(request.mode, _not_finished(request))
            for session in by_id[rollout_id]:
                if not session.done.done():  # done where the caller was cancelled
                    session.done.set_result(RolloutResult(rollout_id, []))
        if rollout_ids:
            _log.warning("%d rollouts had not finished after %s s and were cancelled", len(rollout_ids), self.spec.step_seconds)

    async def _report_counts(self, mode: RolloutMode, counts: Counts) -> None:
        result = self.on_counts(mode, counts)
        if asyncio.iscoroutine(result) or isinstance(result, asyncio.Future):
            await result


def _not_finished(request: RolloutRequest) -> Counts:
    """Count a rollout that was cancelled or deleted before it had ended."""
    return Counts(rollouts=1, without_reward=1, refused=Counter(not_finished=1), rewards={request.group: []})


async def _batch(
    queue: asyncio.Queue[Rollout | AttemptedRollout | None], seconds: float | None
) -> tuple[list[Rollout | AttemptedRollout], bool]:
    """Collect rollouts until READ_GATHER_SECONDS after the first, for which it waits `seconds` (None: for ever), or until None, which ends
    the queue. Returns them, and whether the queue has ended.
    """
    batch: list[Rollout | AttemptedRollout] = []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds) as limit:
            while (rollout := await queue.get()) is not None:
                if not batch:
                    limit.reschedule(asyncio.get_running_loop().time() + READ_GATHER_SECONDS)
                batch.append(rollout)
            return batch, True
    return batch, False
