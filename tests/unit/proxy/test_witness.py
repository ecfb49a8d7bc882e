"""Announcing attempts to the queue: a call that is cancelled meanwhile is cancelled."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from agl_otel.proxy.witness import Witnesses


class Queue:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.answer = asyncio.Event()

    async def witness(self, _: Sequence[Any]) -> None:
        await self.answer.wait()


async def test_a_call_is_cancelled_also_as_its_attempt_is_announced() -> None:
    queue: Any = Queue()
    witnesses = Witnesses(queue, "http://127.0.0.1:1", Counter())
    call = asyncio.create_task(witnesses.announce(("ro-1", "at-1"), "m"))
    await asyncio.sleep(0)
    announced = witnesses._known["ro-1", "at-1"][1]  # pyright: ignore[reportPrivateUsage]  # the state that is being tested
    announced.add_done_callback(lambda _: call.cancel())  # its client disconnects in that very turn of the loop
    queue.answer.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    await witnesses.close()
