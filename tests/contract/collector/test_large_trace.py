"""One attempt with 100,000 spans: views of it are limited, and report how much more there is."""

from __future__ import annotations

import asyncio
import json
import os

import pytest

from agl_otel.queue.client import QueueClient
from agl_otel.types import EnqueueRolloutRequest
from agl_otel_hook import conventions
from tests.command import run_command

from .otlp import post_spans, request_of, span
from .stack import Stack, start

SPANS = 100_000
AT_ONCE = 10_000


def agl(*args: str) -> str:
    done = run_command(args, os.environ)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.full
async def test_a_trace_of_100_000_spans_is_shown_in_part_with_the_number_of_the_rest(own_stack: Stack) -> None:
    await start(own_stack)
    async with QueueClient(own_stack.queue) as queue:
        (begun,) = await queue.start([EnqueueRolloutRequest(input="x")])
    ids = {conventions.ROLLOUT_ID: begun.rollout_id, conventions.ATTEMPT_ID: begun.attempt.attempt_id}
    trace, request = os.urandom(16), request_of([], ids)
    group = request.resource_spans[0].scope_spans[0]
    group.spans.extend([span(trace=trace)] * AT_ONCE)
    for _ in range(SPANS // AT_ONCE):
        for each in group.spans:
            each.span_id = os.urandom(8)
        await post_spans(own_stack, request)
    async with own_stack.reader() as reader:
        await reader.barrier()
        outline, total = await reader.outline(begun.rollout_id, limit=5000)
        assert (len(outline), total) == (5000, SPANS)
    shown = await asyncio.to_thread(agl, "traces", "show", begun.rollout_id, "--store", own_stack.queue)
    assert f"the first 2000 of {SPANS} spans" in shown and len(shown.splitlines()) < 2200
    some = json.loads(
        await asyncio.to_thread(agl, "traces", "show", begun.rollout_id, "--store", own_stack.queue, "--limit", "7", "--json")
    )
    assert (len(some["spans"]), some["spans_total"]) == (7, SPANS)
