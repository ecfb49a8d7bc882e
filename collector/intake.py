"""Process a request between the socket and the ack, independent of the transport: parse, validate, identify, log, fsync.

A request whose bytes and id metadata equal those of a recent one is an SDK's retry: it is not stored again, and gets the first one's
outcome (resends.py). Transports (receive.py) only translate.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from agl_otel.adapters.otlp_masking import Masker
from agl_otel.collector import crowded, expansion, faults
from agl_otel.collector.commit import GroupCommit
from agl_otel.collector.core import Core, core
from agl_otel.collector.disk import DiskBudget
from agl_otel.collector.heartbeat import Heartbeats
from agl_otel.collector.identify import bind, identify, learn, refuse_forged
from agl_otel.collector.identities import Identities
from agl_otel.collector.journal import REQUEST, RecoveryState, Request, Signal, pack_request
from agl_otel.collector.memory import Ids, TraceMemory
from agl_otel.collector.metrics import hold_points, identify_points
from agl_otel.collector.policy import DROPPED, Policy, apply_policy
from agl_otel.collector.refusals import Refusals, hint
from agl_otel.collector.remembered import Remembered
from agl_otel.collector.resends import Answered, Outcome, PendingOutcome, reason_text, rejections
from agl_otel.collector.scan import AHEAD_NANO, Scan, within
from agl_otel.collector.unreadable import remove_unreadable
from agl_otel.collector.wal import Place
from agl_otel.collector.write import Writer
from agl_otel.errors import DataError, UnavailableError, UsageError
from agl_otel.net.auth import TRUSTED, Sender
from agl_otel.net.in_flight import InFlight
from agl_otel_hook import conventions

_KEY_BYTES: Final = 16
METADATA: Final = frozenset(
    {conventions.HEADER_ROLLOUT_ID, conventions.HEADER_ATTEMPT_ID, conventions.HEADER_ACK, conventions.HEADER_INHERIT}
)
"""Headers that transports pass on; of a repeated one the first, like the Go collector."""

ACK_LEVELS: Final = frozenset({"", "durable", "stored"})
"""Values of HEADER_ACK."""


def metadata_in(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of a request that `Intake.take` wants."""
    return {name: headers[name] for name in METADATA if name in headers}


