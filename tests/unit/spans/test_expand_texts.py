from __future__ import annotations

import json

import numpy as np
import pyarrow as pa

from agl_otel.spans.history import Place, expand_texts
from agl_otel.traces.tokens import call_texts
from agl_otel.types.columns import CallColumns, Ragged


def at(call: int, attempt: str = "at-1") -> Place:
    return ("ro-1", attempt, "p", call)


def said(*texts: str) -> str:
    return json.dumps([{"role": "user", "parts": [{"type": "text", "content": text}]} for text in texts])


def test_calls_that_continue_others_are_expanded() -> None:
    places = [at(1), at(2), at(3), at(4)]
    full = expand_texts(places, [said("a", "b"), said("c"), said("d"), said("x")], [0, 1, 2, 1], [0, 2, 3, 1])
    assert full == [said("a", "b"), said("a", "b", "c"), said("a", "b", "c", "d"), said("a", "x")]


def test_choices_of_a_call_share_its_history() -> None:
    assert expand_texts([at(1), at(1)], [said("a", "b"), said("b")], [0, 1], [0, 1]) == [said("a", "b"), said("a", "b")]


def test_a_conversation_with_a_missing_call_is_not_expanded() -> None:
    lost = expand_texts(
        [at(2), at(3), at(1, "at-2"), at(2, "at-2")], [said("b"), said("c"), "no JSON", said("d")], [1, 2, 0, 1], [1, 2, 0, 1]
    )
    assert lost == ["", "", "no JSON", ""]
    assert expand_texts([at(1), at(2)], [said("a"), said("c")], [0, 1], [0, 2])[1] == ""  # more than the first has


def test_texts_are_expanded_in_any_storage_order() -> None:
    stored = {
        "RolloutId": ["ro-1", "ro-1"], "AttemptId": ["at-1", "at-1"], "SpanId": ["s2", "s1"], "Instructions": ["", ""],
        "Asked": [said("c"), said("a", "b")], "Answered": ["", ""], "Tools": ["", "[1]"], "MessagesCall": [1, 0], "MessagesBefore": [2, 0],
        "ToolsCall": [1, 0],
    }  # fmt: skip
    texts = call_texts(pa.table(stored), columns("s1", "s2", "unread"))
    assert texts.asked == [said("a", "b"), said("a", "b", "c"), ""]
    assert texts.tools == ["[1]", "[1]", ""]


def columns(*span_ids: str) -> CallColumns:
    count = len(span_ids)
    zeros, empty = np.zeros(count, np.int64), [""] * count
    nothing = Ragged.from_rows([[]] * count, np.int32)
    return CallColumns(
        rollout_id=["ro-1"] * count, attempt_id=["at-1"] * count, process=["p"] * count, span_id=list(span_ids), parent_span_id=empty,
        call=np.arange(1, count + 1), choice=zeros, sequence=zeros.astype(np.uint64), prefix_call=zeros, prefix_choice=zeros,
        prompt=nothing, response=nothing, logprobs=nothing, model_version=empty, agent=empty, incomplete=empty,
    )  # fmt: skip
