"""The runner: claims rollouts, has an agent run each, brings them to their end.

    claimed = queue.claim(free places)           # long poll
    roots.export(claimed)                        # one export, acked: every trace is known before its agent starts
    agent.run(job) for each, at once
    completion: close, seal, complete            # completion.py, in batches

A bad rollout is data about that rollout; it never stops the runner. A place is free again as soon as its agent has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
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
from agl_otel.queue.client import AttemptUpdate, QueueClient
from agl_otel.runner.certificates import Certificates, certificates
from agl_otel.runner.completion import Completion, Ended, closing_session, persist
from agl_otel.runner.environment import Addresses
from agl_otel.runner.job import Agent, ClosingAgent, HookedAgent, Job, RecordedAgent
from agl_otel.runner.ledgers import Ledgers, Left
from agl_otel.runner.output import LogExporter, Printed
from agl_otel.runner.roots import RootSpans
from agl_otel.runner.running import Run, RunnerEvent, outcome_of
from agl_otel.runner.snapshot import SystemSnapshot, pause_seconds
from agl_otel.telemetry.setup import Telemetry
from agl_otel.types import AttemptedRollout, Describe, NamedResources, RolloutMode
from agl_otel_hook import conventions

HEARTBEAT_SECONDS: Final = 5.0  # a cancellation reaches the agent about this late
HEARTBEAT_JITTER_SECONDS: Final = 0.5  # runners that were started together do not beat together
CLAIM_WAIT_SECONDS: Final = 20.0  # one long poll
CLAIM_RETRY_SECONDS: Final = 1.0
OUTPUT_SECONDS: Final = 2.0
GRACE_SECONDS: Final = 30.0  # for what runs, when the runner is told to stop
START_RETRY_SECONDS: Final = 60.0  # how long the collector or queue may be away before claimed attempts fail
FIND_STACK_SECONDS: Final = 60.0
LEFT_SECONDS: Final = 5.0  # between two looks for ledgers of runners that died
LEFT_LOOKS: Final = 12  # so often; and from then on
LEFT_LONG_SECONDS: Final = 60.0
_RESOURCES_KEPT: Final = 256
Claim = Callable[[int], Awaitable[list[AttemptedRollout]]]
_log = logging.getLogger(__name__)


def new_worker_id() -> str:
    """Host, process and chance."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"


