"""What happens to a request between the socket and the ack, whatever the transport: parse, validate, identify, log, fsync.

A request whose bytes and id metadata equal one of the last minutes' is an SDK's retry: it is not stored again, and gets the first
one's outcome. Transports (receive.py) only translate.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from agl_otel import semconv
from agl_otel.collector import faults
from agl_otel.collector.commit import GroupCommit
from agl_otel.collector.disk import DiskBudget
from agl_otel.collector.heads import Heads
from agl_otel.collector.heartbeat import Heartbeats
from agl_otel.collector.identify import Identity, identify_logs, identify_spans, learn
from agl_otel.collector.journal import REQUEST, Leftover, Request, Signal, pack_request
from agl_otel.collector.limits import InFlight
from agl_otel.collector.masking import Masker
from agl_otel.collector.memory import TraceMemory
from agl_otel.collector.metrics import identify_points
from agl_otel.collector.policy import DROPPED, Policy, apply_policy
from agl_otel.collector.wal import Place
from agl_otel.collector.write import Writer
from agl_otel.errors import DataError

RESEND_SECONDS: Final = 300.0  # SDKs give up on a request after a minute
MAX_REMEMBERED: Final = 100_000
TOO_MANY_ATTRIBUTES: Final = "more attributes than AGL_MAX_SPAN_ATTRIBUTES"
_NOT_SPANS: Final = frozenset({semconv.SPAN_ATTEMPT, semconv.SPAN_SEAL})  # a heartbeat, but not what makes an attempt running


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answer to a request."""

    rejected: int = 0
    """How many spans or records were refused."""
    message: str = ""
    """Why, with counts."""
    position: int | None = None
    """Where the request stands in the log; None where nothing of it was kept."""


