"""Chat messages for fine-tuning by text, as behind an API: whole conversations, and pairs of replies. Pure.

They are for OpenAI's fine-tuning (https://platform.openai.com/docs/guides/supervised-fine-tuning), and for TRL and Axolotl as
conversational data. Only the model's replies are learnt: other assistant messages (examples in a prompt) get weight 0.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

from agl_otel.adapters.texts import SHORTENED, UNFIT_MEDIA
from agl_otel.spans.dialects.dialect import Message
from agl_otel.spans.tolerant import json_of

Row = dict[str, Any]
CHAT_REFUSALS: Final = {
    "incomplete_reply": "the reply was cut off, the call failed, or the agent's SDK repeated it and used the later reply",
    "no_reply": "no reply was captured with the call",
    "unreadable_messages": "the messages do not have the shape of their dialect",
    "shortened": "messages of the prompt were left out when it was stored, because they were too long",
    **UNFIT_MEDIA,
}
"""Reasons for refusing a call in a form that is read from spans, or of messages; counted once per call."""
_KEPT: Final = ("name", "tool_calls", "tool_call_id")


def conversations(calls: Iterable[Row], refused: Counter[str], *, by_call: bool = False) -> list[Row]:
    """Return {messages, tools} of each conversation of an attempt; `calls` are rows of `to_messages`, in order.

    A call whose messages are the beginning of a later call's becomes part of that one. With `by_call` every call is its own row, in which
    only its reply is learnt. `refused` counts by CHAT_REFUSALS.
    """
    rows: list[Row] = []
    for call in calls:
        messages = [_message(each) for each in call["messages"]]
        why = unfit(messages)
        if why:
            refused[why] += 1
        else:
            rows.append({**call, "messages": messages})
    if by_call:
        return [_weighted(row, {len(row["messages"])}) for row in rows]
    keys = [[_same(message) for message in row["messages"]] for row in rows]
    ends: list[set[int]] = [{len(each)} for each in keys]
    whole: list[Row] = []
    for place, row in enumerate(rows):
        later = next((n for n in range(place + 1, len(keys)) if keys[n][: len(keys[place])] == keys[place]), None)
        if later is None:
            whole.append(_weighted(row, ends[place]))
        else:
            ends[later] |= ends[place]
    return whole


def split_pair(chosen: Sequence[Message], rejected: Sequence[Message]) -> tuple[list[Message], list[Message], list[Message]]:
    """Return (prompt, chosen, rejected): the common beginning, and the rest of each conversation (at least one message)."""
    most = min(len(chosen), len(rejected)) - 1
    common = next((n for n in range(most) if _same(chosen[n]) != _same(rejected[n])), max(0, most))
    return list(chosen[:common]), list(chosen[common:]), list(rejected[common:])


def unfit(messages: Sequence[Message]) -> str:
    """Return the key of CHAT_REFUSALS for which the messages of a call make no row; empty if they are whole."""
    if not messages or messages[-1]["role"] != "assistant":
        return "no_reply"
    return "shortened" if SHORTENED.fullmatch(str(messages[0]["content"])) else ""


def _message(message: Message) -> Message:
    kept = {key: message[key] for key in _KEPT if message.get(key)}
    return {"role": message["role"], "content": message.get("content"), **kept}


def _weighted(row: Row, ends: set[int]) -> Row:
    """Set weight 0 on assistant messages that end no call, since the model did not write them here."""
    messages = [
        {**message, "weight": 0} if message["role"] == "assistant" and number not in ends else message
        for number, message in enumerate(row["messages"], start=1)
    ]
    return {**row, "messages": messages}


def _same(message: Message) -> str:
    """Return a text for comparing messages, independent of how a client writes them."""
    calls = [(call["function"].get("name"), _parsed(call["function"].get("arguments"))) for call in message.get("tool_calls") or ()]
    return json.dumps([message["role"], message.get("content") or "", calls, message.get("tool_call_id")], sort_keys=True)


def _parsed(arguments: Any) -> Any:
    try:
        return json_of(arguments)
    except (TypeError, ValueError):
        return arguments