class Intake:
    """Accepts requests. One per collector; lives on the event loop.

    Args:
        recovery_state: the log's contents at the start.
        answered: requests answered before the start that are not in `recovery_state`.
        disk: refuses requests when the log is full.
        in_flight: bounds the bytes that wait for the disk.
        max_span_attributes: a span with more is refused.
        max_expanded_bytes: a request with larger rows is refused (expansion.py).
        unidentified: policy for spans and records without ids (policy.py).
        forward: called once with every request that is on disk; must not block (forward.py).
        masker: masks secrets (masking.py), before the log and `forward`.
        used_core: reads the requests (the default one).
        refusals: logs the items that are refused.
    """

    def __init__(
        self,
        commit: GroupCommit,
        writer: Writer,
        heartbeats: Heartbeats,
        recovery_state: RecoveryState,
        answered: Sequence[Answered] = (),
        *,
        disk: DiskBudget,
        in_flight: InFlight,
        max_span_attributes: int = 1 << 30,
        max_expanded_bytes: int = 1 << 40,
        unidentified: Policy = "keep",
        forward: Callable[[Signal, bytes], None] | None = None,
        masker: Masker | None = None,
        used_core: Core | None = None,
        refusals: Refusals | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._core = used_core or core()
        self._commit = commit
        self._writer = writer
        self._heartbeats = heartbeats
        self._disk = disk
        self._in_flight = in_flight
        self._max_span_attributes = max_span_attributes
        self._max_expanded_bytes = max_expanded_bytes
        self._unidentified: Policy = unidentified
        self._forward = forward
        self._masker = masker
        self._refusals = refusals or Refusals()
        self._clock = clock
        self.memory = TraceMemory()
        self.counts: Counter[str] = Counter()
        """requests, traces (spans), logs (records), metrics (points), rejected, resent, unidentified, dropped (of those), logged,
        bytes."""
        self.levels: Counter[str] = Counter()
        """{source of ids: number of spans and records}."""
        self.rejected: Counter[tuple[Signal, str]] = Counter()
        """{(signal, reason): number of spans, records or points}."""
        self._recent = Remembered()
        known = [*answered, *(Answered(r.key, r.received_ms, Outcome.of(r, p)) for p, r in recovery_state.requests if r.key)]
        for key, received_ms, outcome in sorted(known, key=lambda each: each.received_ms):
            self._recent.put(key, received_ms / 1000, outcome)

    async def take(self, signal: Signal, raw: bytes, metadata: Mapping[str, str], sender: Sender = TRUSTED) -> Outcome:
        """Accept a request; return when it has reached the ack level that its metadata ask for. `metadata` has lower-case keys.

        Raises DataError if nothing can be parsed, UsageError for an unknown ack level, and UnavailableError if the client should send it
        again later.
        """
        level = metadata.get(conventions.HEADER_ACK, "")
        if level not in ACK_LEVELS:
            raise UsageError(f"there is no ack level {level!r:.100}: {conventions.HEADER_ACK} is durable (as without it) or stored")
        known = self.begin(signal, raw, metadata, sender)
        outcome = known if isinstance(known, Outcome) else await known.outcome()
        if outcome.position is not None and level == "stored":
            await self._writer.wait(outcome.position)
            if outcome.position in self._writer.lost:
                raise UnavailableError("it was damaged in the collector's log before it could be stored: send it again")
        return outcome

    def begin(self, signal: Signal, raw: bytes, metadata: Mapping[str, str], sender: Sender = TRUSTED) -> Outcome | PendingOutcome:
        """Accept a request; the outcome may be pending until it is on disk. Raises DataError, UnavailableError as `take` does."""
        if not raw:
            return Outcome()
        key = _key(signal, raw, metadata, sender)
        now = self._clock()
        self._recent.forget_old(now)
        known = self._recent.get(key)
        if known is None or (isinstance(known, Outcome) and known.position in self._writer.lost):
            known = self._accept(signal, raw, metadata, sender, key, now)
            self._recent.put(key, now, known)
        else:
            self.counts["resent"] += 1
        return known

    def _accept(
        self, signal: Signal, raw: bytes, metadata: Mapping[str, str], sender: Sender, key: int, now: float
    ) -> Outcome | PendingOutcome:
        """Read a request and append it to the log; a disconnected client does not cancel what has been appended."""
        self._disk.check(0 if self._writer.idle else self._commit.bytes_held)  # stored data counts as none: it must not block new requests
        size = len(raw)
        self._in_flight.reserve(size)
        try:
            accepted = self._write_to_log(signal, raw, metadata, sender, key, now)
        except BaseException:
            self._in_flight.release(size)
            raise
        if isinstance(accepted, Outcome):
            self._in_flight.release(size)
        return accepted

    def _write_to_log(
        self, signal: Signal, raw: bytes, metadata: Mapping[str, str], sender: Sender, key: int, now: float
    ) -> Outcome | PendingOutcome:
        size = len(raw)
        read, raw, unreadable, expanded = self._read(signal, raw, int(now * 10**9))
        if isinstance(read, Scan):
            identities, spans = self._identify(signal, read, raw, metadata, sender)
        else:
            identities, spans = identify_points(read, now_unix_nano=int(now * 10**9)), Counter[Ids]()
            if sender.is_agent:
                identities, raw = hold_points(read, raw, identities, sender)
        if self._masker is not None:
            raw = self._masker.masked(signal, raw)
        reasons = rejections(identities, unreadable)
        rejected, dropped = sum(reasons.values()), 0
        if signal != "metrics":
            self.counts["unidentified"] += identities.count(lambda each: not each.rollout_id and not each.reason)
            identities = apply_policy(identities, self._unidentified)
            dropped = identities.count(lambda each: each.reason == DROPPED)
        kept = len(identities) + unreadable - rejected - dropped
        self._count(signal, raw, reasons, dropped, kept)
        message = reason_text(reasons)
        if rejected:
            self._refusals.add_items(signal, rejected, message)
        if not kept:
            if dropped and self._forward is not None:  # not stored here, but the forwarding target may want it
                self._forward(signal, raw)
            return Outcome(rejected, message)
        request = Request(signal, int(now * 1000), identities, raw, key, unreadable, expanded)
        future = self._commit.append(REQUEST, pack_request(request))
        pending = PendingOutcome()
        future.add_done_callback(functools.partial(self._logged, _Logging(request, rejected, message, spans, now, size, pending)))
        return pending

    def _read(self, signal: Signal, raw: bytes, now: int) -> tuple[Scan | ExportMetricsServiceRequest, bytes, int, int]:
        """Return what was read of a request, its bytes, the number of items removed as unreadable, and the size of its rows.

        Raises DataError.
        """
        unreadable = 0
        try:
            try:
                read, expanded = self._scan(signal, raw, now)
            except DecodeError:
                raw, unreadable = remove_unreadable(signal, raw)
                read, expanded = self._scan(signal, raw, now)
        except DecodeError as error:
            raise DataError(f"this is no OTLP {signal} request: {error}{hint(raw)}") from None
        expansion.check(expanded, self._max_expanded_bytes)
        return read, raw, unreadable, expanded

    def _scan(self, signal: Signal, raw: bytes, now: int) -> tuple[Scan | ExportMetricsServiceRequest, int]:
        if signal != "metrics":
            return self._core.scan(signal, raw, latest=now + AHEAD_NANO, max_attributes=self._max_span_attributes)
        messages, points = crowded.check(signal, raw), ExportMetricsServiceRequest.FromString(raw)
        return points, expansion.size(points, raw, messages)

    def _identify(
        self, signal: Signal, scan: Scan, raw: bytes, metadata: Mapping[str, str], sender: Sender
    ) -> tuple[Identities, Counter[Ids]]:
        """Return the identities, and the number of spans of each attempt (attempt spans and seals count 0)."""
        counts: Counter[Ids] = Counter()
        known = None if sender.bound else self.memory
        identities = identify(scan, metadata, known, records=signal == "logs", levels=self.levels)
        if sender.bound:
            identities = bind(identities, sender.bound, self.levels)
        if sender.is_agent:
            identities = refuse_forged(identities, raw, records=signal == "logs")
        if signal == "logs":
            return identities, counts
        learn(scan, identities, self.memory, now=time.monotonic(), by_key=sender.bound is not None)
        start = 0
        for count, identity in identities.runs:
            end = start + count
            if identity.attempt_id and not identity.reason:
                counts[identity.rollout_id, identity.attempt_id] += count - len(within(scan.silent, start, end))
            start = end
        return identities, counts

    def _count(self, signal: Signal, raw: bytes, reasons: dict[str, int], dropped: int, kept: int) -> None:
        self.counts["requests"] += 1
        self.counts["bytes"] += len(raw)
        self.counts[signal] += kept
        self.counts["dropped"] += dropped
        self.counts["rejected"] += sum(reasons.values())
        for reason, count in reasons.items():
            self.rejected[signal, reason] += count

    def _logged(self, logging: _Logging, future: asyncio.Future[Place]) -> None:
        """Take a request that is on disk, in log order; one that failed counts as new if it is sent again."""
        self._in_flight.release(logging.size)
        request = logging.request
        if (error := future.exception()) is not None:
            self._recent.forget(request.key)
            logging.pending.fail(error)
            return
        outcome = Outcome(logging.rejected, logging.message, future.result().position)
        try:
            self.counts["logged"] += 1
            self._writer.add(future.result(), request)
            if self._forward is not None:
                self._forward(request.signal, request.raw)
            faults.failpoint("logged")
            for (rollout_id, attempt_id), count in logging.spans.items():
                self._heartbeats.add(rollout_id, attempt_id, count, logging.now)
        finally:  # it is on disk
            self._recent.settle(request.key, outcome)
            logging.pending.settle(outcome)


class _Logging(NamedTuple):
    """A request on its way to the disk."""

    request: Request
    rejected: int
    message: str
    spans: Counter[Ids]
    now: float
    size: int
    """Its bytes in flight."""
    pending: PendingOutcome


def _key(signal: Signal, raw: bytes, metadata: Mapping[str, str], sender: Sender) -> int:
    ids = (metadata.get(name, "") for name in (conventions.HEADER_ROLLOUT_ID, conventions.HEADER_ATTEMPT_ID))
    senders = ("/".join(sender.bound or ()),) if sender.is_agent else ()  # senders differ in what they may send
    digest = hashlib.sha1(raw, usedforsecurity=False)  # half the cost of sha256; who finds a collision loses only their own request
    digest.update("\0".join(("", signal, *ids, *senders)).encode())
    return int.from_bytes(digest.digest()[:_KEY_BYTES])
