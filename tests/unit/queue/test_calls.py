"""Conversions of many items: in pieces, so that other tasks of the event loop are never delayed for long."""

from __future__ import annotations

import asyncio

from agl_otel.queue.calls import PIECE, in_pieces


async def test_other_tasks_run_between_the_pieces_of_a_conversion() -> None:
    seen: list[int] = []
    done: list[str] = []

    def convert(item: int) -> str:
        done.append(str(item))
        return str(item)

    async def watch() -> None:
        while True:
            seen.append(len(done))
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    items = list(range(3 * PIECE + 1))
    assert await in_pieces(convert, items) == [*map(str, items)]
    watching.cancel()
    assert seen[:4] == [PIECE, 2 * PIECE, 3 * PIECE, 3 * PIECE + 1]
    assert await in_pieces(convert, []) == []
