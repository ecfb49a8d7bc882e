"""The number of a collector's open files levels off, however many requests it gets (docs/deploy.md)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.collector.otlp import post_spans, span_request
from tests.contract.collector.stack import Stack

MOST = 500
"""More than the largest number measured: 485, after 39 minutes (docs/deploy.md)."""


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
async def test_open_files_do_not_grow_with_the_requests(own_stack: Stack) -> None:
    await own_stack.start_queue()
    await own_stack.start_collector()
    pid = own_stack.processes["collector"].pid

    async def after(first: int, last: int) -> int:
        for number in range(first, last):
            request = span_request([(f"ro-{number}", "at-1")], spans=3)
            await post_spans(own_stack, request, ack="durable" if number % 20 else "stored")
        return open_files(pid)

    early, late = await after(0, 50), await after(50, 350)
    assert late < MOST
    assert late - early < 150, "ClickHouse makes threads meanwhile, of three files each; a file a request would be 300"
