"""The fast path of spans: pass a request's protobuf bytes to ClickHouse unchanged, together with the fields that only the collector knows.

Pure. A request is parsed with plain.proto, which has only the fields and types that ClickHouse can build rows from (see otlp_rows.proto).
The ids, numbers and positions of its spans are set and its resources are prepared (cached, because they repeat); then it is serialised
again. No attribute value becomes a Python object.

Serialising fails if a request contains anything else (events, links, maps, bytes, nested lists). Its spans are then checked one by one, and
those that are not plain are left to decode.py, which supports everything. So are spans with a value whose text ClickHouse would write
differently (`is_odd`). Both paths produce the same rows, byte for byte.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError, EncodeError
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from agl_otel.collector import plain_pb2 as plain
from agl_otel.collector.decode import LOGPROBS, TOKEN_COLUMNS, nearest
from agl_otel.collector.identify import Identity
from agl_otel.collector.values import REPEATED, doubles, int_array, int_arrays, is_whole, to_map
from agl_otel_hook.varint import varint

MAX_RESOURCES: Final = 4096  # limit on cached prepared resources
REMEMBERED_BYTES: Final = 16 << 10  # longer resources are not cached
_TOKEN_KEYS: Final = tuple(key.encode() for key in TOKEN_COLUMNS)
_LARGE: Final = re.compile(rb"!(?<=[\n\x12]\t!).{7}[\x44-\x7f\xc4-\xff]", re.DOTALL)
"""A double of 2**65 or more, or not finite, as an attribute's value or in a list; also bytes that only look like one."""
_LIST: Final = re.compile(rb"\*(?<=[\x12\x80-\xff][\x00-\x7f]\*)(?=([\x80-\xff]*[\x00-\x7f]))")
"""A list as an attribute's value, up to its length; also bytes that only look like one, which _is_odd_list rules out."""
_ODD: Final = re.compile(rb"[!\x0b\x0e\x0f\x1a-\x1f]")  # the tag of a double, or a character whose escape has a letter
_ODD_TEXT: Final = re.compile("[\x0b\x0e\x0f\x1a-\x1f]")
_FIELDS: Final = {"PromptTokenIds": "prompt_token_ids", "ResponseTokenIds": "response_token_ids", LOGPROBS: "response_logprobs"}


class Packed(NamedTuple):
    """A request as the fast path inserts it."""

    data: bytes
    """Input of ClickHouse's Protobuf format: the length, then the message. Empty if no span is plain."""
    left: frozenset[int]
    """BatchPos of the spans left to decode.py."""
    keys: int = 0
    """Number of span attributes in `data`, repeated keys included."""
    repeated: int = 0
    """Number of repeated keys dropped while packing."""


def pack(
    raw: bytes, identities: Sequence[Identity], numbers: Sequence[int], *, received_ms: int, batch: int, first: int, stored: Container[int]
) -> Packed:
    """Build the fast path's bytes of a request.

    The arguments are those of `decode.span_rows`; spans at positions in `stored` are left out. Raises ValueError if the numbers of
    identities, numbers and spans do not agree.
    """
    everything = range(first, first + len(numbers))
    again: list[int] = []
    try:
        request = plain.Request.FromString(raw)
        request.DiscardUnknownFields()  # is_odd expects only the bytes of known fields
        spans, repeated = _put_ids(request, identities, numbers, first, stored)
        if any(key in raw for key in _TOKEN_KEYS):
            again = _take_tokens(spans)
    except DecodeError:  # a bytes value or a map that does not parse as plain.proto's type
        return Packed(b"", frozenset(position for position in everything if position not in stored))
    request.batch_id = batch
    request.received_ms = received_ms
    left: list[int] = []
    try:
        data = request.SerializeToString()
    except EncodeError:
        left += [_leave_out(span) for span in spans if not span.IsInitialized()]
        data = request.SerializeToString()
    if is_odd(data):
        left += [_leave_out(span) for span in spans if span.row and is_odd(span.SerializeToString())]
        data = request.SerializeToString()
    if len(left) == len(spans):
        return Packed(b"", frozenset(left))
    repeated += sum(spans[number].row > 0 for number in again)
    return Packed(varint(len(data)) + data, frozenset(left), sum(len(span.attributes) for span in spans), repeated)


def is_odd(data: bytes) -> bool:
    """Whether `data` may contain a value whose text ClickHouse would write differently from values.py."""
    return _LARGE.search(data) is not None or any(_is_odd_list(data, found) for found in _LIST.finditer(data))


