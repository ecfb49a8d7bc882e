"""The intake under pressure: what cannot be kept is not acked, and may be sent again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from agl_otel.collector.commit import GroupCommit
from agl_otel.collector.disk import DiskBudget
from agl_otel.collector.heartbeat import Heartbeats
from agl_otel.collector.intake import Intake
from agl_otel.collector.journal import RecoveryState, describe, recovery_state
from agl_otel.collector.resends import RESEND_SECONDS, ResendJournal
from agl_otel.collector.store_batch import BatchStore
from agl_otel.collector.wal import Log
from agl_otel.collector.write import Writer
from agl_otel.errors import DataError, DiskFullError, UnavailableError
from agl_otel.net.in_flight import InFlight
from agl_otel.queue.updates import Observation
from agl_otel.service.framed import HEADER_BYTES, Frame, read
from agl_otel.service.retry import Backoff
from agl_otel.traces.chdb import ChdbEngine
from agl_otel.traces.schema import create_schema
from agl_otel_hook import conventions
from tests.small_disk import no_file_over

NOW = 1_750_000_000.0


class Counters:
    """The queue's counters in memory: the only fake I/O in these tests."""

    def __init__(self) -> None:
        self.away = False
        self.numbers: dict[str, int] = {}
        self.received: list[Observation] = []

    async def take_sequence(self, requests: Sequence[tuple[str, int, int]]) -> list[int]:
        if self.away:
            raise UnavailableError("away")
        first: list[int] = []
        for rollout_id, count, at_least in requests:
            last = max(self.numbers.get(rollout_id, 0), at_least)
            first.append(last + 1)
            self.numbers[rollout_id] = last + count
        return first

    async def observe(self, observations: Sequence[Observation], *, sent_at: float | None = None) -> None:
        self.received += observations


class Parts:
    """The collector without its ports."""

    def __init__(self, directory: Path, *, max_log_bytes: int = 1 << 30, now: float = NOW) -> None:
        self.log = Log(directory / "wal", describe=describe)
        self.engine = ChdbEngine(directory / "traces")
        create_schema(self.engine, where="the test")
        left: RecoveryState = recovery_state(self.log.replay())
        self.queue = Counters()
        self.commit = GroupCommit(self.log)
        self.resends = ResendJournal(directory / "wal", clock=lambda: now)
        self.writer = Writer(BatchStore(self.engine, directory / "refused"), self.commit, self.queue, left, self.log.read, self.resends)
        self.heartbeats = Heartbeats(self.queue)
        self.disk = DiskBudget(directory, budget_bytes=max_log_bytes)
        self.in_flight = InFlight(1 << 20)
        self.intake = Intake(
            self.commit,
            self.writer,
            self.heartbeats,
            left,
            self.resends.known,
            disk=self.disk,
            in_flight=self.in_flight,
            clock=lambda: now,
        )
        self.task = asyncio.create_task(self.writer.run())

    async def close(self) -> None:
        self.writer.close()
        await self.task
        await self.commit.close()
        self.resends.close()
        if self.writer.idle:
            self.log.clear()  # like the service: the next start has nothing to replay
        self.log.close()
        self.engine.close()


def body(number: int, *names: str) -> bytes:
    request = ExportTraceServiceRequest()
    group = request.resource_spans.add().scope_spans.add()
    for at, name in enumerate(names or ("work",)):
        span = group.spans.add(trace_id=number.to_bytes(16), span_id=(number * 100 + at + 1).to_bytes(8), name=name)
        span.start_time_unix_nano = span.end_time_unix_nano = int(NOW * 1e9)
    return request.SerializeToString()


IDS = {conventions.HEADER_ROLLOUT_ID: "ro-1", conventions.HEADER_ATTEMPT_ID: "at-1"}


@pytest.fixture
async def parts(tmp_path: Path) -> AsyncIterator[Parts]:
    made = Parts(tmp_path)
    yield made
    await made.close()


async def test_waiting_requests_share_an_fsync(parts: Parts) -> None:
    await asyncio.gather(*(parts.intake.take("traces", body(n), IDS) for n in range(1, 201)))
    assert parts.commit.groups < 100


async def test_a_log_at_its_limit_refuses_until_there_is_room(tmp_path: Path) -> None:
    parts = Parts(tmp_path, max_log_bytes=3000)
    parts.queue.away = True
    with pytest.raises(UnavailableError, match="all of its budget"):
        for number in range(1, 100):
            await parts.intake.take("traces", body(number), IDS)
    assert parts.commit.bytes_held >= 3000
    await parts.close()


async def test_a_wait_for_the_store_ends_with_the_reason_if_nothing_can_be_stored(parts: Parts) -> None:
    parts.queue.away = True
    await parts.intake.take("traces", body(1), IDS)
    with pytest.raises(UnavailableError, match="not stored yet: the queue does not take a batch: away"):
        await parts.writer.barrier(patience_seconds=0.5)
    parts.queue.away = False
    await parts.intake.take("traces", body(1), {**IDS, conventions.HEADER_ACK: "stored"})  # the client sends it again
    assert parts.engine.select("SELECT count() FROM otel.otel_traces") == [[1]]


