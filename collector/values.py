"""OTLP attribute values ↔ the texts of ClickHouse's Map(String, String), exact in both directions.

A string is itself. What is not a string has its type in the row's AttrTypes:

    int      decimal                      double   shortest exact text, as ClickHouse writes it (`0.1`, `1`, `1e300`, `nan`, `inf`)
    bool     true / false                 bytes    base64
    array    JSON list                    kvlist   JSON object
    empty    no value at all ("")         otlp     OTLP/JSON of the value, for what JSON cannot tell (bytes or non-finite numbers inside)
    column   the value lies in the row's token column, not in the map (token ids and log-probs of a model call)

In JSON texts a number with neither point nor exponent is an int, any other a double (1.0 is `1.0` there).
AttrTypes keys: the attribute's key for span (and log) attributes; `resource:KEY`, `event.N:KEY`, `link.N:KEY`, `scope:KEY` for others;
`span:KEY` for a span attribute whose own key looks like one of those. The reader in agl_otel/traces undoes this.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
from google.protobuf import json_format
from numpy.typing import NDArray
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from agl_otel.collector import plain_pb2 as plain

Value = AnyValue | plain.AnyValue
"""A value as OTLP has it, or as the fast road parses it."""
LONG: Final = 16  # elements from which on a list is worth numpy
_WIDTH_MASKS: Final = np.array([(1 << (8 * width)) - 1 for width in range(6)], dtype=np.uint64)
_NESTED: Final = frozenset({"array_value", "kvlist_value", "bytes_value"})
PREFIXED: Final = re.compile(r"(resource|span|scope|event\.[0-9]+|link\.[0-9]+):")


def to_map(attributes: Iterable[KeyValue], types: dict[str, str], prefix: str = "") -> dict[str, str]:
    """The attributes as texts; the types of those that are no strings are put into `types` under `prefix` + key."""
    texts: dict[str, str] = {}
    for attribute in attributes:
        key = attribute.key
        if key in texts:
            continue  # keys must be unique; of one given twice the first counts
        value = attribute.value
        kind = value.WhichOneof("value")
        if kind == "string_value":
            texts[key] = value.string_value
            continue
        texts[key], name = encode(value, kind)
        types[type_key(key, prefix)] = name
    return texts


def type_key(key: str, prefix: str) -> str:
    """Under which key of AttrTypes the type of an attribute stands."""
    return prefix + key if prefix or not PREFIXED.match(key) else f"span:{key}"


def encode(value: AnyValue, kind: str | None) -> tuple[str, str]:
    """(text, type) of a value; the type of a string is `string`."""
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
    if kind == "array_value" and (text := _long_array(value) or _flat_array(value)):
        return text, "array"
    if kind == "array_value" or kind == "kvlist_value":
        try:
            return json.dumps(_plain(value), ensure_ascii=False, separators=(",", ":")), "array" if kind == "array_value" else "kvlist"
        except _NotJsonError:
            return json.dumps(json_format.MessageToDict(value), ensure_ascii=False, separators=(",", ":")), "otlp"
    return "", "empty"


def double_text(number: float) -> str:
    """The shortest text that reads back as `number`: as ClickHouse's toString has it."""
    text = _fixed(repr(number))
    return text[:-2] if text.endswith(".0") else text


def _fixed(text: str) -> str:
    """Python's shortest text of a number, with an exponent only below 1e-6 and from 1e21 on; otherwise with a point."""
    if "e" not in text:
        return text
    mantissa, exponent = text.split("e")
    power = int(exponent)
    if not -7 < power < 21:
        return f"{mantissa}e{power}"
    sign, digits = ("-" if mantissa[0] == "-" else ""), mantissa.lstrip("-").replace(".", "")
    return f"{sign}0.{'0' * (-power - 1)}{digits}" if power < 0 else f"{sign}{digits}{'0' * (power + 1 - len(digits))}.0"


def _long_array(value: AnyValue) -> str:
    """The JSON text of a long list of token ids or numbers, without a look at each element; empty where it is something else."""
    if len(value.array_value.values) < LONG:
        return ""
    ids = int_array(value)
    numbers = ids if ids is not None else _doubles(value)
    if numbers is None:
        return ""
    text = json.dumps(numbers.tolist(), separators=(",", ":"))
    return f"[{','.join(map(_fixed, text[1:-1].split(',')))}]" if "e" in text else text


