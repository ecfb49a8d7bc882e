"""The responses in memory: kept for ten minutes at a collector's top rate, in a bounded number of bytes."""

from __future__ import annotations

import asyncio
import hashlib
import tracemalloc

import pytest

from agl_otel.collector.remembered import ENTRY_BYTES, MAX_BYTES, Remembered
from agl_otel.collector.resends import RESEND_SECONDS, Outcome, PendingOutcome
from agl_otel.errors import UnavailableError

TOP_RATE = 1_000_000 / 1_080
"""Requests per second: one costs 1,080 µs of CPU (docs/scale.md)."""


def key(number: int) -> int:
    return int.from_bytes(hashlib.sha1(b"%d" % number).digest()[:16])


def test_ten_minutes_at_a_collectors_top_rate_fit() -> None:
    remembered = Remembered()
    count = int(TOP_RATE * RESEND_SECONDS)
    for number in range(count):
        at = number / TOP_RATE
        remembered.forget_old(at)
        remembered.put(key(number), at, Outcome(position=number))
    assert len(remembered) == count
    assert [remembered.get(key(number)) for number in (0, count // 2, count - 1)] == [
        Outcome(position=number) for number in (0, count // 2, count - 1)
    ]
    assert 2 * count * ENTRY_BYTES * 0.9 <= MAX_BYTES


def test_a_response_takes_about_the_counted_bytes() -> None:
    tracemalloc.start()
    try:
        remembered, before = Remembered(), tracemalloc.get_traced_memory()[0]
        for number in range(80_000):
            remembered.put(key(number), number / 1000, Outcome(position=number + 1_000_000))
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert used / 80_000 < ENTRY_BYTES * 1.2


def test_responses_older_than_ten_minutes_are_dropped_and_no_younger_ones() -> None:
    remembered = Remembered()
    for second in range(2000):
        remembered.put(key(second), second, Outcome())
        remembered.forget_old(second)
        oldest = max(0, second - int(RESEND_SECONDS))
        assert remembered.get(key(oldest)) is not None
        assert len(remembered) <= RESEND_SECONDS * 1.1 + 2


def test_above_the_limit_the_oldest_are_dropped_even_within_a_second() -> None:
    remembered = Remembered(max_bytes=1000 * ENTRY_BYTES)
    for number in range(5000):
        remembered.put(key(number), 1.0, Outcome(1, f"{number} × {'long ' * (number % 50)}") if number % 2 else Outcome())
        remembered.forget_old(1.0)
    known = [number for number in range(5000) if remembered.get(key(number)) is not None]
    assert known == [*range(known[0], 5000)]
    assert 100 < len(known) < 1000


def test_a_response_is_first_pending_and_a_failed_request_counts_as_new() -> None:
    remembered, pending = Remembered(), PendingOutcome()
    remembered.put(key(1), 1.0, pending)
    assert remembered.get(key(1)) is pending
    remembered.put(key(2), 99.0, Outcome())
    remembered.settle(key(1), Outcome(3, "3 × bad"))
    assert remembered.get(key(1)) == Outcome(3, "3 × bad")
    assert remembered.get(key(2)) == Outcome()
    remembered.forget(key(1))
    remembered.forget(key(1))
    remembered.settle(key(1), Outcome())  # it has been forgotten
    assert remembered.get(key(1)) is None
    assert len(remembered) == 1


async def test_each_client_that_waits_for_a_response_may_stop_waiting() -> None:
    pending = PendingOutcome()
    waiting = [asyncio.ensure_future(pending.outcome()) for _ in range(3)]
    waiting[1].cancel()
    pending.settle(Outcome(position=7))
    assert [await waiting[0], await waiting[2]] == [Outcome(position=7)] * 2
    assert waiting[1].cancelled()
    failing = PendingOutcome()
    one = failing.outcome()
    failing.fail(UnavailableError("no"))
    with pytest.raises(UnavailableError, match="no"):
        await one