async def test_a_store_that_is_slow_is_waited_for(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    going_on = threading.Event()
    insert = parts.engine.insert

    def slow(*args: Any, **options: Any) -> None:
        going_on.wait(60)
        insert(*args, **options)

    monkeypatch.setattr(parts.engine, "insert", slow)
    await parts.intake.take("traces", body(1), IDS)
    waiting = asyncio.create_task(parts.writer.barrier(patience_seconds=0.0))
    assert not (await asyncio.wait({waiting}, timeout=1.0))[0]
    going_on.set()
    await waiting


async def test_a_full_disk_refuses_and_loses_no_acked_request(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    await parts.intake.take("traces", body(1), IDS)
    await parts.writer.barrier()

    def no_space(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fdatasync", no_space)
        with pytest.raises(UnavailableError, match="No space left"):
            await parts.intake.take("traces", body(2), IDS)
    await parts.intake.take("traces", body(2), IDS)
    await parts.writer.barrier()
    assert parts.engine.select("SELECT SequenceId FROM otel.otel_traces ORDER BY SequenceId") == [[1], [2]]


async def test_recovery_from_a_full_disk_needs_no_request(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agl_otel.collector.commit.TRY_SECONDS", 0.0)
    with no_file_over(100), pytest.raises(UnavailableError, match="File too large"):
        await parts.intake.take("traces", body(1), IDS)
    assert "File too large" in parts.commit.trouble
    with no_file_over(100):
        for _ in range(10):
            await parts.commit.rotate()  # runs after each try of the log's thread
    assert parts.commit.trouble
    async with asyncio.timeout(60):
        while parts.commit.trouble:
            await parts.commit.rotate()
    await parts.intake.take("traces", body(1), IDS)


async def test_a_barrier_tries_a_full_disk_again_instead_of_remembering_it(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agl_otel.collector.write.BACKOFF", Backoff(3600.0, 3600.0))

    def no_space(*_: object, **__: object) -> None:
        raise DiskFullError("it is full: make room")

    with monkeypatch.context() as patch:
        patch.setattr(parts.engine, "insert", no_space)
        await parts.intake.take("traces", body(1), IDS)
        for _ in range(3):
            with pytest.raises(UnavailableError, match="make room"):
                await parts.writer.barrier()
    await parts.writer.barrier()
    assert parts.engine.select("SELECT count() FROM otel.otel_traces") == [[1]]


async def test_a_request_is_stored_even_if_its_client_disconnects(parts: Parts) -> None:
    taking = asyncio.ensure_future(parts.intake.take("traces", body(1), IDS))
    await asyncio.sleep(0)
    taking.cancel()
    await parts.intake.take("traces", body(2), IDS)
    await parts.writer.barrier()
    assert parts.engine.select("SELECT count() FROM otel.otel_traces") == [[2]]


async def test_ack_stored_waits_for_the_queue_and_ack_durable_does_not(parts: Parts) -> None:
    parts.queue.away = True
    await parts.intake.take("traces", body(1), IDS)
    stored = asyncio.ensure_future(parts.intake.take("traces", body(1), {**IDS, conventions.HEADER_ACK: "stored"}))
    done, _ = await asyncio.wait({stored}, timeout=0.3)
    assert not done
    parts.queue.away = False
    async with asyncio.timeout(300):
        await stored
    assert parts.engine.select("SELECT SequenceId FROM otel.otel_traces") == [[1]]


async def test_a_request_that_failed_may_be_sent_again(parts: Parts) -> None:
    for _ in range(2):
        with pytest.raises(DataError):
            await parts.intake.take("traces", b"\xff\xff", IDS)


async def test_attempt_spans_and_seals_cause_heartbeats_but_are_not_counted_as_spans(parts: Parts) -> None:
    await parts.intake.take("traces", body(1, conventions.SPAN_ATTEMPT, conventions.SPAN_SEAL), IDS)
    await parts.intake.take("traces", body(2, "work", "more"), {**IDS, conventions.HEADER_ATTEMPT_ID: "at-2"})
    await parts.intake.take("traces", body(3), {})
    await parts.heartbeats.flush(everything=True)
    assert parts.queue.received == [Observation("ro-1", "at-1", 0, NOW), Observation("ro-1", "at-2", 2, NOW)]


async def test_a_resend_after_a_restart_is_recognised_while_the_log_has_the_request(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    parts.queue.away = True
    await parts.intake.take("traces", body(1), IDS)
    await parts.close()
    parts = Parts(tmp_path)
    await parts.intake.take("traces", body(1), IDS)
    await parts.writer.barrier()
    assert parts.engine.select("SELECT count() FROM otel.otel_traces") == [[1]]
    await parts.close()


async def test_a_resend_is_recognised_after_restarts_and_forgotten_after_ten_minutes(tmp_path: Path) -> None:
    bad = ExportTraceServiceRequest.FromString(body(1, "good", "bad"))
    bad.resource_spans[0].scope_spans[0].spans[1].span_id = b"short"
    times = [NOW, NOW + 1, NOW + RESEND_SECONDS - 1, NOW + RESEND_SECONDS + 1]
    counts: list[list[list[object]]] = []
    for now in times:
        parts = Parts(tmp_path, now=now)
        outcome = await parts.intake.take("traces", bad.SerializeToString(), {**IDS, conventions.HEADER_ACK: "stored"})
        assert (outcome.rejected, outcome.message) == (1, "1 × span id is not 8 bytes (in JSON 16 hexadecimal digits) or all zero")
        counts.append(parts.engine.select("SELECT count() FROM otel.otel_traces"))
        await parts.close()
    assert counts == [[[1]], [[1]], [[1]], [[2]]]


async def test_requests_above_the_memory_limit_are_read_back_from_the_log(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agl_otel.collector.write.MAX_HELD_BYTES", 500)
    parts.queue.away = True
    for number in range(1, 40):
        await parts.intake.take("traces", body(number, "a", "b"), IDS)
    parts.queue.away = False
    async with asyncio.timeout(300):
        await parts.writer.barrier()
    assert parts.engine.select("SELECT count(), uniqExact(SequenceId), max(SequenceId) FROM otel.otel_traces") == [[78, 78, 78]]


def damage(log: Log, *positions: int) -> None:
    for segment in log.directory.glob("*.wal"):
        data = bytearray(segment.read_bytes())
        for frame in read(segment, first=int(segment.stem)):
            if isinstance(frame, Frame) and frame.position in positions:
                data[frame.offset + HEADER_BYTES + len(frame.payload) - 1] ^= 1
        segment.write_bytes(data)


async def test_a_record_damaged_while_waiting_is_kept_aside_and_all_others_are_written(
    parts: Parts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("agl_otel.collector.write.MAX_HELD_BYTES", 0)
    parts.queue.away = True
    await parts.intake.take("traces", body(100), IDS)
    async with asyncio.timeout(300):
        while not parts.writer.trouble:  # noqa: ASYNC110 - a thread holds that request and reads no more
            await asyncio.sleep(0.01)
    sent = {number: await parts.intake.take("traces", body(number, "a", "b"), IDS) for number in range(1, 8)}
    hit = {number: position for number in (1, 4, 5, 7) if (position := sent[number].position) is not None}
    waiting = asyncio.ensure_future(parts.intake.take("traces", body(4, "a", "b"), {**IDS, conventions.HEADER_ACK: "stored"}))
    await asyncio.sleep(0)
    damage(parts.log, *hit.values())
    parts.queue.away = False
    async with asyncio.timeout(300):
        await parts.writer.barrier()
        with pytest.raises(UnavailableError, match="send it again"):
            await waiting
    assert parts.engine.select("SELECT count(), uniqExact(SequenceId), max(SequenceId) FROM otel.otel_traces") == [[7, 7, 7]]
    assert parts.writer.idle
    for number, position in hit.items():
        assert f"damaged, lost: record {position} (2 spans of 'ro-1'); " in caplog.text, number
    assert {record.levelname for record in caplog.records if "damaged" in record.getMessage()} == {"ERROR"}
    kept = b"".join(path.read_bytes() for path in parts.log.directory.glob("*.damaged"))
    assert all(number.to_bytes(16) in kept for number in hit)
    assert parts.log.damaged_bytes == len(kept)
    async with asyncio.timeout(300):
        await parts.intake.take("traces", body(4, "a", "b"), {**IDS, conventions.HEADER_ACK: "stored"})
    assert parts.engine.select("SELECT count(), max(SequenceId) FROM otel.otel_traces") == [[9, 9]]


async def test_requests_waiting_for_the_disk_are_limited(parts: Parts) -> None:
    parts.in_flight.limit = 10
    first, second = await asyncio.gather(
        parts.intake.take("traces", body(1), IDS), parts.intake.take("traces", body(2), IDS), return_exceptions=True
    )
    assert not isinstance(first, BaseException)
    assert isinstance(second, UnavailableError)
    await parts.intake.take("traces", body(2), IDS)
    assert parts.in_flight.bytes == 0


async def test_the_level_that_gave_the_ids_is_counted(parts: Parts) -> None:
    await parts.intake.take("traces", body(1), IDS)
    request = ExportTraceServiceRequest.FromString(body(2, conventions.SPAN_ATTEMPT, "own", "by trace"))
    for span in request.resource_spans[0].scope_spans[0].spans[:2]:
        span.attributes.add(key=conventions.ROLLOUT_ID).value.string_value = "ro-2"
        span.attributes.add(key=conventions.ATTEMPT_ID).value.string_value = "at-1"
    await parts.intake.take("traces", request.SerializeToString(), {})
    await parts.intake.take("traces", body(3), {})
    assert parts.intake.levels == {"metadata": 1, "span": 2, "trace": 1}
    assert parts.intake.counts["unidentified"] == 1
