"""The runner: claims rollouts, runs an agent for each, completes their attempts.

    claimed = queue.claim(free slots)            # long poll
    roots.export(claimed)                        # one acknowledged export, before the agents start
    agent.run(job) for each, concurrently
    completion: close, seal, report              # completion.py, in batches

A failing rollout is a result, and never stops the runner. A slot is free again as soon as its agent has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from agl_otel.errors import AgentError, AglError, UnavailableError, UsageError
from agl_otel.net.tls import ambient
from agl_otel.queue.client import QueueClient
from agl_otel.runner.certificates import Certificates, certificates
from agl_otel.runner.completion import Completion, Ended, retry_unavailable
from agl_otel.runner.environment import Addresses
from agl_otel.runner.job import Agent, ClosingAgent, HookedAgent, Job, RecordedAgent
from agl_otel.runner.ledgers import Ledgers
from agl_otel.runner.orphans import report_orphaned
from agl_otel.runner.output import AttemptOutput, LogExporter
from agl_otel.runner.roots import RootSpans
from agl_otel.runner.running import Run, RunnerEvent, outcome_of
from agl_otel.runner.snapshot import SystemSnapshot, pause_seconds
from agl_otel.telemetry.setup import Telemetry
from agl_otel.types import AttemptedRollout, Describe, NamedResources, RolloutMode
from agl_otel_hook import conventions

HEARTBEAT_SECONDS: Final = 5.0  # also the delay until a cancellation reaches the agent
HEARTBEAT_JITTER_SECONDS: Final = 0.5  # spreads the heartbeats of runners that were started together
CLAIM_WAIT_SECONDS: Final = 20.0  # of one long poll
CLAIM_RETRY_SECONDS: Final = 1.0
OUTPUT_SECONDS: Final = 2.0
GRACE_SECONDS: Final = 30.0  # for running attempts, after a stop
COMPLETE_SECONDS: Final = 30.0  # after that, for the end of those that still run and all results; then for ledgers of dead runners
START_RETRY_SECONDS: Final = 60.0  # collector or queue outage after which claimed attempts fail
FIND_STACK_SECONDS: Final = 60.0
_RESOURCES_CACHE_SIZE: Final = 256
Claim = Callable[[int], Awaitable[list[AttemptedRollout]]]
_log = logging.getLogger(__name__)


def new_worker_id() -> str:
    """Make a worker id of host name, process id and a random suffix."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"


