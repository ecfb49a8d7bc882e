"""The tree of spans is read with the traces, and rewards on any of its spans become returns of the calls."""

from __future__ import annotations

from typing import Any

from agl_otel.adapters.credit import attempt_trees, to_go
from agl_otel.traces.opened import TraceStore
from agl_otel.traces.reader import TraceReader
from agl_otel.types.columns import Traces
from agl_otel_hook import conventions
from tests.contract.traces.test_evaluations import AT, evaluation, events, log, record
from tests.contract.traces.test_reader import attempt, call, insert, rollout, row


def emitted(number: int, reward: float, parent: str) -> dict[str, Any]:
    return row(number, conventions.SPAN_ANNOTATION, {conventions.reward_value_key(0): str(reward)}, ParentSpanId=parent)


async def test_rewards_on_spans_become_returns_of_calls(engine: TraceStore, reader: TraceReader) -> None:
    """Two steps of two calls; the root has the sequence 20."""
    insert(
        engine,
        row(20, conventions.SPAN_ATTEMPT),
        row(8, "step", ParentSpanId="s20"),
        row(15, "step", ParentSpanId="s20", **events(evaluation(4.0))),
        row(9, "tool", ParentSpanId="s15"),
        call(1, 1, ParentSpanId="s8"),
        call(2, 2, ParentSpanId="s8"),
        call(10, 3, ParentSpanId="s15"),
        call(11, 4, ParentSpanId="s15"),
        emitted(3, 1.0, "s8"),
        emitted(16, 2.0, "s20"),
    )
    log(engine, record(evaluation(8.0), AT + 1, SpanId="s8"), record(evaluation(16.0), AT + 1, SpanId="s10"))
    traces = await reader.traces([rollout()], [attempt()], tree=True)
    assert returns(traces) == [8 + 4 + 16 + 2, 8 + 4 + 16 + 2, 4 + 16 + 2, 4 + 2], (
        "the evaluation of the first step replaces what it emitted"
    )
    assert Traces.joined(traces, traces).tree is not None
    flat = await reader.traces([rollout()], [attempt()])
    assert flat.tree is None and returns(flat) != returns(traces)


def returns(traces: Traces) -> list[float]:
    return to_go(attempt_trees(traces, [("ro-1", "at-1")])["ro-1", "at-1"]).tolist()
