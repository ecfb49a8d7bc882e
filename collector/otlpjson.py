"""OTLP/JSON ↔ protobuf. It is protobuf's JSON mapping with one exception: trace and span ids are hex, not base64.

An id that is not hex becomes one zero byte, which identification refuses for its length: one bad span, not a bad request. Invalid text
(an unpaired surrogate, bytes that are not UTF-8) becomes invalid bytes, so that the intake refuses its span only (unreadable.py).
In OTLP/JSON every object key is a field name (attributes are lists of {key, value}), so ids are found by key at any depth.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable
from typing import Any, Final

from google.protobuf import json_format
from google.protobuf.message import Message

from agl_otel.collector import crowded
from agl_otel.collector.refusals import hint
from agl_otel.collector.signals import PROTOCOLS
from agl_otel.errors import DataError

_IDS: Final = frozenset({"traceId", "spanId", "parentSpanId", "trace_id", "span_id", "parent_span_id"})
MAX_DEPTH: Final = 500  # nesting of messages: deeper than protobuf parses, so that the intake refuses one span and not all
_PATHS: Final = {
    name: protocol.path for protocol in PROTOCOLS for field in protocol.request.DESCRIPTOR.fields for name in (field.json_name, field.name)
}
"""{field of a request: path that takes it}."""
_NOT_AN_ID: Final = base64.b64encode(b"\0").decode()


def to_protobuf(make: Callable[[], Message], body: bytes) -> bytes:
    """Convert the OTLP/JSON request `body` to protobuf bytes; `make` returns an empty message. Raises DataError."""
    crowded.check_json(body)
    message = make()
    name = message.DESCRIPTOR.name
    no_text = os.urandom(16).hex()  # placeholder for invalid text, which a message cannot hold
    try:
        text = body.decode(json.detect_encoding(body), "surrogateescape")
        tree = json.loads(text)
        if not isinstance(tree, dict):
            raise DataError(f"this is no {name} as OTLP/JSON: it wants a JSON object")
        _check_path(tree, message)
        marked = _rewrite(tree, no_text if "\\u" in text or not _is_text(text) else "")
        json_format.ParseDict(tree, message, ignore_unknown_fields=True, max_recursion_depth=MAX_DEPTH)
    except (ValueError, TypeError, RecursionError, json_format.ParseError) as error:
        raise DataError(f"this is no {name} as OTLP/JSON: {error}{hint(body, as_json=True)}") from None
    raw = message.SerializeToString()
    return raw.replace(no_text.encode(), b"\xff" * len(no_text)) if marked else raw


def to_json(message: Message) -> bytes:
    """Convert a response or a google.rpc.Status to JSON."""
    return json.dumps(json_format.MessageToDict(message), ensure_ascii=False).encode()


def _check_path(tree: dict[str, Any], message: Message) -> None:
    """Raise DataError if the request has items of another signal, which would be lost as unknown fields."""
    for name, path in _PATHS.items():
        if tree.get(name) and name not in message.DESCRIPTOR.fields_by_camelcase_name and name not in message.DESCRIPTOR.fields_by_name:
            raise DataError(f"this is no {message.DESCRIPTOR.name} as OTLP/JSON: it has {name}, which belong to {path}")


def _rewrite(tree: Any, no_text: str) -> bool:
    """Convert hex ids to base64 in place, and invalid texts to `no_text` unless it is empty; return whether there were any of these."""
    marked = False
    todo: list[Any] = [tree]
    while todo:
        node = todo.pop()
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            if key in _IDS:
                node[key] = _base64_of_hex(value)
            elif isinstance(value, (dict, list)):
                todo.append(value)
            elif no_text and isinstance(value, str) and not _is_text(value):
                node[key], marked = no_text, True
    return marked


def _is_text(text: str) -> bool:
    """Return whether it has no unpaired surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _base64_of_hex(value: Any) -> str:
    if value is None:
        return ""
    try:
        if not value.isascii() or not value.isalnum():  # bytes.fromhex would skip spaces
            return "" if value == "" else _NOT_AN_ID
        return base64.b64encode(bytes.fromhex(value)).decode()
    except (ValueError, AttributeError):
        return _NOT_AN_ID
