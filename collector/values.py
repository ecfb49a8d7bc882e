"""OTLP attribute values ↔ the texts of ClickHouse's Map(String, String), exact in both directions.

The texts are those that the OpenTelemetry Collector stores (pdata's AsString); conformance/values has golden vectors. A string is stored
unchanged. The type of any other value is in the row's AttrTypes:

    int      decimal                      double   as Go's encoding/json writes it (`0.1`, `1`, `1e+300`), `NaN`, `Infinity`, `-Infinity`
    bool     true / false                 bytes    base64
    array    JSON list                    kvlist   JSON object, sorted by key
    empty    no value at all ("")
    column   the value is in the row's token column, not in the map (token ids and log-probs of a model call)

Within lists and objects the texts are the same, but strings, bytes and non-finite numbers are quoted, and empty is null. If the JSON is
ambiguous, the type has letters added, as in `array:id`: one for each number and string in the order of the text (i int, d double, s string,
y bytes); the last letter also applies to all that follow. Without letters, a number with neither point nor exponent is an int, any other
number a double, and a string a string.

If a key is repeated, at any level, the first value counts; the others are dropped and counted.

AttrTypes keys: the attribute's key for span (and log) attributes; `resource:KEY`, `event.N:KEY`, `link.N:KEY`, `scope:KEY` for others;
`span:KEY` for a span attribute whose own key looks like one of those. The reader in agl_otel/traces reverses this encoding.
"""

from __future__ import annotations

import base64
import math
import re
from collections import Counter
from collections.abc import Container, Iterable
from typing import Any, Final

import numpy as np
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from agl_otel_hook import conventions

REPEATED: Final = "repeated_keys"
"""Name of the counter of repeated keys, which are dropped."""
TOKEN_COLUMNS: Final = {
    conventions.LLM_PROMPT_TOKEN_IDS: "PromptTokenIds",
    conventions.LLM_RESPONSE_TOKEN_IDS: "ResponseTokenIds",
    conventions.LLM_RESPONSE_LOGPROBS: "ResponseLogprobs",
}
"""{key of an attribute: the column of its list}."""
PREFIXED: Final = re.compile(r"(resource|span|scope|event\.[0-9]+|link\.[0-9]+):")


def to_map(
    attributes: Iterable[KeyValue],
    types: dict[str, str],
    prefix: str = "",
    *,
    counts: Counter[str] | None = None,
    columns: Container[str] = (),
) -> dict[str, str]:
    """Return the attributes as texts; add the types of those that are not strings to `types`, under `prefix` + key.

    Adds the number of repeated keys to `counts` (REPEATED). Values of keys in `columns` are left out: they are in columns of their own.
    """
    counts = Counter() if counts is None else counts
    texts: dict[str, str] = {}
    seen: set[str] = set()
    for attribute in attributes:
        key = attribute.key
        if key in seen:
            counts[REPEATED] += 1
            continue
        seen.add(key)
        if key in columns:
            types[type_key(key, prefix)] = "column"
            continue
        value = attribute.value
        kind = value.WhichOneof("value")
        if kind == "string_value":
            texts[key] = value.string_value
            continue
        texts[key], name = encode(value, kind, counts)
        types[type_key(key, prefix)] = name
    return texts


def type_key(key: str, prefix: str) -> str:
    """Return the key of AttrTypes for an attribute."""
    return prefix + key if prefix or not PREFIXED.match(key) else f"span:{key}"


def encode(value: AnyValue, kind: str | None, counts: Counter[str]) -> tuple[str, str]:
    """Return (text, type) of a value; the type of a string is `string`. `counts`: see to_map."""
    if kind == "string_value":
        return value.string_value, "string"
    if kind == "int_value":
        return str(value.int_value), "int"
    if kind == "bool_value":
        return ("true" if value.bool_value else "false"), "bool"
    if kind == "double_value":
        return double_text(value.double_value), "double"
    if kind == "bytes_value":
        return base64.b64encode(value.bytes_value).decode(), "bytes"
    if kind == "array_value":
        return _json(value, "array", counts)
    if kind == "kvlist_value":
        return _json(value, "kvlist", counts)
    return "", "empty"