def _flat_array(value: AnyValue) -> str:
    """The JSON text of a list of strings, finite numbers, booleans and nothings, as the fast road has it; empty where it holds others."""
    items: list[str] = []
    for item in value.array_value.values:
        kind = item.WhichOneof("value")
        if kind == "string_value":
            items.append(_json_string(item.string_value))
        elif kind in _NESTED or (kind == "double_value" and not math.isfinite(item.double_value)):
            return ""
        else:
            items.append(_fixed(repr(item.double_value)) if kind == "double_value" else encode(item, kind)[0] or "null")
    return f"[{','.join(items)}]"


def _json_string(text: str) -> str:
    """As ClickHouse writes a JSON string: control characters in upper-case hex, the two line separators escaped."""
    return f'"{_ESCAPED.sub(lambda match: _ESCAPES[match[0]], text)}"'


_CONTROL = {chr(code): f"\\u{code:04X}" for code in (*range(0x20), 0x2028, 0x2029)}
_ESCAPES = _CONTROL | {"\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t", '"': '\\"', "\\": "\\\\"}
_ESCAPED = re.compile(f"[{re.escape(''.join(_ESCAPES))}]")


class _NotJsonError(Exception):
    pass


def _plain(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(item) for item in value.array_value.values]
    if kind == "kvlist_value":
        result = {item.key: _plain(item.value) for item in value.kvlist_value.values}
        if len(result) != len(value.kvlist_value.values):
            raise _NotJsonError
        return result
    if kind == "bytes_value" or (kind == "double_value" and not math.isfinite(value.double_value)):
        raise _NotJsonError
    return getattr(value, kind) if kind is not None else None


def int_array(value: Value) -> NDArray[np.uint32] | None:
    """An OTLP array of small non-negative ints, read without a Python loop; None where it is anything else."""
    return int_arrays([value])[0]


def int_arrays(values: Sequence[Value]) -> list[NDArray[np.uint32] | None]:
    """`int_array` of each, in one go: numpy's calls cost more than the numbers of one call's prompt."""
    if not all(value.WhichOneof("value") == "array_value" for value in values):
        return [int_array(value) if value.WhichOneof("value") == "array_value" else None for value in values]
    numbers = _varints(b"".join([value.array_value.SerializePartialToString() for value in values]))
    if numbers is None:
        return [int_array(value) for value in values] if len(values) > 1 else [None]
    ends = np.cumsum([len(value.array_value.values) for value in values])
    return list(np.split(numbers, ends[:-1]))


def _varints(raw: bytes) -> NDArray[np.uint32] | None:
    """The numbers of a serialised ArrayValue of ints below 2**32; None where it holds anything else.

    On the wire each element is 0a LEN 18 VARINT: exactly four bytes whose high bit is clear.
    """
    size = len(raw)
    if not size:
        return np.zeros(0, dtype=np.uint32)
    data = np.frombuffer(raw + bytes(8), dtype=np.uint8)  # room to read a word anywhere
    ends = np.flatnonzero(data[:size] < 0x80)
    if len(ends) % 4:
        return None
    tag, kind, last = ends[0::4], ends[2::4], ends[3::4]
    width = last - kind
    if tag[0] or last[-1] != size - 1 or int(width.max()) > 5 or not bool(np.all(kind - tag == 2) and np.all(tag[1:] == last[:-1] + 1)):
        return None
    heads = np.ndarray((size,), dtype="<u4", buffer=data, strides=(1,))[tag] & 0xFFFFFF
    if not bool(np.all(heads == 0x18000A + ((width + 1) << 8))):
        return None
    word = np.ndarray((size,), dtype="<u8", buffer=data, strides=(1,))[kind + 1] & _WIDTH_MASKS[width]
    numbers = (word & 0x7F) | (word >> 1 & 0x3F80) | (word >> 2 & 0x1FC000) | (word >> 3 & 0xFE00000) | (word >> 4 & 0x7F0000000)
    return numbers.astype(np.uint32) if int(numbers.max()) < 2**32 else None


def double_array(value: Value) -> NDArray[np.float32] | None:
    """An OTLP array of doubles that float32 holds exactly; None where it is anything else."""
    numbers = _doubles(value)
    if numbers is None:
        return None
    with np.errstate(over="ignore"):
        small = numbers.astype(np.float32)
    return small if bool(np.all(small.astype(np.float64) == numbers)) else None


def _doubles(value: Value) -> NDArray[np.float64] | None:
    """An OTLP array of finite doubles (on the wire each is 0a 09 21 and eight bytes); None where it is anything else."""
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
