"""Markers of calling and forwarding processes: the caller's in the baggage, the proxy's announced to the queue before the call."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest

from agl_otel.errors import RefusedError, UnavailableError
from agl_otel.proxy.witness import Witnesses
from agl_otel.queue.updates import Witness
from agl_otel_hook import conventions
from tests.contract.proxy.stand import HELLO, SCOPE, Stand
from tests.model_server import ModelServer

BODY = {"model": "m", "messages": HELLO}
MARKER = "0123456789abcdef"


@pytest.mark.parametrize(
    ("baggage", "caller"),
    [
        (f"agentlightning.process={MARKER}", MARKER),
        (f"other=1, agentlightning.process = {MARKER};property=x ,last=2", MARKER),
        ("agentlightning.process=a%2Db", "a-b"),
        ("agentlightning.process=", None),
        ("agentlightning.process=no%20marker", None),
        ("agentlightning.processes=x", None),
        ("", None),
    ],
)
async def test_the_callers_marker_is_recorded_and_not_forwarded(stand: Stand, model: ModelServer, baggage: str, caller: str | None) -> None:
    status, _, _ = await stand.post(f"{SCOPE}/v1/chat/completions", BODY, baggage=baggage)
    assert status == 200
    (span,) = await stand.calls()
    assert span.attributes.get(conventions.LLM_CALLER) == caller
    assert "baggage" not in model.headers[0]


class SlowQueue:
    """Accepts announcements when released, unless it is unreachable or fails."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.error: Exception | None = None
        self.told: list[list[Witness]] = []

    async def witness(self, witnesses: Sequence[Witness]) -> None:
        if self.error is not None:
            raise self.error
        self.told.append(list(witnesses))
        await self.go.wait()


async def test_concurrent_announcements_are_one_message_and_sent_once() -> None:
    queue, counts = SlowQueue(), Counter[str]()
    witnesses = Witnesses(queue, "http://proxy", counts)
    waiting = [asyncio.create_task(witnesses.announce(("ro", f"at-{number % 3}"), "m")) for number in range(9)]
    first = asyncio.create_task(witnesses.announce(("ro", "at-0"), "m"))
    await asyncio.sleep(0)
    assert not first.done()
    queue.go.set()
    await asyncio.gather(first, *waiting)
    await witnesses.announce(("ro", "at-0"), "another")
    assert queue.told == [
        [Witness("ro", f"at-{number}", "m", "http://proxy") for number in range(3)],
        [Witness("ro", "at-0", "another", "http://proxy")],
    ]
    assert counts["unwitnessed"] == 0
    await witnesses.close()


async def test_an_unreachable_queue_delays_calls_briefly_and_is_told_later() -> None:
    queue, counts = SlowQueue(), Counter[str]()
    queue.error = UnavailableError("the queue is away")
    witnesses = Witnesses(queue, "", counts, wait_seconds=0.01)
    await witnesses.announce(("ro", "at"), "m")
    assert counts["unwitnessed"] == 1 and queue.told == []
    queue.error = None
    queue.go.set()
    while not queue.told:  # noqa: ASYNC110  # nobody tells
        await asyncio.sleep(0.01)
    await witnesses.announce(("ro", "at"), "m")
    assert counts["unwitnessed"] == 1 and len(queue.told) == 1
    await witnesses.close()


@pytest.mark.parametrize("error", [RefusedError("another token", status=401, code="token"), ValueError("nobody expected this")])
async def test_a_refusal_is_counted_logged_once_and_delays_no_call(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    queue, counts = SlowQueue(), Counter[str]()
    queue.go.set()
    queue.error = error
    witnesses = Witnesses(queue, "", counts, wait_seconds=3600)
    for number in (1, 2, 3):
        await witnesses.announce(("ro", "at"), "m")
        await witnesses.announce(("ro", f"at-{number}"), "m")
        assert counts["unwitnessed"] == 2 * number
    assert [str(error) in record.getMessage() for record in caplog.records] == [True]
    queue.error = None
    for _ in range(2):
        await witnesses.announce(("ro", "at"), "m")
    assert counts["unwitnessed"] == 6 and queue.told == [[Witness("ro", "at", "m", "")]]
    await witnesses.close()