def double_text(number: float) -> str:
    """Format like pdata's AsString: the shortest text that parses back to `number`, with an exponent below 1e-6 and from 1e21 on."""
    if not math.isfinite(number):
        return "NaN" if number != number else "Infinity" if number > 0 else "-Infinity"
    return _shortest(repr(number))


def _shortest(text: str) -> str:
    """Convert Python's shortest text of a number to Go's."""
    if "e" not in text:
        return text.removesuffix(".0")
    mantissa, exponent = text.split("e")
    power = int(exponent)
    if not -7 < power < 21:
        return f"{mantissa}e{power:+d}"
    sign, digits = ("-" if mantissa[0] == "-" else ""), mantissa.lstrip("-").replace(".", "")
    return f"{sign}0.{'0' * (-power - 1)}{digits}" if power < 0 else f"{sign}{digits}{'0' * (power + 1 - len(digits))}"


def _json(value: AnyValue, name: str, counts: Counter[str]) -> tuple[str, str]:
    """Return (text, type) of a list or an object."""
    letters: list[str] = []  # one for each number and string
    unambiguous = True  # whether the text alone determines the types

    def write(value: AnyValue) -> str:
        nonlocal unambiguous
        kind = value.WhichOneof("value")
        if kind == "string_value":
            letters.append("s")
            return _json_string(value.string_value)
        if kind == "int_value":
            letters.append("i")
            return str(value.int_value)
        if kind == "double_value":
            letters.append("d")
            text = double_text(value.double_value)
            finite = math.isfinite(value.double_value)
            unambiguous &= finite and ("." in text or "e" in text)
            return text if finite else f'"{text}"'
        if kind == "bytes_value":
            letters.append("y")
            unambiguous = False
            return f'"{base64.b64encode(value.bytes_value).decode()}"'
        if kind == "array_value":
            return f"[{','.join([write(item) for item in value.array_value.values])}]"
        if kind == "kvlist_value":
            pairs: dict[str, AnyValue] = {}
            for pair in value.kvlist_value.values:
                pairs.setdefault(pair.key, pair.value)
            counts[REPEATED] += len(value.kvlist_value.values) - len(pairs)
            return f"{{{','.join([f'{_json_string(key)}:{write(pairs[key])}' for key in sorted(pairs)])}}}"
        return encode(value, kind, counts)[0] or "null"

    text = write(value)
    return text, name if unambiguous else f"{name}:{''.join(letters).rstrip(letters[-1])}{letters[-1]}"


def _json_string(text: str) -> str:
    """Write a string like Go's encoding/json without HTML escaping."""
    return f'"{_ESCAPED.sub(lambda match: _ESCAPES[match[0]], text)}"'


_CONTROL = {chr(code): f"\\u{code:04x}" for code in (*range(0x20), 0x2028, 0x2029)}
_ESCAPES = _CONTROL | {"\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t", '"': '\\"', "\\": "\\\\"}
_ESCAPED = re.compile(f"[{re.escape(''.join(_ESCAPES))}]")


def token_ids(value: AnyValue) -> list[int] | None:
    """Return a list of ints from 0 to 2**32 - 1; None for anything else."""
    numbers = _items(value, "int_value")
    return None if numbers is None or any(not 0 <= number < 2**32 for number in numbers) else numbers


def logprobs(value: AnyValue) -> tuple[list[float], bool]:
    """Return a list of doubles as float32, and whether none was rounded; ([], False) for anything else, or if one is not finite then."""
    numbers = _items(value, "double_value")
    if numbers is None:
        return [], False
    with np.errstate(over="ignore"):
        small = np.asarray(numbers, dtype=np.float64).astype(np.float32).tolist()
    return (small, small == numbers) if all(map(math.isfinite, small)) else ([], False)


def _items(value: AnyValue, kind: str) -> list[Any] | None:
    """Return the items of a list whose items are all of one kind; None for anything else."""
    if value.WhichOneof("value") != "array_value":
        return None
    items = value.array_value.values
    return [getattr(item, kind) for item in items] if all(item.WhichOneof("value") == kind for item in items) else None