class Runner:
    """Runs `agent` for the rollouts of `queue`, up to `concurrency` at once.

    Args:
        queue: client of the stack's queue; stays open.
        telemetry: of this process; stays open.
        agent: runs the attempts (job.py).
        concurrency: attempts that run at once.
        worker_id: of the claims; None: `new_worker_id()`.
        heartbeat_seconds: interval of heartbeats, which also carry cancellations to the runner; 0 or below: none are sent.
        heartbeat_jitter_seconds: maximal deviation from that interval, capped at half of it.
        snapshot: takes the system statistics of each heartbeat; None: a new SystemSnapshot.
        snapshot_in_thread: whether it runs in a thread instead of the event loop.
        modes: claim only rollouts of these modes; empty: all.
        labels: claim only rollouts with all of these labels.
        max_rollouts: stop after claiming this many; None: unlimited.
        on_event: called in the event loop when an attempt starts and when it is completed.
        token: bearer token of the stack.
        grace_seconds: how long running attempts may go on after `stop`.
        claim: replaces the queue's claim: (limit) → rollouts.
        output_seconds: interval at which the output of running agents is stored; 0 or below: only when they end.
        timeout_seconds: time limit of an attempt, where its rollout has no shorter one; None: the rollout's alone.
    """

    _ledgers: Ledgers
    _logs: LogExporter
    _roots: RootSpans
    _completion: Completion
    """These four are opened by `run`."""

    def __init__(
        self,
        queue: QueueClient,
        telemetry: Telemetry,
        agent: Agent,
        *,
        concurrency: int = 8,
        worker_id: str | None = None,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        heartbeat_jitter_seconds: float = HEARTBEAT_JITTER_SECONDS,
        snapshot: SystemSnapshot | None = None,
        snapshot_in_thread: bool = True,
        modes: Sequence[RolloutMode] = (),
        labels: Mapping[str, str] | None = None,
        max_rollouts: int | None = None,
        on_event: Callable[[RunnerEvent], None] | None = None,
        token: str = "",
        grace_seconds: float = GRACE_SECONDS,
        claim: Claim | None = None,
        output_seconds: float = OUTPUT_SECONDS,
        timeout_seconds: float | None = None,
    ) -> None:
        if concurrency < 1:
            raise UsageError(f"concurrency is {concurrency}: a runner needs at least 1")
        self.worker_id = worker_id or new_worker_id()
        self.counts: Counter[str] = Counter()
        """By claimed; succeeded, failed, timeout, cancelled; fenced, abandoned, refused; and errors by step."""
        self._queue, self._telemetry, self._agent = queue, telemetry, agent
        self._concurrency, self._max_rollouts = concurrency, max_rollouts
        self._modes, self._labels = list(modes), dict(labels or {})
        self._heartbeat_seconds, self._heartbeat_jitter_seconds = heartbeat_seconds, heartbeat_jitter_seconds
        self._snapshot, self._snapshot_in_thread = snapshot or SystemSnapshot(), snapshot_in_thread
        self._grace_seconds = grace_seconds
        self._on_event, self._token, self._claim_with = on_event, token, claim or self._claim_next
        self._output_seconds, self._timeout_seconds = output_seconds, timeout_seconds
        self._runs: dict[str, Run] = {}  # by attempt id, from claim until the agent has ended
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()  # an agent has ended, so a slot is free, or an attempt was completed
        self._resources: dict[tuple[str, int | None], NamedResources] = {}
        self._description: Describe | None = None
        self._certificates: Certificates | None = None
        self._addresses: Addresses | None = None

    async def run(self, stop: asyncio.Event) -> Counter[str]:
        """Run until `max_rollouts` are done, or until `stop` is set and running attempts finished or used up the grace period.

        Returns the counts. Cancelling this ends every agent immediately. Raises UnavailableError where no stack is found.
        """
        addresses = await retry_unavailable(self._find_stack, seconds=FIND_STACK_SECONDS)
        self._prepare(addresses)
        self._ledgers = self._open_ledgers()
        self._logs = LogExporter(addresses.collector_grpc, token=self._token)
        self._roots = RootSpans(addresses.collector_grpc, self._telemetry.resource, token=self._token)
        self._completion = Completion(self._queue, self._telemetry, self._logs, self._proxies, self.counts, self._ended, token=self._token)
        ending = asyncio.Event()
        orphans = asyncio.create_task(report_orphaned(self._ledgers, self._completion, ending, last_seconds=COMPLETE_SECONDS))
        background = [asyncio.create_task(self._completion.run()), orphans]
        if self._heartbeat_seconds > 0:
            background.append(asyncio.create_task(self._heartbeats()))
        try:
            await self._claim_until(stop)
            await self._wait_for_runs(stop)
            await self._finish()
            ending.set()
            await asyncio.wait({orphans}, timeout=COMPLETE_SECONDS)
        finally:
            for run in self._runs.values():
                run.end("stopped")
            for task in [*background, *self._tasks]:
                task.cancel()
            await asyncio.gather(*background, *self._tasks, return_exceptions=True)
            self._ledgers.close()
            if isinstance(self._agent, ClosingAgent):
                await self._agent.close()
            await self._logs.close()
            await self._roots.close()
        return self.counts

    # --- claiming

    async def _claim_until(self, stop: asyncio.Event) -> None:
        stopping = asyncio.create_task(stop.wait())
        try:
            while not stop.is_set() and (limit := await self._free_slots(stopping)) > 0:
                claimed = await self._claim(limit, stopping)
                if not claimed:
                    continue
                if stop.is_set():
                    with contextlib.suppress(AglError):  # otherwise the queue's watchdog times them out
                        await self._queue.release(claimed)
                else:
                    self.counts["claimed"] += len(claimed)
                    for rollout in claimed:
                        self._runs[rollout.attempt.attempt_id] = Run(rollout, self._timeout_seconds)
                    self._spawn(self._start(claimed))
        finally:
            stopping.cancel()

    async def _free_slots(self, stopping: asyncio.Task[bool]) -> int:
        """Wait for free slots; return how many rollouts to claim. 0: `max_rollouts` reached, or stopping."""
        while not stopping.done():
            left = self._concurrency if self._max_rollouts is None else self._max_rollouts - self.counts["claimed"]
            if left <= 0:
                return 0
            if (free := self._concurrency - len(self._runs)) > 0:
                return min(free, left)
            self._changed.clear()
            changed = asyncio.create_task(self._changed.wait())
            await asyncio.wait({changed, stopping}, return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
        return 0

    async def _claim_next(self, limit: int) -> list[AttemptedRollout]:
        return await self._queue.claim(
            limit, worker_id=self.worker_id, wait_seconds=CLAIM_WAIT_SECONDS, modes=self._modes, labels=self._labels
        )

    async def _claim(self, limit: int, stopping: asyncio.Task[bool]) -> list[AttemptedRollout]:
        claim = asyncio.ensure_future(self._claim_with(limit))
        try:
            await asyncio.wait({claim, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return claim.result() if claim.done() else []
        except AglError as error:
            self.counts["claim_errors"] += 1
            _log.warning("nothing could be claimed: %s", error)
            await asyncio.wait({stopping}, timeout=CLAIM_RETRY_SECONDS)
            return []
        finally:
            claim.cancel()  # the client releases rollouts that the queue has already handed out

    # --- running

    async def _start(self, claimed: Sequence[AttemptedRollout]) -> None:
        """Fetch the resources and export the root span of each claimed attempt, then start its agent. Errors fail the attempts."""
        keys = [(r.rollout_id, r.attempt.attempt_id) for r in claimed]
        hooked = isinstance(self._agent, HookedAgent) and self._agent.hooked
        try:
            addresses = await retry_unavailable(self._find_stack, seconds=START_RETRY_SECONDS)
            self._prepare(addresses)
            resources = await self._resources_of_all(claimed)
            ledgers = await self._create_ledgers(keys)
            parents = await self._roots.export(keys, hooked=hooked, seconds=START_RETRY_SECONDS)
        except Exception as error:  # noqa: BLE001 - boundary: a failed start must never stop the runner
            if not isinstance(error, AglError):
                self.counts["start_errors"] += 1
                _log.exception("claimed attempts could not be started")
            for rollout in claimed:
                self._not_started(Job(rollout, {}, Addresses("", ""), ""), error)
            return
        for rollout, found, parent in zip(claimed, resources, parents, strict=True):
            job = Job(rollout, {}, addresses, parent, self._token, ledgers)
            if isinstance(found, BaseException):
                self._not_started(job, found)
            else:
                job.resources = found
                self._spawn(self._run(job))

    def _prepare(self, addresses: Addresses) -> None:
        if addresses != self._addresses:  # before the first attempt, and after the stack moved
            self._addresses = addresses
            self._agent.prepare(addresses)

    def _open_ledgers(self) -> Ledgers:
        try:
            ledgers = Ledgers(self._agent.reach, self._agent.description) if isinstance(self._agent, RecordedAgent) else Ledgers()
        except OSError as error:
            raise UsageError(f"the folder in which agents' processes count their spans cannot be used: {error}") from None
        self._telemetry.keep_records(ledgers.root)
        if not isinstance(self._agent, RecordedAgent):
            os.environ[conventions.ENV_LEDGER] = str(ledgers.root)  # for processes that the agent starts from this one
        return ledgers

    async def _create_ledgers(self, keys: Sequence[tuple[str, str]]) -> Ledgers | None:
        """Create the ledgers of these attempts; None where that fails, which leaves the attempts without span counts."""
        try:
            await asyncio.to_thread(self._ledgers.create, keys)
        except OSError as error:
            self.counts["ledger_errors"] += 1
            _log.error("the spans of %d attempts are not counted, so their verdicts cannot be complete: %s", len(keys), error)
            return None
        return self._ledgers

    def _not_started(self, job: Job, error: BaseException) -> None:
        self._end(Ended(job, "failed", f"the attempt could not be started: {error}"))

    async def _run(self, job: Job) -> None:
        """Run one attempt and pass the result to completion."""
        run = self._runs[job.attempt_id]
        self._event(RunnerEvent("started", *job.key))
        over = asyncio.Event()
        output = asyncio.create_task(self._store_output(job, over))
        try:
            ended = await run.supervise(self._agent, job)
            if job.returned:
                await self._take_returned(job, ended)
            job.over = job.over or time.time()
            over.set()
            await output
        finally:
            output.cancel()
        if run.abandoned:
            self.counts["abandoned"] += 1
        self._end(ended)

    async def _take_returned(self, job: Job, ended: Ended) -> None:
        try:
            await asyncio.to_thread(self._telemetry.take, job.key, job.returned)
        except Exception as error:  # noqa: BLE001 - boundary: spans from user code may hold anything
            _log.exception("spans that the agent of attempt %s returned cannot be taken", job.attempt_id)
            ended.status, ended.error = "failed", f"the spans that the agent returned cannot be taken: {type(error).__name__}: {error}"

    async def _store_output(self, job: Job, over: asyncio.Event) -> None:
        """Store the agent's output while it runs; completion stores the rest."""
        while self._output_seconds > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._output_seconds):
                    await over.wait()
            if over.is_set():
                return
            try:
                await self._logs.export([AttemptOutput(*job.key, job.traceparent, job.captures, final=False)])
            except AglError as error:
                self.counts["output_errors"] += 1
                _log.warning("the output of attempt %s is stored later: %s", job.attempt_id, error)

    def _end(self, ended: Ended) -> None:
        self._runs.pop(ended.job.attempt_id, None)
        self._changed.set()
        self._completion.put(ended)

    def _ended(self, ended: Ended) -> None:
        self.counts["cancelled" if not ended.report else ended.status] += 1
        self._changed.set()
        self._event(RunnerEvent("ended", *ended.job.key, outcome_of(ended), ended.error, ended.seconds, ended.spans, ended.reward))

    async def _resources_of_all(self, claimed: Sequence[AttemptedRollout]) -> list[NamedResources | BaseException]:
        """Return the resources of each, or the exception. If all are cached, no task is created."""
        if all(r.resources_id is None or (r.resources_id, r.resources_version) in self._resources for r in claimed):
            return [await self._resources_of(rollout) for rollout in claimed]
        return await asyncio.gather(*map(self._resources_of, claimed), return_exceptions=True)

    async def _resources_of(self, rollout: AttemptedRollout) -> NamedResources:
        if rollout.resources_id is None:
            return {}
        key = (rollout.resources_id, rollout.resources_version)
        if key not in self._resources:
            update = await retry_unavailable(lambda: self._queue.get_resources(key[0], version=key[1]), seconds=START_RETRY_SECONDS)
            if update is None:
                raise AgentError(f"the queue has no resources {key[0]} version {key[1]}, which rollout {rollout.rollout_id} asks for")
            while len(self._resources) >= _RESOURCES_CACHE_SIZE:
                self._resources.pop(next(iter(self._resources)))
            self._resources[key] = update.resources
        return self._resources[key]

    # --- heartbeats, discovery and stopping

    async def _heartbeats(self) -> None:
        while True:
            try:
                await self._heartbeat()
            except AglError as error:
                self.counts["heartbeat_errors"] += 1
                _log.warning("heartbeat failed: %s", error)
            except Exception:  # noqa: BLE001 - boundary: without heartbeats the runner would lose its attempts
                self.counts["heartbeat_errors"] += 1
                _log.exception("heartbeat failed")
            await asyncio.sleep(pause_seconds(self._heartbeat_seconds, self._heartbeat_jitter_seconds))

    async def _heartbeat(self) -> None:
        system = await asyncio.to_thread(self._snapshot.take) if self._snapshot_in_thread else self._snapshot.take()
        stats = {**system, **self.counts, "running": len(self._runs), "concurrency": self._concurrency}
        ended = await self._queue.heartbeat(self.worker_id, stats=stats, attempt_ids=[*self._runs, *self._completion.pending])
        for attempt_id in ended:
            if attempt_id in self._runs:
                self._runs[attempt_id].end("cancelled")
        self._description = await self._queue.describe()

    async def _find_stack(self) -> Addresses:
        """Return the stack's addresses. Raises UnavailableError while there is no collector."""
        if self._description is None or self._description.collector_grpc is None:
            self._description = await self._queue.describe()
        if self._certificates is None:  # cached: loading them reads settings files, which would delay every start
            self._certificates = certificates(ambient())
        addresses = Addresses.of(self._description, self._certificates)
        if addresses is None:
            raise UnavailableError(f"the queue at {self._description.queue} knows no collector: start the stack with `agl-otel up`")
        return addresses

    async def _proxies(self) -> Sequence[str]:
        """Ask the queue for the proxies, since a new one may have served an attempt; where it is unavailable, the last known ones."""
        with contextlib.suppress(AglError):
            self._description = await self._queue.describe()
        return self._description.proxies if self._description else ()

    async def _wait_for_runs(self, stop: asyncio.Event) -> None:
        """Wait until all running attempts have ended, without a time limit, or until `stop` is set."""
        waits = {asyncio.create_task(self._all_ended()), asyncio.create_task(stop.wait())}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _finish(self) -> None:
        """Give running attempts the grace period, end the rest, and wait, at most COMPLETE_SECONDS, until all are completed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._grace_seconds):
                await self._all_ended()
        for run in list(self._runs.values()):
            run.end("stopped")
        try:
            async with asyncio.timeout(COMPLETE_SECONDS):
                await self._all_ended()
                await self._completion.drained()
        except TimeoutError:
            _log.error("the runner stops before these attempts were reported: %s", [*self._runs, *self._completion.pending])

    async def _all_ended(self) -> None:
        while self._runs:
            self._changed.clear()
            await self._changed.wait()

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _event(self, event: RunnerEvent) -> None:
        if self._on_event is None:
            return
        try:
            self._on_event(event)
        except Exception:  # noqa: BLE001 - boundary: an observer's error must never stop the runner
            self.counts["event_errors"] += 1
            _log.exception("on_event failed")