class Intake:
    """Takes requests. One for each collector; lives on the event loop.

    Args:
        disk: says when the log is full.
        in_flight: bounds what waits for the disk.
        max_span_attributes: a span with more is refused.
        unidentified: what becomes of spans and records that nothing identifies (policy.py).
        accepted: is given every request that is on disk, once and without a wait (forward.py).
        masker: takes out what may not be kept (masking.py), before the log and `accepted`.
    """

    def __init__(
        self,
        commit: GroupCommit,
        writer: Writer,
        heartbeats: Heartbeats,
        leftover: Leftover,
        *,
        disk: DiskBudget,
        in_flight: InFlight,
        max_span_attributes: int = 1 << 30,
        unidentified: Policy = "keep",
        accepted: Callable[[Signal, bytes], None] | None = None,
        masker: Masker | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._commit = commit
        self._writer = writer
        self._heartbeats = heartbeats
        self._disk = disk
        self._in_flight = in_flight
        self._max_span_attributes = max_span_attributes
        self._unidentified: Policy = unidentified
        self._accepted = accepted
        self._masker = masker
        self._clock = clock
        self.memory = TraceMemory()
        self.counts: Counter[str] = Counter()
        """requests, traces (spans), logs (records), metrics (points), rejected, resent, unidentified, dropped (of those), logged, invalid,
        bytes."""
        self.levels: Counter[str] = Counter()
        """{level that gave the ids: spans and records}."""
        self.rejected: Counter[tuple[Signal, str]] = Counter()
        """{(signal, reason): spans, records or points}."""
        self._recent: OrderedDict[str, tuple[float, asyncio.Future[Outcome]]] = OrderedDict()
        for position, request in leftover.unwritten + [member for _, members in leftover.in_doubt for member in members]:
            self._remember_old(position, request)

    async def take(self, signal: Signal, raw: bytes, metadata: Mapping[str, str]) -> Outcome:
        """Accept a request; returns when it is at the ack level that its metadata ask for. `metadata` has lower-case keys.

        Raises DataError where nothing can be parsed, and UnavailableError where it should be sent again later.
        """
        if not raw:
            return Outcome()
        key = _key(signal, raw, metadata)
        now = time.monotonic()
        while (self._recent and now - next(iter(self._recent.values()))[0] > RESEND_SECONDS) or len(self._recent) > MAX_REMEMBERED:
            self._recent.popitem(last=False)
        known = self._recent.get(key)
        if known is None:
            task = asyncio.ensure_future(self._accept(signal, raw, metadata, key))
            self._recent[key] = (now, task)
            task.add_done_callback(functools.partial(self._forget_failure, key))
        else:
            self.counts["resent"] += 1
            task = known[1]
        outcome = await asyncio.shield(task)  # a client that hangs up does not undo what is on its way to the disk
        if outcome.position is not None and metadata.get(semconv.HEADER_ACK) == "stored":
            await self._writer.wait(outcome.position)
        return outcome

    async def _accept(self, signal: Signal, raw: bytes, metadata: Mapping[str, str], key: str) -> Outcome:
        self._disk.check(0 if self._writer.idle else self._commit.bytes_held)  # what is stored holds nobody up
        with self._in_flight.hold(len(raw)):
            return await self._log(signal, raw, metadata, key)

    async def _log(self, signal: Signal, raw: bytes, metadata: Mapping[str, str], key: str) -> Outcome:
        now = self._clock()
        identities, spans = self._identify(signal, raw, metadata, now)
        if self._masker is not None:
            raw = self._masker.masked(signal, raw)
        reasons = _reasons(identities)
        rejected = sum(reasons.values())
        for reason, count in reasons.items():
            self.rejected[signal, reason] += count
        self.counts["requests"] += 1
        self.counts["bytes"] += len(raw)
        self.counts[signal] += len(identities) - rejected
        self.counts["rejected"] += rejected
        dropped = 0
        if signal != "metrics":
            self.counts["unidentified"] += sum(not i.rollout_id and not i.reason for i in identities)
            identities = apply_policy(identities, self._unidentified)
            dropped = sum(identity.reason == DROPPED for identity in identities)
            self.counts["dropped"] += dropped
            self.counts[signal] -= dropped
        message = _message(reasons)
        if rejected + dropped == len(identities):
            if dropped and self._accepted is not None:  # nobody's here, but whoever gets the copy may want it
                self._accepted(signal, raw)
            return Outcome(rejected, message)
        request = Request(signal, int(now * 1000), identities, raw, key)
        future = self._commit.append(REQUEST, pack_request(request))
        future.add_done_callback(functools.partial(self._logged, request))  # in log order, even where the client has gone
        place = await future
        faults.reach("logged")
        for (rollout_id, attempt_id), count in spans.items():
            self._heartbeats.add(rollout_id, attempt_id, count, now)
        return Outcome(rejected, message, place.position)

    def _identify(
        self, signal: Signal, raw: bytes, metadata: Mapping[str, str], now: float
    ) -> tuple[list[Identity], Counter[tuple[str, str]]]:
        """The identities, and how many spans were heard of each attempt (attempt spans and seals count 0)."""
        heard: Counter[tuple[str, str]] = Counter()
        now_nano = int(now * 10**9)
        try:
            if signal == "logs":
                return identify_logs(
                    ExportLogsServiceRequest.FromString(raw), metadata, self.memory, now_unix_nano=now_nano, levels=self.levels
                ), heard
            if signal == "metrics":
                return identify_points(ExportMetricsServiceRequest.FromString(raw), now_unix_nano=now_nano), heard
            request = ExportTraceServiceRequest.FromString(raw)
        except DecodeError as error:
            self.counts["invalid"] += 1
            raise DataError(f"this is no OTLP {signal} request: {error}") from None
        heads = Heads.of(request, raw)
        identities = identify_spans(request, metadata, self.memory, now_unix_nano=now_nano, levels=self.levels, raw=raw, heads=heads)
        if len(raw) > 2 * self._max_span_attributes:  # the least that so many attributes would take
            for index, span in enumerate(heads.spans):
                if len(span.attributes) > self._max_span_attributes:
                    identities[index] = Identity(reason=TOO_MANY_ATTRIBUTES)
        learn(request, identities, self.memory, now=time.monotonic(), heads=heads)
        start = 0
        for identity, run in groupby(identities):
            end = start + sum(1 for _ in run)
            if identity.attempt_id and not identity.reason:
                silent = sum(span.name in _NOT_SPANS for span in heads.spans[start:end]) if heads.may_open else 0
                heard[identity.rollout_id, identity.attempt_id] += end - start - silent
            start = end
        return identities, heard

    def _logged(self, request: Request, future: asyncio.Future[Place]) -> None:
        if not future.cancelled() and future.exception() is None:
            self.counts["logged"] += 1
            self._writer.add(future.result(), request)
            if self._accepted is not None:
                self._accepted(request.signal, request.raw)

    def _forget_failure(self, key: str, task: asyncio.Future[Outcome]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._recent.pop(key, None)

    def _remember_old(self, position: int, request: Request) -> None:
        if request.key:
            future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
            reasons = _reasons(request.identities)
            future.set_result(Outcome(sum(reasons.values()), _message(reasons), position))
            self._recent[request.key] = (time.monotonic(), future)


def _reasons(identities: Sequence[Identity]) -> Counter[str]:
    return Counter(identity.reason for identity in identities if identity.reason not in ("", DROPPED))


def _message(reasons: Mapping[str, int]) -> str:
    return "; ".join(f"{count} × {reason}" for reason, count in reasons.items())


def _key(signal: Signal, raw: bytes, metadata: Mapping[str, str]) -> str:
    digest = hashlib.sha1(raw, usedforsecurity=False)  # half the cost of sha256; whoever finds a collision loses a request of their own
    for name in (semconv.HEADER_ROLLOUT_ID, semconv.HEADER_ATTEMPT_ID):
        digest.update(b"\0" + metadata.get(name, "").encode())
    return f"{signal[0]}{digest.hexdigest()[:32]}"
