"""Reading long lists of token ids needs the memory of the result, not a multiple."""

from __future__ import annotations

import gc
import json
import tracemalloc
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agl_otel.traces.http import ClickHouseHttp
from agl_otel.traces.queries import _spans_in  # pyright: ignore[reportPrivateUsage] - its memory is measured
from agl_otel.traces.tokens import call_columns, distinct_in_order
from agl_otel.types.columns import VOCABULARY, shared
from agl_otel_hook import conventions

MIB = 1 << 20
CALLS = 40
IDS = 100_000
TEXTS = ("RolloutId", "AttemptId", "Process", "SpanId", "ParentSpanId", "ModelVersion", "Incomplete", "Agent")
NUMBERS = ("Choice", "PrefixCall", "PrefixChoice", "RetryOf", "Time", "Duration")


class Peak:
    """An upper bound of the peak memory of Python, numpy and pyarrow together, in bytes."""

    bytes = 0


POOLS: list[Any] = []
"""A pool has to outlive what was allocated from it."""


@contextmanager
def measured() -> Generator[Peak]:
    found, before = Peak(), pa.default_memory_pool()
    gc.collect()
    pool = pa.proxy_memory_pool(before)
    POOLS.append(pool)
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        yield found
        found.bytes = tracemalloc.get_traced_memory()[1] + (pool.max_memory() or 0)
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(before)


async def test_an_answer_is_held_once_while_it_comes() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(32):
            await response.write(bytes(MIB))
        return response

    app = web.Application()
    app.router.add_post("/", answer)
    async with TestServer(app) as server:
        client = ClickHouseHttp(str(server.make_url("")))
        with measured() as peak:
            assert len(await client.fetch("SELECT 1", "Arrow")) == 32 * MIB
        await client.close()
    assert peak.bytes < 1.4 * 32 * MIB


def calls(order: list[int], ids: int = IDS) -> Any:
    """Rows of observed.py in four chunks, as ClickHouse sends blocks: calls with these numbers, each with so many ids that hold it."""

    def chunk(numbers: list[int]) -> Any:
        count = len(numbers)
        columns: dict[str, Any] = {name: [""] * count for name in TEXTS}
        columns |= {name: pa.array([0] * count, pa.int64()) for name in NUMBERS}
        offsets = pa.array([ids * row for row in range(count + 1)], pa.int32())
        held = np.repeat(np.array(numbers, np.uint32), ids)
        return pa.table(
            {
                **columns,
                "SequenceId": pa.array(numbers, pa.uint64()),
                "Identity": pa.array(numbers, pa.uint64()),
                "IsCall": pa.array([1] * count, pa.uint8()),
                "IsTruncated": pa.array([0] * count, pa.uint8()),
                "HasMedia": pa.array([0] * count, pa.uint8()),
                "Call": pa.array(numbers, pa.int64()),
                "Temperature": [0.0] * count,
                "TopP": [0.0] * count,
                "Sampling": [""] * count,
                "ResponseId": [""] * count,
                "Rewards": [None] * count,
                "PromptTokenIds": pa.ListArray.from_arrays(offsets, pa.array(held)),
                "ResponseTokenIds": pa.ListArray.from_arrays(pa.array([0] * (count + 1), pa.int32()), pa.array([], pa.uint32())),
                "ResponseLogprobs": pa.ListArray.from_arrays(pa.array([0] * (count + 1), pa.int32()), pa.array([], pa.float32())),
            }
        )

    quarter = len(order) // 4
    return pa.concat_tables([chunk(order[start : start + quarter]) for start in range(0, len(order), quarter)])


@pytest.mark.parametrize("step", [1, 7], ids=["in order", "out of order"])
def test_the_columns_of_token_ids_are_copied_once_at_most(step: int) -> None:
    table = calls([number * step % CALLS + 1 for number in range(CALLS)])
    with measured() as peak:
        found = call_columns(distinct_in_order(table))
    assert [found.prompt[row].tolist() == [row + 1] * IDS for row in range(CALLS)] == [True] * CALLS
    assert peak.bytes < 1.25 * CALLS * IDS * 4


def test_repeated_and_unordered_rows_keep_their_token_ids() -> None:
    found = call_columns(distinct_in_order(calls([3, 1, 3, 2, 4, 4, 1, 5], ids=3)))
    assert [found.prompt[row].tolist() for row in range(len(found))] == [[call] * 3 for call in (1, 2, 3, 4, 5)]


def rows(count: int, ids: int) -> bytes:
    """Of sql/spans.sql, as JSON."""
    row = {
        **dict.fromkeys(("RolloutId", "AttemptId", "TraceId", "SpanId", "ParentSpanId", "SpanName"), "x"),
        **dict.fromkeys(("StatusCode", "StatusMessage", "ScopeName", "ScopeVersion", "TraceState", "ServiceName"), ""),
        **{key: [] for key in ("EventNames", "EventNanos", "EventAttributes")},
        **{key: [] for key in ("LinkTraceIds", "LinkSpanIds", "LinkTraceStates", "LinkAttributes")},
        **{key: {} for key in ("SpanAttributes", "ResourceAttributes")},
        **dict.fromkeys(("SequenceId", "StartNano", "Duration"), 1),
        "SpanKind": "Internal",
        "AttrTypes": {conventions.LLM_PROMPT_TOKEN_IDS: "column"},
        "PromptTokenIds": [number % 100_000 + 1000 for number in range(ids)],
    }
    return (json.dumps(row, separators=(",", ":")).encode() + b"\n") * count


@pytest.mark.full
def test_the_spans_of_long_lists_share_their_token_ids() -> None:
    """A list takes 8 bytes per item; separate int objects would take 28 more, and the answer is freed while it is read."""
    _spans_in(bytearray(rows(1, 1)))  # what is made once
    body = bytearray(rows(CALLS, IDS))
    length = len(body)
    with measured() as peak:
        spans, _ = _spans_in(body)
    assert [len(span.attributes[conventions.LLM_PROMPT_TOKEN_IDS]) for span in spans] == [IDS] * CALLS
    assert len(body) < length // 2
    assert peak.bytes < CALLS * IDS * 10 + length // 2


@pytest.mark.parametrize("ids", [[], [0, 7, VOCABULARY - 1], [5, VOCABULARY, 1 << 40], [-1, 0, 7], [-VOCABULARY]])
def test_sharing_changes_no_number(ids: list[int]) -> None:
    assert shared(ids) == ids