def _is_odd_list(data: bytes, found: re.Match[bytes]) -> bool:
    size = sum((byte & 0x7F) << 7 * place for place, byte in enumerate(found[1]))
    start = found.end(1)
    whole = varint(size + 1 + len(found[1]))  # the length of an attribute value that holds this list
    if not data.endswith(b"\x12" + whole, 0, found.start()):
        return False
    if not _ODD.search(data, start, start + size):
        return False
    value = plain.AnyValue()
    try:
        value.array_value.MergeFromString(data[start : start + size])
    except DecodeError:
        return False  # it only looked like a list
    if int_array(value) is not None:
        return False
    if (numbers := doubles(value)) is not None:
        return bool(np.any(is_whole(numbers)))
    return any(
        _ODD_TEXT.search(item.string_value) is not None or (item.HasField("double_value") and item.double_value.is_integer())
        for item in value.array_value.values
    )


def _put_ids(
    request: plain.Request, identities: Sequence[Identity], numbers: Sequence[int], first: int, stored: Container[int]
) -> tuple[list[plain.Span], int]:
    """Prepare the resources and number the spans; clear those that are rejected or stored.

    Returns the spans that become rows, and the number of repeated resource keys.
    """
    found: list[plain.Span] = []
    index = taken = repeated = 0
    for group in request.resource_spans:
        group.prepared, again = prepared(b"".join(group.resource))
        repeated += again
        group.ClearField("resource")
        for part in group.scope_spans:
            for span in part.spans:
                rollout_id, attempt_id, _, reason = identities[index]
                index += 1
                if reason:
                    span.Clear()
                    continue
                taken += 1
                row = first + taken
                if row - 1 in stored:
                    span.Clear()
                    continue
                span.rollout_id = rollout_id
                span.attempt_id = attempt_id
                span.sequence_id = numbers[taken - 1]
                span.row = row
                span.tokens = b""
                found.append(span)
    if index != len(identities) or taken != len(numbers):
        raise ValueError(f"{len(identities)} identities and {len(numbers)} numbers for {index} spans, {taken} of which are taken")
    return found, repeated


def _leave_out(span: plain.Span) -> int:
    position = span.row - 1
    span.Clear()
    return position


def prepared(resource: bytes) -> tuple[bytes, int]:
    """Return a serialised Resource's attribute texts and types as otlp_rows.proto's Prepared, and the number of repeated keys."""
    return _remembered(resource) if len(resource) <= REMEMBERED_BYTES else _prepare(resource)


def _prepare(resource: bytes) -> tuple[bytes, int]:
    types: dict[str, str] = {}
    counts: Counter[str] = Counter()
    texts = to_map(Resource.FromString(resource).attributes, types, "resource:", counts=counts)
    pairs = [[plain.Pair(key=key, value=value) for key, value in part.items()] for part in (texts, types)]
    return plain.Prepared(attributes=pairs[0], types=pairs[1]).SerializeToString(), counts[REPEATED]


_remembered = lru_cache(MAX_RESOURCES)(_prepare)


def _take_tokens(spans: Sequence[plain.Span]) -> list[int]:
    """Move token ids and log-probs that fit their columns out of the attributes: see decode.split_tokens.

    Drops repeated keys, and returns the index of the span for each of them.
    """
    given: list[tuple[int, int, str]] = []  # (span, attribute, key)
    again: list[tuple[int, int]] = []  # the first value of a repeated key counts
    for number, span in enumerate(spans):
        seen: set[str] = set()
        for position, attribute in enumerate(span.attributes):
            key = attribute.key
            if key in seen:
                again.append((number, position))
            elif key in TOKEN_COLUMNS:
                seen.add(key)
                given.append((number, position, key))
    ids = [spans[number].attributes[position].value for number, position, key in given if TOKEN_COLUMNS[key][1] is int_array]
    arrays = iter(int_arrays(ids) if ids else [])
    tokens: dict[int, plain.Tokens] = {}
    moved = list(again)
    for number, position, key in given:
        column, read = TOKEN_COLUMNS[key]
        value = spans[number].attributes[position].value
        numbers = next(arrays) if read is int_array else read(value)
        into = tokens.setdefault(number, plain.Tokens())
        if numbers is not None:
            moved.append((number, position))
            into.columns.append(key)
        elif column == LOGPROBS:
            numbers = np.asarray(nearest(value), dtype=np.float32)
        if numbers is not None and len(numbers):  # ClickHouse rejects an empty packed field as damaged
            setattr(into, _FIELDS[column], numbers.astype(numbers.dtype.newbyteorder("<")).tobytes())
    for number, packed in tokens.items():
        spans[number].tokens = packed.SerializeToString()
    for number, position in sorted(moved, reverse=True):
        del spans[number].attributes[position]
    return [number for number, _ in again]
