"""What was said in model calls, from the columns of texts: conversations, images, and the messages that explain a break. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from agl_otel.adapters.dialects.agl import DIALECT
from agl_otel.adapters.dialects.table import Conversation, Message, checked
from agl_otel.spans.tolerant import MALFORMED, json_of
from agl_otel.types.columns import CallTexts

NOTHING: Final = Conversation([], [], None)
SHORTENED: Final = re.compile(r"\d+ messages of \d+ characters are left out")
"""What our proxy writes in place of messages that are too long for an attribute."""
MASKED: Final = "[masked]"
"""What the collector stores in place of a text that a rule drops."""


@dataclass(frozen=True, slots=True)
class _Told:
    """A call as the readers of dialects take it."""

    name: str
    attributes: Mapping[str, Any]


def conversation_at(texts: CallTexts | None, row: int) -> Conversation:
    """What one call was asked and answered, in OpenAI's form; nothing where it was not read, not captured, or is no JSON of that shape."""
    if texts is None or not texts.asked[row]:
        return NOTHING
    attributes = {
        "gen_ai.system_instructions": texts.instructions[row],
        "gen_ai.input.messages": texts.asked[row],
        "gen_ai.output.messages": texts.answered[row],
        "gen_ai.tool.definitions": texts.tools[row],
    }
    try:
        return checked(DIALECT.read(_Told("", attributes)))  # pyright: ignore[reportArgumentType] - the reader looks at the attributes alone
    except MALFORMED:
        return NOTHING


def messages_at(texts: CallTexts | None, row: int) -> tuple[tuple[str, ...], str]:
    """(messages asked, the answer), each as "role: …", so that equal ones are equal texts; nothing where some were left out or masked."""
    said = conversation_at(texts, row)
    if said.prompt and SHORTENED.fullmatch(str(said.prompt[0].get("content"))):
        return (), ""
    if any(message.get("content") == MASKED for message in (*said.prompt, *said.reply)):  # equal now, whatever they were
        return (), ""
    return tuple(map(_flat, said.prompt)), _flat(said.reply[0]) if said.reply else ""


def _flat(message: Message) -> str:
    content = message.get("content") or ""
    parts = {key: message[key] for key in ("tool_calls", "tool_call_id") if message.get(key)}
    for call in parts.get("tool_calls", ()):
        call["function"]["arguments"] = _canonical(call["function"]["arguments"])
    text = content if isinstance(content, str) else json.dumps(content, sort_keys=True)
    return f"{message.get('role')}:{text.strip()}{json.dumps(parts, sort_keys=True) if parts else ''}"


def _canonical(arguments: str) -> str:
    """Arguments of a tool without the spaces and the order that a client may change."""
    try:
        return json.dumps(json_of(arguments), sort_keys=True)
    except ValueError:
        return arguments
