from __future__ import annotations

import json

import numpy as np
import pyarrow as pa

from agl_otel.spans.history import Place, expand_texts
from agl_otel.traces.tokens import call_texts
from agl_otel.types.columns import CallColumns, Ragged


def at(call: int, attempt: str = "at-1") -> Place:
    return ("ro-1", attempt, "p", call)


def messages(*texts: str) -> str:
    return json.dumps([{"role": "user", "parts": [{"type": "text", "content": text}]} for text in texts])


def test_calls_that_continue_others_are_expanded() -> None:
    places = [at(1), at(2), at(3), at(4)]
    full = expand_texts(places, [messages("a", "b"), messages("c"), messages("d"), messages("x")], [0, 1, 2, 1], [0, 2, 3, 1])
    assert full == [messages("a", "b"), messages("a", "b", "c"), messages("a", "b", "c", "d"), messages("a", "x")]


def test_choices_of_a_call_share_its_history() -> None:
    assert expand_texts([at(1), at(1)], [messages("a", "b"), messages("b")], [0, 1], [0, 1]) == [messages("a", "b"), messages("a", "b")]


def test_a_conversation_with_a_missing_call_is_not_expanded() -> None:
    lost = expand_texts(
        [at(2), at(3), at(1, "at-2"), at(2, "at-2")], [messages("b"), messages("c"), "no JSON", messages("d")], [1, 2, 0, 1], [1, 2, 0, 1]
    )
    assert lost == ["", "", "no JSON", ""]
    assert expand_texts([at(1), at(2)], [messages("a"), messages("c")], [0, 1], [0, 2])[1] == ""  # more than the first has


def test_texts_are_expanded_in_any_storage_order() -> None:
    stored = {
        "RolloutId": ["ro-1", "ro-1"], "AttemptId": ["at-1", "at-1"], "SpanId": ["s2", "s1"], "Instructions": ["", ""],
        "Asked": [messages("c"), messages("a", "b")], "Answered": ["", ""], "Tools": ["", "[1]"], "MessagesCall": [1, 0],
        "MessagesBefore": [2, 0], "ToolsCall": [1, 0], "Versions": ["", ""], "Experts": ["", ""], "Bridge": ["", ""],
    }  # fmt: skip
    texts = call_texts(pa.table(stored), columns("s1", "s2", "unread"))
    assert texts.asked == [messages("a", "b"), messages("a", "b", "c"), ""]
    assert texts.tools == ["[1]", "[1]", ""]


def columns(*span_ids: str) -> CallColumns:
    count = len(span_ids)
    zeros, empty = np.zeros(count, np.int64), [""] * count
    nothing = Ragged.from_rows([[]] * count, np.int32)
    return CallColumns(
        rollout_id=["ro-1"] * count, attempt_id=["at-1"] * count, process=["p"] * count, span_id=list(span_ids), parent_span_id=empty,
        call=np.arange(1, count + 1), choice=zeros, sequence=zeros.astype(np.uint64), prefix_call=zeros, prefix_choice=zeros,
        prompt=nothing, response=nothing, logprobs=nothing, model_version=empty, agent=empty, incomplete=empty,
        temperature=np.full(count, np.nan), contract=empty,
    )  # fmt: skip
