"""The queue's client: async, for one event loop, over gRPC, in terms of the models of agl_otel.types.

Calls to a queue that does not answer are retried for some seconds and then raise UnavailableError. All errors are those of errors.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, TypeVar, Unpack

from pydantic import TypeAdapter

from agl_otel.errors import AglError, UsageError, from_grpc
from agl_otel.net.tls import Trust, target
from agl_otel.queue import convert
from agl_otel.queue.bounds import in_messages
from agl_otel.queue.calls import RETRY_SECONDS, Calls, in_pieces, new_request_id, parts
from agl_otel.queue.proto import queue_pb2 as pb
from agl_otel.queue.updates import KEEP, AttemptUpdate, Observation, RolloutUpdate, Witness
from agl_otel.types import (
    ADOPTED,
    NOT_RUN,
    Attempt,
    AttemptedRollout,
    Describe,
    EnqueueRolloutRequest,
    NamedResources,
    PaginatedResult,
    ResourcesUpdate,
    Rollout,
    RolloutMode,
    RolloutQuery,
    Run,
    RunMembers,
    Worker,
    WorkerStatus,
)
from agl_otel.types.queries import FilterLogic, RolloutConditions, SortOrder

__all__ = ["DOWN", "KEEP", "AttemptUpdate", "Observation", "QueueClient", "RolloutUpdate", "Witness"]

T = TypeVar("T")
EVERY_ROLLOUT: Final = RolloutQuery()
DOWN: Final = "down/"
"""Prefix of the names under which a supervisor registers services that are down (types.Describe.down)."""
_RESOURCES: TypeAdapter[NamedResources] = TypeAdapter(NamedResources)


class QueueClient:
    """A client of the queue at `address` (host:port, or https://host:port for TLS; see tls.py for `trust`).

    `timeout_seconds` bounds each try of a call; the last one begins at most `retry_seconds` after the first has failed.
    """

    def __init__(
        self,
        address: str,
        *,
        token: str = "",
        timeout_seconds: float = 30.0,
        retry_seconds: float = RETRY_SECONDS,
        trust: Trust | None = None,
    ) -> None:
        self._calls = Calls(address, token=token, timeout_seconds=timeout_seconds, retry_seconds=retry_seconds, trust=trust)
        self._background: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """The queue's address: host:port, or https://host:port."""
        return self._calls.address

    async def __aenter__(self) -> QueueClient:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection."""
        await asyncio.gather(*self._background)
        await self._calls.close()

    # --- rollouts and attempts

    async def enqueue(self, requests: Sequence[EnqueueRolloutRequest], *, idempotency_key: str | None = None) -> list[Rollout]:
        """Put rollouts at the end of the queue, in order.

        Repeating the requests with the same `idempotency_key` returns the same rollouts again. Requests that exceed one message (1,000, or
        10,000 with a key) are split into several, each of them all or nothing: if the queue fails meanwhile, the first ones may be
        enqueued. Raises UsageError if a single rollout is wrong or too large, ConflictError if the key was used for other rollouts, or
        for more or fewer.
        """
        enqueued: list[Rollout] = []
        rollouts = await in_pieces(convert.request_to_pb, requests)
        if any(request.mode == ADOPTED for request in requests):
            raise UsageError(NOT_RUN)
        for number, part in enumerate(parts(rollouts, keyed=idempotency_key is not None)):
            key = idempotency_key if number == 0 or idempotency_key is None else f"{idempotency_key} ({number})"
            request = pb.EnqueueRequest(rollouts=part, request_id=new_request_id(), idempotency_key=key, total=len(rollouts))
            answer = await self._calls.call("Enqueue", request, pb.Rollouts)
            enqueued += await in_pieces(convert.rollout_from_pb, answer.rollouts)
        return enqueued

    async def start(self, requests: Sequence[EnqueueRolloutRequest], *, worker_id: str | None = None) -> list[AttemptedRollout]:
        """Create rollouts that are never queued, each with a first attempt of `worker_id`; split into messages as in `enqueue`."""
        started: list[AttemptedRollout] = []
        for part in parts(await in_pieces(convert.request_to_pb, requests)):
            request = pb.StartRequest(rollouts=part, worker_id=worker_id, request_id=new_request_id())
            started += _attempted(await self._calls.call("Start", request, pb.Rollouts))
        return started

    async def start_attempt(self, rollout_ids: Sequence[str], *, worker_id: str | None = None) -> list[AttemptedRollout]:
        """Begin a further attempt of each rollout, regardless of max_attempts; one transaction a message. Raises NotFoundError."""
        started: list[AttemptedRollout] = []
        for part in in_messages(rollout_ids):
            request = pb.StartAttemptRequest(rollout_ids=part, worker_id=worker_id, request_id=new_request_id())
            started += _attempted(await self._calls.call("StartAttempt", request, pb.Rollouts))
        return started

    async def claim(
        self,
        limit: int = 1,
        *,
        worker_id: str | None = None,
        wait_seconds: float = 0.0,
        modes: Sequence[RolloutMode] = (),
        labels: Mapping[str, str] | None = None,
    ) -> list[AttemptedRollout]:
        """Claim up to `limit` rollouts, each with a new attempt and its token; wait up to `wait_seconds` for the first.

        Cancelling the call releases whatever the queue has already handed out.
        """
        request = pb.ClaimRequest(
            limit=limit, worker_id=worker_id, wait_seconds=wait_seconds, request_id=new_request_id(), modes=modes, labels=labels
        )
        try:
            return _attempted(await self._calls.call("Claim", request, pb.Rollouts, extra_seconds=wait_seconds))
        except asyncio.CancelledError:
            release = pb.ReleaseRequest(claim_request_id=request.request_id, request_id=new_request_id())
            task = asyncio.ensure_future(self._release_quietly(release))
            self._background.add(task)
            task.add_done_callback(self._background.discard)
            raise

    async def release(self, claims: Sequence[AttemptedRollout]) -> int:
        """Give back claims that were not begun; return how many. The rollouts return to their places in the queue."""
        released = 0
        for part in in_messages([claim.attempt.attempt_id for claim in claims]):
            request = pb.ReleaseRequest(attempt_ids=part, request_id=new_request_id())
            released += (await self._calls.call("Release", request, pb.ReleaseResponse)).released
        return released

    async def update_rollouts(self, updates: Sequence[RolloutUpdate]) -> list[Rollout]:
        """Change rollouts, all or none; attempts are not touched. Raises NotFoundError, UsageError."""
        request = pb.UpdateRolloutsRequest(updates=[update.to_pb() for update in updates], request_id=new_request_id())
        answer = await self._calls.call("UpdateRollouts", request, pb.Rollouts)
        return [convert.rollout_from_pb(rollout) for rollout in answer.rollouts]

    async def update_attempts(self, updates: Sequence[AttemptUpdate]) -> list[Attempt]:
        """Change attempts, all or none; their rollouts and workers follow. Raises NotFoundError, UsageError, FencedError."""
        request = pb.UpdateAttemptsRequest(updates=[update.to_pb() for update in updates], request_id=new_request_id())
        answer = await self._calls.call("UpdateAttempts", request, pb.Attempts)
        return [convert.attempt_from_pb(attempt) for attempt in answer.attempts]

    async def report(self, updates: Sequence[AttemptUpdate]) -> list[AglError | None]:
        """Change attempts independently; return None per update, or the error that refused it (FencedError, NotFoundError, UsageError).

        So if one of many attempts was cancelled meanwhile, the results of the others are still stored.
        """
        outcomes: list[AglError | None] = []
        for part in in_messages(updates):
            request = pb.UpdateAttemptsRequest(updates=[update.to_pb() for update in part], request_id=new_request_id(), each=True)
            answer = await self._calls.call("UpdateAttempts", request, pb.Attempts)
            refused = {refusal.index: from_grpc(refusal.status, refusal.message) for refusal in answer.refusals}
            outcomes += [refused.get(index) for index in range(len(part))]
        return outcomes

    async def query_rollouts(
        self, query: RolloutQuery = EVERY_ROLLOUT, **conditions: Unpack[RolloutConditions]
    ) -> PaginatedResult[Rollout | AttemptedRollout]:
        """Query rollouts with their latest attempts; `conditions` override fields of `query`."""
        query = replace(query, **conditions)
        request = convert.rollout_query_to_pb(query)
        if request is None:
            return PaginatedResult([], query.limit, query.offset, 0)
        applied: set[str] = set()
        found, total = await self._query(
            "StreamRollouts", request, pb.Rollouts, convert.rollout_from_pb, lambda part: applied.update(part.filters)
        )
        if ignored := sorted({field.name for field, _ in request.filter.ListFields()} - applied):
            raise UsageError(
                f"the queue at {self.address} is of an earlier release ({(await self.describe()).version}) and answers as if "
                f"{', '.join(ignored)} had not been asked for: update it, or ask without"
            )
        return PaginatedResult(found if query.limit else [], query.limit, query.offset, total)

    async def query_attempts(
        self,
        rollout_ids: Sequence[str],
        *,
        latest_only: bool = False,
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Attempt]:
        """Query the attempts of these rollouts, ordered by number unless `sort_by` names a field; unknown rollouts have none."""
        page = convert.page_to_pb(sort_by, sort_order, limit, offset)
        request = pb.QueryAttemptsRequest(rollout_ids=rollout_ids, latest_only=latest_only, page=page)
        found, total = await self._query("StreamAttempts", request, pb.Attempts, convert.attempt_from_pb)
        return PaginatedResult(found if limit else [], limit, offset, total)

    async def query_runs(self, run: str | None = None) -> list[Run]:
        """Return the runs with their counts of rollouts, the latest first; only `run` if given (nothing if it is unknown).

        A rollout's run is its `metadata["run"]`, else the id of the resources that it runs with.
        """
        answer = await self._calls.call("QueryRuns", pb.QueryRunsRequest(run=run), pb.Runs)
        return convert.runs_from_pb(answer)

    async def query_run_members(self, run: str) -> RunMembers:
        """Return the rollouts of a run in the order of their creation, each with the step that enqueued it."""
        answer = await self._calls.call("QueryRunMembers", pb.QueryRunsRequest(run=run), pb.RunMembers)
        return RunMembers(list(answer.rollout_ids), list(answer.steps), list(answer.statuses), list(answer.modes))

    async def wait(self, rollout_ids: Sequence[str], *, timeout_seconds: float | None = None) -> AsyncIterator[list[Rollout]]:
        """Yield rollouts as they finish, until all have or `timeout_seconds` have passed (0: check once). Unknown ids are ignored."""
        open_ids = dict.fromkeys(rollout_ids)
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds

        def request() -> pb.WaitRequest:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            return pb.WaitRequest(rollout_ids=open_ids, timeout_seconds=left)

        async for answer in self._calls.stream("Wait", request, pb.Rollouts):
            rollouts = [convert.rollout_from_pb(rollout) for rollout in answer.rollouts]
            for rollout in rollouts:
                open_ids.pop(rollout.rollout_id, None)
            if rollouts:
                yield rollouts

    async def delete(self, rollout_ids: Sequence[str]) -> int:
        """Delete rollouts and everything that the queue stores about them; return how many existed."""
        deleted = 0
        for part in in_messages(rollout_ids):
            request = pb.DeleteRequest(rollout_ids=part, request_id=new_request_id())
            deleted += (await self._calls.call("Delete", request, pb.DeleteResponse)).deleted
        return deleted

    # --- calls of collectors and proxies

    async def observe(self, observations: Sequence[Observation], *, sent_at: float | None = None) -> None:
        """Report that spans of attempts were received. Unknown rollouts are no error.

        `sent_at` is the current time (Unix seconds) on the clock of `received_at`: the queue uses it to correct for a wrong clock.
        """
        for part in in_messages(observations):
            request = pb.ObserveRequest(observations=[observation.to_pb() for observation in part], sent_at=sent_at)
            await self._calls.call("Observe", request, pb.ObserveResponse)

    async def witness(self, witnesses: Sequence[Witness]) -> None:
        """Report that proxies are about to forward the first call of these attempts. Idempotent; unknown attempts are no error."""
        for part in in_messages(witnesses):
            request = pb.WitnessRequest(witnesses=[pb.ProxyWitness(**witness._asdict()) for witness in part])
            await self._calls.call("Witness", request, pb.WitnessResponse)

    async def take_sequence(self, requests: Sequence[tuple[str, int, int]]) -> list[int]:
        """Reserve `count` new numbers for each (rollout_id, count, at_least); return the first of each (0 for an empty rollout id)."""
        first: list[int] = []
        for part in in_messages(requests):
            asked = [pb.SequenceRequest(rollout_id=rollout_id, count=count, at_least=at_least) for rollout_id, count, at_least in part]
            request = pb.TakeSequenceRequest(requests=asked, request_id=new_request_id())
            first += (await self._calls.call("TakeSequence", request, pb.TakeSequenceResponse)).first
        return first

    # --- resources

    async def put_resources(self, resources: NamedResources, *, resources_id: str | None = None, aside: bool = False) -> ResourcesUpdate:
        """Store a new set of resources, or a new version of `resources_id` (created if unknown).

        It becomes the default for rollouts that name no resources, unless `aside` is set.
        """
        text = _RESOURCES.dump_json(resources).decode()
        request = pb.PutResourcesRequest(resources_id=resources_id, resources_json=text, request_id=new_request_id(), aside=aside)
        return convert.resources_from_pb((await self._calls.call("PutResources", request, pb.ResourcesList)).resources[0])

    async def get_resources(self, resources_id: str | None = None, *, version: int | None = None) -> ResourcesUpdate | None:
        """Return one version of a set (None: the current one), or without an id the set written last; None if there is none."""
        ids = pb.Filter() if resources_id is None else pb.Filter(id_in=[resources_id], has_id_in=True)
        request = pb.QueryResourcesRequest(filter=ids, latest_only=resources_id is None, version=version)
        found, _ = await self._query("StreamResources", request, pb.ResourcesList, convert.resources_from_pb)
        return found[0] if found else None

    async def query_resources(
        self,
        *,
        resources_id_in: Sequence[str] | None = None,
        resources_id_contains: str | None = None,
        filter_logic: FilterLogic = "and",
        all_versions: bool = False,
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[ResourcesUpdate]:
        """Query the current (or all) versions of sets of resources, in the order they were written unless `sort_by` names a field."""
        asked = convert.filter_to_pb(resources_id_in, resources_id_contains, filter_logic)
        if asked is None:
            return PaginatedResult([], limit, offset, 0)
        page = convert.page_to_pb(sort_by, sort_order, limit, offset)
        request = pb.QueryResourcesRequest(filter=asked, page=page, all_versions=all_versions)
        found, total = await self._query("StreamResources", request, pb.ResourcesList, convert.resources_from_pb)
        return PaginatedResult(found if limit else [], limit, offset, total)

    # --- workers

    async def heartbeat(self, worker_id: str, *, stats: Mapping[str, Any] | None = None, attempt_ids: Sequence[str] = ()) -> list[str]:
        """Send a worker's heartbeat with the attempts it runs; return those it must end (cancelled, timed out, replaced)."""
        text = None if stats is None else convert.to_json(dict(stats), "a worker's stats")
        request = pb.HeartbeatRequest(worker_id=worker_id, stats_json=text, attempt_ids=attempt_ids)
        return list((await self._calls.call("Heartbeat", request, pb.HeartbeatResponse)).cancelled)

    async def query_workers(
        self,
        *,
        status_in: Sequence[WorkerStatus] | None = None,
        worker_id_in: Sequence[str] | None = None,
        worker_id_contains: str | None = None,
        filter_logic: FilterLogic = "and",
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Worker]:
        """Query workers, ordered by id unless `sort_by` names a field."""
        asked = convert.filter_to_pb(worker_id_in, worker_id_contains, filter_logic, status_in=status_in)
        if asked is None:
            return PaginatedResult([], limit, offset, 0)
        request = pb.QueryWorkersRequest(filter=asked, page=convert.page_to_pb(sort_by, sort_order, limit, offset))
        found, total = await self._query("StreamWorkers", request, pb.Workers, convert.worker_from_pb)
        return PaginatedResult(found if limit else [], limit, offset, total)

    # --- the stack

    async def describe(self) -> Describe:
        """Return the addresses of the stack's services, as this client can reach them."""
        return self._described(await self._calls.call("Describe", pb.DescribeRequest(), pb.DescribeResponse))

    async def announce(
        self, service: str, instance: str, addresses: Mapping[str, str], *, gone: bool = False, seconds: float | None = None
    ) -> Describe:
        """Register a service's addresses (see types.Describe for the names), or deregister it (`gone`).

        A registration expires after `seconds`; renew it at every third of them. None: it holds until `gone`, even if the service is killed.
        """
        request = pb.AnnounceRequest(service=service, instance=instance, addresses=addresses, gone=gone, seconds=seconds)
        return self._described(await self._calls.call("Announce", request, pb.DescribeResponse))

    async def statistics(self) -> dict[str, Any]:
        """Return counts, uptime, and how many rollouts can be claimed."""
        answer = await self._calls.call("Statistics", pb.StatisticsRequest(), pb.StatisticsResponse)
        has_oldest = answer.HasField("oldest_claimable_age_seconds")
        return {
            "name": answer.engine,
            "rollouts_by_status": dict(answer.rollouts_by_status),
            "total_rollouts": answer.total_rollouts,
            "total_attempts": answer.total_attempts,
            "total_resources": answer.total_resources,
            "total_workers": answer.total_workers,
            "uptime": answer.uptime_seconds,
            "claimable": answer.claimable,
            "oldest_claimable_age_seconds": answer.oldest_claimable_age_seconds if has_oldest else None,
        }

    async def metrics(self) -> str:
        """Return the service's own metrics in Prometheus' text format; empty from an earlier release without them."""
        return (await self._calls.call("Statistics", pb.StatisticsRequest(metrics=True), pb.StatisticsResponse)).metrics

    async def lease(self, name: str, holder: str, seconds: float) -> bool:
        """Take or renew a lease for `seconds` (0 releases it); return whether `holder` has it."""
        request = pb.LeaseRequest(name=name, holder=holder, seconds=seconds)
        return (await self._calls.call("Lease", request, pb.LeaseResponse)).held

    # --- helpers

    async def _query(
        self, method: str, request: object, answer: type[Any], converted: Callable[[Any], T], seen: Callable[[Any], object] = bool
    ) -> tuple[list[T], int]:
        """Run a query of any size: its items, and how many match regardless of the page; `seen` is called with each part of the answer."""

        def take(part: Any) -> tuple[list[T], int]:
            seen(part)
            return [converted(item) for item in getattr(part, convert.ITEMS[answer])], part.total

        taken = await self._calls.collect(method, request, answer, take)
        return [item for items, _ in taken for item in items], taken[0][1]

    def _described(self, answer: pb.DescribeResponse) -> Describe:
        host = target(self.address).rpartition(":")[0]
        down = {name.removeprefix(DOWN): why for name, why in answer.addresses.items() if name.startswith(DOWN)}
        addresses: dict[str, Any] = convert.addresses_reachable(answer.addresses, host)
        addresses["queue"] = self.address
        known = {name: address for name, address in addresses.items() if name in Describe.model_fields}
        return Describe(
            **known,
            collectors=[convert.reachable(address, host) for address in answer.collectors],
            proxies=[convert.reachable(address, host) for address in answer.proxies],
            clickhouses=[convert.reachable(address, host) for address in answer.clickhouses],
            down=down,
            version=answer.version,
        )

    async def _release_quietly(self, request: pb.ReleaseRequest) -> None:
        with contextlib.suppress(AglError):  # a queue that cannot be reached cannot deliver the claim either, and takes it back itself
            await self._calls.call("Release", request, pb.ReleaseResponse)


def _attempted(answer: pb.Rollouts) -> list[AttemptedRollout]:
    return [convert.attempted_from_pb(rollout) for rollout in answer.rollouts]
