"""Decodes the messages of model calls from text columns: conversations, and the messages that explain a split. Pure."""

from __future__ import annotations

import json
import re
from typing import Final

from agl_otel.spans.conversations import NO_MESSAGES
from agl_otel.spans.dialects.dialect import Conversation, Message, checked
from agl_otel.spans.dialects.shapes import parts_of
from agl_otel.spans.tolerant import MALFORMED, json_of
from agl_otel.types.bridges import unbridged
from agl_otel.types.columns import CallTexts

SHORTENED: Final = re.compile(r"\d+ messages of \d+ characters are left out")
"""The proxy's replacement for messages too long for an attribute."""
UNFIT_MEDIA: Final = {
    "other_media": "the prompt has audio or video, which no form of training data and no trainer here has",
    "no_image": "an image of the prompt has neither an address nor data where it was stored",
}
"""Reasons for refusing a call in every form and in training, by the media of its prompt (messages.unfit_media)."""
MASKED: Final = "[masked]"
"""The collector's replacement for a text that a rule drops."""
_HASH: Final = re.compile("sha256:[0-9a-f]{64}")


def is_masked(text: str) -> bool:
    """Return whether a masking rule has replaced this text."""
    return text == MASKED or _HASH.fullmatch(text) is not None


def conversation_at(texts: CallTexts | None, row: int) -> Conversation:
    """Return a call's messages in OpenAI's form; empty if they were not read, not captured, or malformed."""
    if texts is None or not texts.asked[row]:
        return NO_MESSAGES
    attributes = {
        "gen_ai.system_instructions": texts.instructions[row],
        "gen_ai.input.messages": texts.asked[row],
        "gen_ai.output.messages": texts.answered[row],
        "gen_ai.tool.definitions": texts.tools[row],
    }
    try:
        return checked(parts_of(attributes))
    except MALFORMED:
        return NO_MESSAGES


def messages_at(texts: CallTexts | None, row: int) -> tuple[tuple[str, ...], str]:
    """Return (prompt messages, reply), each as "role: …" for comparison; empty if some were left out or masked."""
    found = conversation_at(texts, row)
    if found.prompt and SHORTENED.fullmatch(str(found.prompt[0].get("content"))):
        return (), ""
    if any(message.get("content") == MASKED for message in (*found.prompt, *found.reply)):  # masked messages are all equal
        return (), ""
    return tuple(map(_flat, found.prompt)), _flat(found.reply[0]) if found.reply else ""


def unbridged_at(texts: CallTexts | None, row: int) -> str:
    """Return why no bridge continued a call's conversation, a key of UNBRIDGED; empty if none was refused, or it was not read."""
    return unbridged(texts.bridges[row]) if texts is not None else ""


def _flat(message: Message) -> str:
    content = message.get("content") or ""
    parts = {key: message[key] for key in ("tool_calls", "tool_call_id") if message.get(key)}
    for call in parts.get("tool_calls", ()):
        call["function"]["arguments"] = canonical(call["function"]["arguments"])
    text = content if isinstance(content, str) else json.dumps(content, sort_keys=True)
    return f"{message.get('role')}:{text}{json.dumps(parts, sort_keys=True) if parts else ''}"


def canonical(arguments: str) -> str:
    """Normalise a tool's arguments: clients may change spaces and order."""
    try:
        return json.dumps(json_of(arguments), sort_keys=True)
    except ValueError:
        return arguments
