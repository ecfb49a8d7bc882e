"""The servicer of queue.proto: each call is one operation on the engine, or waits until the engine's signals wake it.

Waiting, cancellation and the mapping of errors to statuses belong here; rules about rollouts do not (operations/, lifecycle.py).
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import grpc
import grpc.aio

from agl_otel.errors import AglError, UnavailableError, grpc_status
from agl_otel.net.auth import authorization_of, is_token_itself
from agl_otel.queue import lifecycle
from agl_otel.queue.batcher import RequestBatcher
from agl_otel.queue.convert import ITEMS, rollouts_pb
from agl_otel.queue.engine import Engine, Transaction
from agl_otel.queue.operations import admin, claim, complete, enqueue, observe, query
from agl_otel.queue.proto import queue_pb2 as pb
from agl_otel.queue.waiters import ALL, ClaimWaiter, Waiters
from agl_otel.telemetry.meters import Meters

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]
CHUNK_ITEMS: Final = 256  # items in one message of a stream
HAND_OFFS: Final = 16  # claims that one enqueue serves in its own transaction; further ones are woken after it
CHUNK_BYTES: Final = 8 << 20  # of one message of a stream that holds several items: other calls are served between two messages
WRITES: Final[dict[str, Callable[[Transaction, Any, float], Any]]] = {
    "Start": enqueue.start,
    "StartAttempt": enqueue.start_attempt,
    "Release": claim.release,
    "UpdateRollouts": admin.update_rollouts,
    "Delete": admin.delete,
    "Observe": observe.observe,
    "TakeSequence": observe.take_sequence,
    "Witness": observe.witness,
    "PutResources": admin.put_resources,
    "Heartbeat": observe.heartbeat,
    "Lease": admin.lease,
}
"""Calls that run one writing operation."""
READS: Final[dict[str, Callable[[Transaction, Any], Any]]] = {
    "QueryRuns": query.query_runs,
    "QueryRunMembers": query.query_run_members,
}
"""Calls that run one reading operation and return one message."""
STREAMS: Final[dict[str, Callable[[Transaction, Any], Any]]] = {
    "StreamRollouts": query.query_rollouts,
    "StreamAttempts": query.query_attempts,
    "StreamResources": query.query_resources,
    "StreamWorkers": query.query_workers,
}
"""Calls that run one reading operation and return its answer in parts."""
_log = logging.getLogger(__name__)


class QueueService:
    """A servicer of queue.proto on one engine.

    `clock` returns Unix seconds; `meters` are the service's metrics, for Statistics; only callers with `token` get providers' API keys.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        version: str = "",
        clock: Callable[[], float] = time.time,
        meters: Meters | None = None,
        token: str = "",
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._version = version
        self._token = token
        self._started = clock()
        self._meters = meters or Meters()
        self._meters.gauge("agl.queue.claims_waiting", "Claims that wait for a rollout.", lambda: [({}, self.claims_waiting)])
        self._waiters = Waiters()
        self._claims: RequestBatcher[pb.ClaimRequest, pb.Rollouts] = RequestBatcher(
            engine, lambda tx, requests: claim.claim_all(tx, requests, self._clock())
        )
        self._updates: RequestBatcher[pb.UpdateAttemptsRequest, pb.Attempts] = RequestBatcher(
            engine, lambda tx, requests: complete.update_all(tx, requests, self._clock())
        )
        self._abandoned: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self.address = ""
        for name, operation in WRITES.items():
            setattr(self, name, partial(self._write, operation))
        for name, operation in READS.items():
            setattr(self, name, partial(self._read, operation))
        for name, operation in STREAMS.items():
            setattr(self, name, partial(self._read_in_parts, operation))
        engine.subscribe(self._waiters.on_signals)

    @property
    def claims_waiting(self) -> int:
        """How many claims wait for a rollout."""
        return self._waiters.claims_waiting

    @property
    def claims_idle(self) -> int:
        """How many claims are only waiting: their first try found nothing, and no hand-off has begun."""
        return self._waiters.claims_idle

    @property
    def awaited(self) -> int:
        """How many rollouts Wait calls wait for."""
        return self._waiters.awaited

    async def sweep(self) -> int:
        """Run one round of the watchdog and wake claims for claimable rollouts; return how many attempts it timed out."""
        given_up = await self._engine.write(lambda tx: admin.sweep(tx, self._clock()))
        if waiting := self._waiters.claims_waiting:  # a lost wake-up costs at most one round
            count = await self._engine.read(lambda tx: int(tx.rows("claimable_count", {"limit": waiting})[0][0]))
            self._waiters.wake_claims(count)
        return given_up

    def stop_waiting(self) -> None:
        """End all waiting Claim and Wait calls."""
        self._stopping.set()
        self._waiters.wake_claims(ALL)

    async def drain(self) -> None:
        """Wait until the claims of vanished callers are put back."""
        await asyncio.gather(*self._abandoned)

    # --- calls that wait

    async def Enqueue(self, request: pb.EnqueueRequest, context: Context) -> pb.Rollouts:  # noqa: N802 - the wire's name
        """Enqueue rollouts. Waiting claims are served in the same transaction, so that enqueue and claim share one sync to disk."""
        if waiters := self._waiters.begin_hand_off(request.rollouts, HAND_OFFS):
            asked = [waiter.request for waiter in waiters]
            writing = self._engine.write(lambda tx: enqueue.enqueue_and_claim(tx, request, asked, self._clock()))
            writing.add_done_callback(partial(_hand_off, waiters))  # even if the caller disconnects
            try:
                return (await asyncio.shield(writing))[0]
            except Exception as error:  # noqa: BLE001 - a claim may have failed: below, each call gets its own outcome
                _log.debug("an enqueue is tried again without the claims that wait", exc_info=error)
        try:
            return await self._engine.write(lambda tx: enqueue.enqueue(tx, request, self._clock()))
        except AglError as error:
            return await _abort(context, error)

    async def Claim(self, request: pb.ClaimRequest, context: Context) -> pb.Rollouts:  # noqa: N802 - the wire's name
        """Claim the next rollouts; none after `wait_seconds` without any."""
        try:
            return await self._claim(request)
        except AglError as error:
            return await _abort(context, error)

    async def Wait(self, request: pb.WaitRequest, context: Context) -> AsyncIterator[pb.Rollouts]:  # noqa: N802 - the wire's name
        """Stream rollouts as they finish; the first answer may be empty, and tells the client that somebody listens."""
        ids = [*dict.fromkeys(request.rollout_ids)]
        settled_ids = self._waiters.listen(ids)
        try:
            timeout = request.timeout_seconds if request.HasField("timeout_seconds") else None
            async for rollouts in self._finished(ids, settled_ids, timeout):
                for chunk in _chunks(rollouts):
                    yield pb.Rollouts(rollouts=chunk, total=len(chunk))
        except AglError as error:
            await _abort(context, error)
        finally:
            self._waiters.forget(ids, settled_ids)

    # --- calls that many workers make at once

    async def UpdateAttempts(self, request: pb.UpdateAttemptsRequest, context: Context) -> pb.Attempts:  # noqa: N802 - the wire's name
        """Change attempts; return them as changed."""
        try:
            return await self._updates.write(request, request.request_id or uuid.uuid4().hex, complete.weight(request))
        except AglError as error:
            return await _abort(context, error)

    # --- calls to which the service adds its own data

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeResponse:  # noqa: N802 - the wire's name
        """Return the addresses of the services."""
        return self._described(await self._read(lambda tx, _: admin.describe(tx, self._clock(), self._started), request, context))

    async def Announce(self, request: pb.AnnounceRequest, context: Context) -> pb.DescribeResponse:  # noqa: N802 - the wire's name
        """Register or deregister a service."""
        return self._described(await self._write(partial(admin.announce, up_since=self._started), request, context))

    async def Statistics(self, request: pb.StatisticsRequest, context: Context) -> pb.StatisticsResponse:  # noqa: N802 - the wire's name
        """Return counts, uptime and, on request, the service's metrics."""
        answer = await self._read(lambda tx, _: query.statistics(tx, self._clock()), request, context)
        answer.uptime_seconds = self._clock() - self._started
        answer.engine = self._engine.name
        if request.metrics:
            answer.metrics = self._meters.text()
        return answer

    # --- how calls are made

    async def _write(self, operation: Callable[[Transaction, Any, float], T], request: object, context: Context) -> T:
        try:
            return await self._engine.write(lambda tx: operation(tx, request, self._clock()))
        except AglError as error:
            return await _abort(context, error)

    async def _read(self, operation: Callable[[Transaction, Any], T], request: object, context: Context) -> T:
        try:
            answer = await self._engine.read(lambda tx: operation(tx, request))
        except AglError as error:
            return await _abort(context, error)
        if isinstance(answer, pb.ResourcesList) and not self._has_stack_token(context):
            admin.hide_keys(answer)
        return answer

    def _has_stack_token(self, context: Context) -> bool:
        """Whether the caller sent the stack's token itself, as runners and trainers do, and not a token derived from it."""
        return not self._token or is_token_itself(authorization_of(context.invocation_metadata()), self._token)

    async def _read_in_parts(self, operation: Callable[[Transaction, Any], Any], request: object, context: Context) -> Any:
        answer = await self._read(operation, request, context)
        field = ITEMS[type(answer)]
        others = {each.name: value for each, value in answer.ListFields() if each.name != field}
        for chunk in _chunks(getattr(answer, field)):
            yield type(answer)(**{field: chunk}, **others)

    def _described(self, answer: pb.DescribeResponse) -> pb.DescribeResponse:
        answer.version = self._version
        answer.addresses["queue"] = self.address
        return answer

    async def _claim(self, request: pb.ClaimRequest) -> pb.Rollouts:
        deadline = asyncio.get_running_loop().time() + request.wait_seconds
        request.request_id = request.request_id or uuid.uuid4().hex  # a claim is put back by its request id
        waiter = ClaimWaiter(request)
        if request.wait_seconds > 0:
            self._waiters.add(waiter)
        try:
            found = await self._try_claim(waiter)
            while not found.rollouts and request.limit > 0:
                patience = deadline - asyncio.get_running_loop().time()
                if patience <= 0 or self._stopping.is_set():
                    break
                happened = await self._wait_for_work(waiter, patience)
                if waiter.handed is not None:
                    found = await self._claimed(waiter.handed, request)
                    waiter.handed = None
                elif not happened:
                    break
                if not found.rollouts:
                    found = await self._try_claim(waiter)
        finally:
            self._waiters.remove(waiter)
        if not found.rollouts and request.HasField("worker_id"):
            await self._engine.write(lambda tx: claim.record_empty_claim(tx, request.worker_id, self._clock()))
        return found

    async def _wait_for_work(self, waiter: ClaimWaiter, patience: float) -> bool:
        waiter.idle = True
        try:
            async with asyncio.timeout(patience):
                await waiter.event.wait()
        except TimeoutError:
            return False
        except asyncio.CancelledError:
            if waiter.handed is not None:
                self._take_back(waiter.handed, waiter.request.request_id)
            raise
        finally:
            waiter.idle = False
            waiter.event.clear()
        return True

    async def _try_claim(self, waiter: ClaimWaiter) -> pb.Rollouts:
        request = waiter.request
        return await self._claimed(self._claims.write(request, request.request_id, waiter.limit, waiter.kind), request)

    async def _claimed(self, claiming: asyncio.Future[pb.Rollouts], request: pb.ClaimRequest) -> pb.Rollouts:
        """Await a claim; if the caller disconnects meanwhile, put back what it took or may still take."""
        try:
            return await asyncio.shield(claiming)
        except asyncio.CancelledError:
            self._take_back(claiming, request.request_id)
            raise

    def _take_back(self, claiming: asyncio.Future[pb.Rollouts], request_id: str) -> None:
        put_back = asyncio.ensure_future(self._put_back(claiming, request_id))
        self._abandoned.add(put_back)
        put_back.add_done_callback(self._abandoned.discard)

    async def _put_back(self, claiming: asyncio.Future[pb.Rollouts], request_id: str) -> None:
        await asyncio.wait([claiming])  # success or failure: see below
        if claiming.exception() is None and not claiming.result().rollouts:
            return
        try:
            released = await self._engine.write(lambda tx: claim.abandon(tx, request_id, self._clock()))
            _log.info("a claimer went away: %d rollouts were put back", released)
        except AglError as error:
            _log.warning("a claimer went away and its claim %s could not be put back: %s", request_id, error)

    async def _finished(
        self, ids: Sequence[str], settled_ids: asyncio.Queue[str], timeout: float | None
    ) -> AsyncIterator[list[pb.Rollout]]:
        """Yield those that have finished, if only none, then others as they do, until none is open or `timeout` seconds have passed."""
        deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
        open_ids = set(ids)
        asked: Sequence[str] = ids
        while open_ids:
            rollouts = await self._engine.read(partial(_rollouts, rollout_ids=asked))
            finished = [rollout for rollout in rollouts if rollout.status in lifecycle.FINISHED]
            known = {rollout.rollout_id for rollout in rollouts}
            open_ids -= {rollout_id for rollout_id in asked if rollout_id not in known}
            open_ids -= {rollout.rollout_id for rollout in finished}
            if finished or asked is ids:  # the first answer
                yield finished
            asked = []
            while open_ids and not asked:
                patience = None if deadline is None else deadline - asyncio.get_running_loop().time()
                settled = await self._next_settled(settled_ids, patience)
                if settled is None:
                    return
                asked = [rollout_id for rollout_id in settled if rollout_id in open_ids]

    async def _next_settled(self, settled_ids: asyncio.Queue[str], patience: float | None) -> list[str] | None:
        """Wait for settled ids and return all that have arrived; None when time is up. Raises UnavailableError when the service stops."""
        if patience is not None and patience <= 0 and settled_ids.empty():
            return None
        listening = asyncio.ensure_future(settled_ids.get())
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({listening, stopping}, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            if self._stopping.is_set():
                raise UnavailableError("the queue is stopping: wait again when it is back")
            if not listening.done():
                return None
            settled = [listening.result()]
            while not settled_ids.empty():
                settled.append(settled_ids.get_nowait())
            return [*dict.fromkeys(settled)]
        finally:
            listening.cancel()
            stopping.cancel()


def _hand_off(waiters: Sequence[ClaimWaiter], writing: asyncio.Future[tuple[pb.Rollouts, list[pb.Rollouts]]]) -> None:
    """Deliver to each claim what the transaction claimed for it; if it failed, nothing, and each claim tries by itself."""
    failed = writing.cancelled() or writing.exception() is not None
    for waiter, found in zip(waiters, [pb.Rollouts()] * len(waiters) if failed else writing.result()[1], strict=True):
        if waiter.handed is not None:
            waiter.handed.set_result(found)
        waiter.event.set()


def _rollouts(tx: Transaction, rollout_ids: Sequence[str]) -> list[pb.Rollout]:
    return list(rollouts_pb(tx.rows("rollouts_by_id", {"rollout_ids": json.dumps(rollout_ids)})).rollouts)


def _chunks(items: Sequence[Any]) -> Iterator[list[Any]]:
    """Split items into the messages of a stream; at least one message."""
    chunk: list[Any] = []
    size = 0
    for item in items:
        own = item.ByteSize()
        if chunk and (len(chunk) >= CHUNK_ITEMS or size + own > CHUNK_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(item)
        size += own
    yield chunk


async def _abort(context: Context, error: AglError) -> Any:
    await context.abort(grpc.StatusCode[grpc_status(error)], str(error))
