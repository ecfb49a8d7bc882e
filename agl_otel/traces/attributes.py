"""Decodes stored texts to typed attributes: the inverse of the collector's values.py, which documents the encoding.

Rows of another writer (the stock exporter) have no AttrTypes: their attributes stay texts.
"""

from __future__ import annotations

import base64
import itertools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

_PREFIXED: Final = re.compile(r"(resource|span|scope|event\.[0-9]+|link\.[0-9]+):")
_DECODERS: Final[dict[str, Callable[[str], Any]]] = {
    "int": int,
    "double": float,
    "bool": lambda text: text == "true",
    "bytes": lambda text: base64.b64decode(text),
    "array": json.loads,
    "kvlist": json.loads,
    "empty": lambda _: None,
    "otlp": lambda text: from_otlp_json(json.loads(text)),  # in rows of earlier releases
}
_EXACT: Final[dict[str, Callable[[str], Any]]] = {"i": int, "d": float, "s": str, "y": base64.b64decode}


def typed(texts: Mapping[str, str], types: Mapping[str, str], prefix: str = "") -> dict[str, Any]:
    """Decode one map of attributes; `prefix` is `resource:`, `event.N:`, `link.N:`, or empty for the span's own."""
    if not types:
        return dict(texts)
    values: dict[str, Any] = {}
    for key, text in texts.items():
        name, _, letters = types.get(prefix + key if prefix or not _PREFIXED.match(key) else f"span:{key}", "").partition(":")
        decode = _DECODERS.get(name)
        values[key] = _exact(text, letters) if letters else decode(text) if decode is not None else text
    return values


class _Number(str):
    """The literal of a number, to tell it from a JSON string."""


def _exact(text: str, letters: str) -> Any:
    """Decode a list or object whose types JSON alone does not determine; `letters` are those of values.py."""
    following = itertools.chain(letters, itertools.repeat(letters[-1]))

    def read(node: Any) -> Any:
        if isinstance(node, list):
            return [read(item) for item in node]
        if isinstance(node, dict):
            return {key: read(item) for key, item in node.items()}
        return _EXACT[next(following)](node) if isinstance(node, str) else node

    return read(json.loads(text, parse_int=_Number, parse_float=_Number))


def from_otlp_json(value: Mapping[str, Any]) -> Any:
    """Decode a value in OTLP/JSON form (protobuf's JSON mapping of AnyValue)."""
    kind = next(iter(value), "")
    content: Any = value.get(kind)
    if kind == "arrayValue":
        return [from_otlp_json(item) for item in content.get("values", [])]
    if kind == "kvlistValue":
        return {item.get("key", ""): from_otlp_json(item.get("value", {})) for item in content.get("values", [])}
    return {"intValue": int, "doubleValue": float, "bytesValue": base64.b64decode}.get(kind, lambda same: same)(content)