class Runner:
    """Runs `agent` for the rollouts of `queue`, up to `concurrency` at once.

    Args:
        queue: client of the stack's queue; stays open.
        telemetry: of this process; stays open.
        agent: what to run (agents.py).
        worker_id: who claims; None makes one of host, process and chance.
        heartbeat_seconds: how often the queue hears from us, and we of cancellations; 0 or below: never.
        heartbeat_jitter_seconds: by how much the time between two heartbeats varies; half of it at most.
        snapshot: of the machine, told with each heartbeat; None makes one.
        snapshot_in_thread: whether the snapshot is taken beside the event loop.
        modes: only rollouts of these modes; empty: all.
        labels: only rollouts that carry all of these.
        max_rollouts: stop after so many were claimed; None: never.
        on_event: called in the event loop when an attempt starts and when it is done with.
        token: what collector and proxy ask for.
        grace_seconds: how long what runs may go on after `stop`.
        claim: instead of the queue's own claim: (limit) → rollouts.
        output_seconds: how often what a running agent has printed is stored; 0 or below: only at its end.
        timeout_seconds: how long an attempt may run, where its rollout does not ask for less; None: as long as the rollout says.
    """

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
            raise UsageError(f"concurrency is {concurrency}: a runner needs at least one place")
        self.worker_id = worker_id or new_worker_id()
        self.counts: Counter[str] = Counter()
        """claimed; succeeded, failed, timeout, cancelled; fenced, abandoned, and the errors of each step."""
        self._queue, self._telemetry, self._agent = queue, telemetry, agent
        self._concurrency, self._max_rollouts = concurrency, max_rollouts
        self._modes, self._labels = list(modes), dict(labels or {})
        self._heartbeat_seconds, self._heartbeat_jitter_seconds = heartbeat_seconds, heartbeat_jitter_seconds
        self._snapshot, self._snapshot_in_thread = snapshot or SystemSnapshot(), snapshot_in_thread
        self._grace_seconds = grace_seconds
        self._on_event, self._token, self._claim_with = on_event, token, claim or self._claim_next
        self._output_seconds, self._timeout_seconds = output_seconds, timeout_seconds
        self._logs: LogExporter | None = None
        self._roots: RootSpans | None = None
        self._runs: dict[str, Run] = {}  # by attempt id, from the claim to the end of the agent
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._resources: dict[tuple[str, int | None], NamedResources] = {}
        self._description: Describe | None = None
        self._certificates: Certificates | None = None
        self._addresses: Addresses | None = None
        self._completion: Completion | None = None
        self._ledgers: Ledgers | None = None

    async def run(self, stop: asyncio.Event) -> Counter[str]:
        """Run until `max_rollouts` are done or `stop` is set; what runs then is finished within the grace. Returns the counts.

        Cancelling this ends every agent at once. Raises UnavailableError where no stack is found.
        """
        addresses = await persist(self._find_stack, seconds=FIND_STACK_SECONDS)
        self._prepare(addresses)
        ledgers = self._ledgers = self._own_ledgers()
        logs = self._logs = LogExporter(addresses.collector_grpc, token=self._token)
        roots = self._roots = RootSpans(addresses.collector_grpc, self._telemetry.resource, token=self._token)
        completion = Completion(self._queue, self._telemetry, logs, self._proxies, self.counts, self._ended, token=self._token)
        self._completion = completion
        background = [asyncio.create_task(completion.run()), asyncio.create_task(self._hand_in_left(ledgers, completion))]
        if self._heartbeat_seconds > 0:
            background.append(asyncio.create_task(self._heartbeats()))
        try:
            await self._claim_until(stop)
            await self._until_ended(stop)
            await self._finish()
        finally:
            for run in self._runs.values():
                run.end("stopped")
            for task in [*background, *self._tasks]:
                task.cancel()
            await asyncio.gather(*background, *self._tasks, return_exceptions=True)
            ledgers.close()
            if isinstance(self._agent, ClosingAgent):
                await self._agent.close()
            await logs.close()
            await roots.close()
        return self.counts

    async def _begun(self, ledgers: Ledgers, keys: Sequence[tuple[str, str]]) -> Ledgers | None:
        """The ledgers with folders for these attempts; None where there can be none, which leaves the attempts without a proof."""
        try:
            await asyncio.to_thread(ledgers.begin, keys)
        except OSError as error:
            self.counts["ledger_errors"] += 1
            _log.error("what %d attempts do is not counted, so they cannot be complete: %s", len(keys), error)
            return None
        return ledgers

    def _own_ledgers(self) -> Ledgers:
        assert self._description is not None, "the stack was found"
        store = self._description.queue or ""
        recorded = isinstance(self._agent, RecordedAgent)
        try:
            ledgers = Ledgers(store, self._agent.reach, self._agent.shown) if isinstance(self._agent, RecordedAgent) else Ledgers(store)
        except OSError as error:
            raise UsageError(f"a runner needs a folder in which its agents' processes count their spans: {error}") from None
        self._telemetry.keep_records(ledgers.root)
        if not recorded:
            os.environ[conventions.ENV_LEDGER] = str(ledgers.root)  # of what the agent starts from this process
        return ledgers

    async def _hand_in_left(self, ledgers: Ledgers, completion: Completion) -> None:
        """Hand in the ledgers of runners that died, as soon as the processes of their attempts are gone."""
        for look in itertools.count(1):
            try:
                left = await asyncio.to_thread(ledgers.left)
                if left:
                    await self._hand_in(left, completion)
                for each in left:
                    await asyncio.to_thread(ledgers.forget_left, each)
            except Exception:  # noqa: BLE001 - the boundary: what others left never stops a runner
                self.counts["ledger_errors"] += 1
                _log.exception("what other runners left could not be handed in")
            await asyncio.sleep(LEFT_SECONDS if look < LEFT_LOOKS else LEFT_LONG_SECONDS)

    async def _hand_in(self, left: Sequence[Left], completion: Completion) -> None:
        """Hand these in, and close their attempts at the proxies, as their runner would have done. What it has handed in itself stays."""
        attempts = await persist(lambda: self._queue.query_attempts(sorted({each.rollout_id for each in left})))
        known = {attempt.attempt_id for attempt in attempts if attempt.ledger is not None}
        ledgers = {(each.rollout_id, each.attempt_id): each.ledger for each in left if each.attempt_id not in known}
        if not ledgers:
            return
        async with closing_session() as session:
            seals = await completion.close(session, [*ledgers])
        updates = [
            AttemptUpdate(rollout_id=key[0], attempt_id=key[1], ledger=ledger, seals=seals.get(key, {})) for key, ledger in ledgers.items()
        ]
        for update, error in zip(updates, await persist(lambda: self._queue.report(updates)), strict=True):
            if error is not None:
                _log.warning("the ledger of attempt %s was not taken: %s", update.attempt_id, error)

    # --- claiming

    async def _claim_until(self, stop: asyncio.Event) -> None:
        stopping = asyncio.create_task(stop.wait())
        try:
            while not stop.is_set() and (limit := await self._places(stopping)) > 0:
                claimed = await self._claim(limit, stopping)
                if stop.is_set():
                    with contextlib.suppress(AglError):  # or the watchdog finds them
                        await self._queue.release(claimed)
                elif claimed:
                    self.counts["claimed"] += len(claimed)
                    for rollout in claimed:
                        self._runs[rollout.attempt.attempt_id] = Run(rollout, self._timeout_seconds)
                    self._spawn(self._start(claimed))
        finally:
            stopping.cancel()

    async def _places(self, stopping: asyncio.Task[bool]) -> int:
        """Wait for free places; how many may be claimed now. 0: no more, or time to stop."""
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
            claim.cancel()  # the client gives back what the queue had given already

    # --- running

    async def _start(self, claimed: Sequence[AttemptedRollout]) -> None:
        """Give each claimed attempt its resources and its root span, then its agent. What fails here fails the attempts."""
        assert self._roots is not None
        keys = [(r.rollout_id, r.attempt.attempt_id) for r in claimed]
        ledgers = self._ledgers
        hooked = isinstance(self._agent, HookedAgent) and self._agent.hooked
        try:
            addresses = await persist(self._find_stack, seconds=START_RETRY_SECONDS)
            self._prepare(addresses)
            resources = await self._resources_of_all(claimed)
            if ledgers is not None:
                ledgers = await self._begun(ledgers, keys)
            parents = await self._roots.export(keys, hooked=hooked, seconds=START_RETRY_SECONDS)
        except AglError as error:
            for rollout in claimed:
                self._not_started(Job(rollout, {}, Addresses("", ""), ""), error)
            return
        except Exception as error:  # noqa: BLE001 - the boundary: a claim that cannot be started never stops the runner
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
        if addresses != self._addresses:  # at first, and when the stack has moved
            self._addresses = addresses
            self._agent.prepare(addresses)

    def _not_started(self, job: Job, error: BaseException) -> None:
        self._end(Ended(job, "failed", f"the attempt could not be started: {error}"))

    async def _run(self, job: Job) -> None:
        """Run one attempt to its end, whatever that is."""
        run = self._runs[job.attempt_id]
        self._event(RunnerEvent("started", *job.key))
        over = asyncio.Event()
        output = asyncio.create_task(self._store_output(job, over))
        try:
            ended = await run.supervise(self._agent, job)
            job.over = job.over or time.time()
            over.set()
            await output
        finally:
            output.cancel()
        if run.abandoned:
            self.counts["abandoned"] += 1
        self._end(ended)

    async def _store_output(self, job: Job, over: asyncio.Event) -> None:
        """Store what the agent prints while it runs; the rest is stored with its end."""
        assert self._logs is not None
        while self._output_seconds > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._output_seconds):
                    await over.wait()
            if over.is_set():
                return
            try:
                await self._logs.export([Printed(*job.key, job.traceparent, job.captures, final=False)])
            except AglError as error:
                self.counts["output_errors"] += 1
                _log.warning("output is stored later: %s", error)

    def _end(self, ended: Ended) -> None:
        assert self._completion is not None
        self._runs.pop(ended.job.attempt_id, None)
        self._changed.set()
        self._completion.put(ended)

    def _ended(self, ended: Ended) -> None:
        self.counts["cancelled" if not ended.report else ended.status] += 1
        self._changed.set()
        self._event(RunnerEvent("ended", *ended.job.key, outcome_of(ended), ended.error, ended.seconds, ended.spans, ended.reward))

    async def _resources_of_all(self, claimed: Sequence[AttemptedRollout]) -> list[NamedResources | BaseException]:
        """The resources of each, or why there are none. Where all are at hand this neither waits nor makes a task."""
        if all(r.resources_id is None or (r.resources_id, r.resources_version) in self._resources for r in claimed):
            return [await self._resources_of(rollout) for rollout in claimed]
        return await asyncio.gather(*map(self._resources_of, claimed), return_exceptions=True)

    async def _resources_of(self, rollout: AttemptedRollout) -> NamedResources:
        if rollout.resources_id is None:
            return {}
        key = (rollout.resources_id, rollout.resources_version)
        if key not in self._resources:
            update = await persist(lambda: self._queue.get_resources(key[0], version=key[1]), seconds=START_RETRY_SECONDS)
            if update is None:
                raise AgentError(f"the queue has no resources {key[0]} version {key[1]}, which rollout {rollout.rollout_id} asks for")
            while len(self._resources) >= _RESOURCES_KEPT:
                self._resources.pop(next(iter(self._resources)))
            self._resources[key] = update.resources
        return self._resources[key]

    # --- beside it

    async def _heartbeats(self) -> None:
        while True:
            try:
                await self._heartbeat()
            except AglError as error:
                self.counts["heartbeat_errors"] += 1
                _log.warning("no heartbeat: %s", error)
            except Exception:  # noqa: BLE001 - the boundary: a runner without heartbeats would lose its attempts
                self.counts["heartbeat_errors"] += 1
                _log.exception("no heartbeat")
            await asyncio.sleep(pause_seconds(self._heartbeat_seconds, self._heartbeat_jitter_seconds))

    async def _heartbeat(self) -> None:
        system = await asyncio.to_thread(self._snapshot.take) if self._snapshot_in_thread else self._snapshot.take()
        stats = {**system, **self.counts, "running": len(self._runs), "concurrency": self._concurrency}
        pending = self._completion.pending if self._completion else {}
        ended = await self._queue.heartbeat(self.worker_id, stats=stats, attempt_ids=[*self._runs, *pending])
        for attempt_id in ended:
            if attempt_id in self._runs:
                self._runs[attempt_id].end("cancelled")
        self._description = await self._queue.describe()

    async def _find_stack(self) -> Addresses:
        """Where the stack is. Raises UnavailableError while there is no collector."""
        if self._description is None or self._description.collector_grpc is None:
            self._description = await self._queue.describe()
        if self._certificates is None:  # once: the settings are read from the environment and a file, which every start would wait for
            self._certificates = certificates(ambient())
        addresses = Addresses.of(self._description, self._certificates)
        if addresses is None:
            raise UnavailableError(f"the queue at {self._description.queue} knows no collector: start the stack with `agl-otel up`")
        return addresses

    async def _proxies(self) -> Sequence[str]:
        """Those of now: one that is newer than the last heartbeat may have served an attempt. The known ones, where the queue is away."""
        with contextlib.suppress(AglError):
            self._description = await self._queue.describe()
        return self._description.proxies if self._description else ()

    async def _until_ended(self, stop: asyncio.Event) -> None:
        """Enough was claimed: what runs may take its time, unless somebody says stop."""
        waits = {asyncio.create_task(self._all_ended()), asyncio.create_task(stop.wait())}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _finish(self) -> None:
        """Let what runs finish within the grace, end the rest, and bring all of it to its end."""
        assert self._completion is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._grace_seconds):
                await self._all_ended()
        for run in list(self._runs.values()):
            run.end("stopped")
        try:
            async with asyncio.timeout(self._grace_seconds):
                await self._all_ended()
                await self._completion.drained()
        except TimeoutError:
            _log.error("the runner stops with results that nobody took: attempts %s", [*self._runs, *self._completion.pending])

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
        except Exception:  # noqa: BLE001 - the boundary: who watches never stops what is watched
            self.counts["event_errors"] += 1
            _log.exception("on_event failed")
