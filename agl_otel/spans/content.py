"""The content attributes of spans and log records in all dialects, for masking. Pure.

The list is wider than what adapters read, because frameworks repeat whole conversations on their agent spans. A test masks every recording
and searches for what is left. Tool definitions do not count as content.
"""

from __future__ import annotations

from typing import Final

from agl_otel.spans.dialects import DIALECTS
from agl_otel.spans.dialects.dialect import Content
from agl_otel_hook import conventions

OTHERS: Final = (
    # agent spans of pydantic-ai and logfire; their model calls are in the dialect gen_ai
    Content("pydantic_ai.all_messages", "messages"),
    Content("all_messages_events"),
    Content("final_result", role="assistant"),
    Content("tool_arguments", role="assistant"),
    Content("tool_response", role="tool"),
    Content("model_request_parameters", role="system"),
    Content("request_data"),
    Content("response_data", reply=True),
    # what an agent emits
    Content(conventions.MESSAGE_BODY),
    Content(conventions.OBJECT_LITERAL),
    Content(conventions.OBJECT_JSON),
)
"""Content attributes of spans other than the model calls of a dialect."""
CONTENT: Final = (*(content for dialect in DIALECTS for content in dialect.content), *OTHERS)
METADATA_FIELDS: Final = frozenset(
    {"role", "id", "tool_call_id", "finish_reason", "index", "type", "model", "name", "event.name", "gen_ai.system"}
)
"""Last parts of keys below a content attribute that masking keeps, as they are not content."""
_EXACT: Final = {content.key: content for content in CONTENT if not content.key.endswith(".")}
_PREFIXES: Final = tuple(content for content in CONTENT if content.key.endswith("."))
MARKS: Final = tuple(sorted({content.key.split(".")[0].encode() for content in CONTENT}))
"""A request without any of these byte strings has no content and no token ids."""


def content_at(key: str) -> Content | None:
    """Return the table's entry for an attribute; None if it has no content that must be masked."""
    if (exact := _EXACT.get(key)) is not None:
        return exact
    found = next((content for content in _PREFIXES if key.startswith(content.key)), None)
    if found is not None and found.shape == "text" and (key.rpartition(".")[2] in METADATA_FIELDS or "token_ids" in key):
        return None
    return found
