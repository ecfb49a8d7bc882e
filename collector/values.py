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
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from agl_otel.collector import plain_pb2 as plain

Value = AnyValue | plain.AnyValue
"""A value as OTLP defines it, or as the fast path parses it."""
REPEATED: Final = "repeated_keys"
"""Name of the counter of repeated keys, which are dropped."""
LONG: Final = 16  # elements; numpy is faster for lists from this length on
_WIDTH_MASKS: Final = np.array([(1 << (8 * width)) - 1 for width in range(6)], dtype=np.uint64)
PREFIXED: Final = re.compile(r"(resource|span|scope|event\.[0-9]+|link\.[0-9]+):")


def to_map(
    attributes: Iterable[KeyValue], types: dict[str, str], prefix: str = "", *, counts: Counter[str] | None = None
) -> dict[str, str]:
    """Return the attributes as texts; add the types of those that are not strings to `types`, under `prefix` + key.

    Adds the number of repeated keys to `counts` (REPEATED).
    """
    counts = Counter() if counts is None else counts
    texts: dict[str, str] = {}
    for attribute in attributes:
        key = attribute.key
        if key in texts:
            counts[REPEATED] += 1
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
        return _long_array(value) or _json(value, "array", counts)
    if kind == "kvlist_value":
        return _json(value, "kvlist", counts)
    return "", "empty"


def double_text(number: float) -> str:
    """Format like pdata's AsString: the shortest text that parses back to `number`, with an exponent below 1e-6 and from 1e21 on."""
    if not math.isfinite(number):
        return "NaN" if number != number else "Infinity" if number > 0 else "-Infinity"
    return _shortest(repr(number))


def is_whole(numbers: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return, for finite numbers, whether each one's text looks like an int: it has neither point nor exponent."""
    return (numbers == np.trunc(numbers)) & (np.abs(numbers) < 1e21)


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


def _long_array(value: AnyValue) -> tuple[str, str] | None:
    """Return (text, type) of a long list of token ids or numbers without a Python loop over the values; None for anything else."""
    if len(value.array_value.values) < LONG:
        return None
    if (ids := int_array(value)) is not None:
        return json.dumps(ids.tolist(), separators=(",", ":")), "array"
    if (numbers := doubles(value)) is None:
        return None
    text = json.dumps(numbers.tolist(), separators=(",", ":"))
    whole = bool(np.any(is_whole(numbers)))
    if whole or "e" in text:
        text = f"[{','.join(map(_shortest, text[1:-1].split(',')))}]"
    return text, "array:d" if whole else "array"


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


def int_array(value: Value) -> NDArray[np.uint32] | None:
    """Read an OTLP array of ints from 0 to 2**32 - 1 without a Python loop; None for anything else."""
    return int_arrays([value])[0]


def int_arrays(values: Sequence[Value]) -> list[NDArray[np.uint32] | None]:
    """Read several arrays at once with `int_array`'s result for each: numpy calls cost more than the numbers of one prompt."""
    if not all(value.WhichOneof("value") == "array_value" for value in values):
        return [int_array(value) if value.WhichOneof("value") == "array_value" else None for value in values]
    numbers = _varints(b"".join([value.array_value.SerializePartialToString() for value in values]))
    if numbers is None:
        return [int_array(value) for value in values] if len(values) > 1 else [None]
    ends = np.cumsum([len(value.array_value.values) for value in values])
    return list(np.split(numbers, ends[:-1]))


def _varints(raw: bytes) -> NDArray[np.uint32] | None:
    """Read the numbers of a serialised ArrayValue of ints below 2**32; None for anything else.

    On the wire each element is 0a LEN 18 VARINT: exactly four bytes whose high bit is clear.
    """
    size = len(raw)
    if not size:
        return np.zeros(0, dtype=np.uint32)
    data = np.frombuffer(raw + bytes(8), dtype=np.uint8)  # padding: a whole word can be read at any offset
    ends = np.flatnonzero(data[:size] < 0x80)
    if len(ends) % 4:
        return None
    tag, kind, last = ends[0::4], ends[2::4], ends[3::4]
    width = last - kind
    if tag[0] or last[-1] != size - 1 or int(width.max()) > 5 or not bool(np.all(kind - tag == 2) and np.all(tag[1:] == last[:-1] + 1)):
        return None
    prefixes = np.ndarray((size,), dtype="<u4", buffer=data, strides=(1,))[tag] & 0xFFFFFF
    if not bool(np.all(prefixes == 0x18000A + ((width + 1) << 8))):
        return None
    word = np.ndarray((size,), dtype="<u8", buffer=data, strides=(1,))[kind + 1] & _WIDTH_MASKS[width]
    numbers = (word & 0x7F) | (word >> 1 & 0x3F80) | (word >> 2 & 0x1FC000) | (word >> 3 & 0xFE00000) | (word >> 4 & 0x7F0000000)
    return numbers.astype(np.uint32) if int(numbers.max()) < 2**32 else None


def double_array(value: Value) -> NDArray[np.float32] | None:
    """Read an OTLP array of doubles that float32 represents exactly; None for anything else."""
    numbers = doubles(value)
    if numbers is None:
        return None
    with np.errstate(over="ignore"):
        small = numbers.astype(np.float32)
    return small if bool(np.all(small.astype(np.float64) == numbers)) else None


def doubles(value: Value) -> NDArray[np.float64] | None:
    """Read an OTLP array of finite doubles without a Python loop (each is 0a 09 21 and eight bytes); None for anything else."""
    if value.WhichOneof("value") != "array_value":
        return None
    raw = value.array_value.SerializePartialToString()
    if len(raw) % 11:
        return None
    cells = np.frombuffer(raw, dtype=np.dtype([("tag", "u1"), ("size", "u1"), ("kind", "u1"), ("number", "<f8")]))
    if not bool(np.all(cells["tag"] == 0x0A) and np.all(cells["size"] == 9) and np.all(cells["kind"] == 0x21)):
        return None
    numbers = cells["number"]
    return numbers if bool(np.all(np.isfinite(numbers))) else None
