"""The fast road of spans: a request's protobuf bytes go to ClickHouse as they are, with what only the collector knows put beside them.

Pure. A request is parsed with plain.proto, which knows exactly what ClickHouse can make rows of (otlp_rows.proto says how); the ids,
numbers and positions of its spans are set, its resources are prepared (they repeat, so once), and it is serialised again: no
attribute value becomes a Python object. Serialising fails where a request holds anything else (events, links, maps, bytes, lists in
lists): then its spans are told apart one by one, and those that are not plain are left to decode.py, which knows everything. Both
roads make the same rows, byte for byte.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError, EncodeError
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from agl_otel.collector import plain_pb2 as plain
from agl_otel.collector.decode import LOGPROBS, TOKEN_COLUMNS, nearest
from agl_otel.collector.identify import Identity
from agl_otel.collector.values import int_array, int_arrays, to_map
from agl_otel.varint import varint

MAX_RESOURCES: Final = 4096  # prepared ones that are remembered
_TOKEN_KEYS: Final = tuple(key.encode() for key in TOKEN_COLUMNS)
_NOT_FINITE: Final = re.compile(rb"!.{6}[\xf0-\xff][\x7f\xff]", re.DOTALL)  # a double_value, or what happens to look like one
_FIELDS: Final = {"PromptTokenIds": "prompt_token_ids", "ResponseTokenIds": "response_token_ids", LOGPROBS: "response_logprobs"}


class Packed(NamedTuple):
    """A request on the fast road."""

    data: bytes
    """What ClickHouse's Protobuf format takes: the length, then the message. Empty where no span is plain."""
    left: frozenset[int]
    """BatchPos of the spans that are left to decode.py."""


def pack(
    raw: bytes, identities: Sequence[Identity], numbers: Sequence[int], *, received_ms: int, batch: int, first: int, stored: Container[int]
) -> Packed:
    """The arguments are those of `decode.span_rows`; positions in `stored` are left out. Raises ValueError where they do not fit."""
    everything = range(first, first + len(numbers))
    try:
        request = plain.Request.FromString(raw)
        spans = _put_ids(request, identities, numbers, first, stored)
        if any(key in raw for key in _TOKEN_KEYS):
            _take_tokens(spans)
    except DecodeError:  # bytes or a map that cannot be read as what they are not
        return Packed(b"", frozenset(position for position in everything if position not in stored))
    request.batch_id = batch
    request.received_ms = received_ms
    left: list[int] = []
    try:
        data = request.SerializeToString()
    except EncodeError:
        left += [_leave_out(span) for span in spans if not span.IsInitialized()]
        data = request.SerializeToString()
    if _NOT_FINITE.search(data):  # JSON has no word for such numbers in a list
        left += [_leave_out(span) for span in spans if span.row and _NOT_FINITE.search(span.SerializeToString())]
        data = request.SerializeToString()
    return Packed(varint(len(data)) + data if len(left) < len(spans) else b"", frozenset(left))


def _put_ids(
    request: plain.Request, identities: Sequence[Identity], numbers: Sequence[int], first: int, stored: Container[int]
) -> list[plain.Span]:
    """Prepare the resources and number the spans; what is rejected or stored is emptied. Answers the spans that become rows."""
    found: list[plain.Span] = []
    index = taken = 0
    for group in request.resource_spans:
        group.prepared = prepared(b"".join(group.resource))
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
    return found


def _leave_out(span: plain.Span) -> int:
    position = span.row - 1
    span.Clear()
    return position


@lru_cache(MAX_RESOURCES)
def prepared(resource: bytes) -> bytes:
    """The attribute texts and types of a serialised Resource, as otlp_rows.proto's Prepared."""
    types: dict[str, str] = {}
    texts = to_map(Resource.FromString(resource).attributes, types, "resource:")
    pairs = [[plain.Pair(key=key, value=value) for key, value in part.items()] for part in (texts, types)]
    return plain.Prepared(attributes=pairs[0], types=pairs[1]).SerializeToString()


def _take_tokens(spans: Sequence[plain.Span]) -> None:
    """Move token ids and log-probs that fit their columns out of the attributes: see decode.split_tokens."""
    given: list[tuple[int, int, str]] = []  # (span, attribute, key)
    again: list[tuple[int, int]] = []  # of a key given twice the first counts
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
    moved = again
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
        if numbers is not None and len(numbers):  # ClickHouse takes a packed field without elements for damaged
            setattr(into, _FIELDS[column], numbers.astype(numbers.dtype.newbyteorder("<")).tobytes())
    for number, packed in tokens.items():
        spans[number].tokens = packed.SerializeToString()
    for number, position in sorted(moved, reverse=True):
        del spans[number].attributes[position]
