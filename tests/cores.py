"""Both cores of the collector, which must behave alike, and their comparison."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from opentelemetry.proto.common.v1.common_pb2 import KeyValue, KeyValueList

from agl_otel.collector.core import Core, Kind, PythonCore, core
from agl_otel.collector.identities import Identities, Identity
from agl_otel.collector.journal import Request
from agl_otel.collector.scan import AHEAD_NANO
from agl_otel.errors import DataError
from agl_otel.traces.schema import derived_columns
from tests.native_block import read_block
from tests.otlp_requests import NOW

COMPILED = core()
needs_compiled_core = pytest.mark.skipif(
    core().name != "compiled", reason="the compiled core is not built: `make setup` builds it with cargo"
)
both_cores = pytest.mark.parametrize(
    "used_core", [PythonCore(), pytest.param(core(), marks=needs_compiled_core)], ids=["python", "compiled"]
)
DERIVED = derived_columns()
LISTS = (
    *("PromptTokenIds", "ResponseTokenIds", "ResponseLogprobs", "Events.Timestamp", "Events.Name", "Events.Attributes"),
    *("Links.TraceId", "Links.SpanId", "Links.TraceState", "Links.Attributes"),
)
"""Columns that JSON leaves out where they are empty."""


def read(used: Core, kind: Kind, raw: bytes) -> Any:
    """What is read of a request, or the kind of the error."""
    try:
        scan, _ = used.scan(kind, raw, latest=NOW + AHEAD_NANO, max_attributes=3)
    except (DecodeError, DataError) as error:
        return type(error)
    own = [ids_of(own) for count, own in scan.own for _ in range(count)]
    return list(map(list, scan._replace(own=own, resources=list(map(ids_of, scan.resources)))))


@lru_cache(10_000)
def ids_of(attributes: bytes) -> list[KeyValue]:
    """Return the ids of a KeyValueList, however it was encoded."""
    found = KeyValueList.FromString(attributes)
    found.DiscardUnknownFields()
    return list(found.values)


def rows(used: Core, kind: Kind, raw: bytes, identities: Sequence[Identity], only: frozenset[int] | None = None) -> tuple[list[Any], int]:
    """The rows of a request, and the number of repeated keys."""
    made = used.rows(kind)
    numbers = [7 + number for number in range(sum(not each.reason for each in identities))]
    made.add(Request(kind, NOW // 10**6, Identities.of(list(identities)), raw), numbers, batch=99, first=5, only=only)
    count, repeated = len(made), made.repeated
    data = b"".join(made.take())
    found = read_block(data) if made.format_name == "Native" else [as_block(json.loads(line)) for line in data.splitlines()]
    assert len(found) == count
    return [sorted(row.items()) for row in found], repeated


def as_block(row: dict[str, Any]) -> dict[str, Any]:
    """Convert a row of JSON to the form of `read_block`."""
    row = ({name: [] for name in LISTS} if "SpanName" in row else {}) | {name: as_value(name, value) for name, value in row.items()}
    if "SpanName" in row:
        kept = [(key, text) for key, text in row["SpanAttributes"] if key in DERIVED["facts"] or key.startswith(DERIVED["fact_prefix"])]
        messages = dict(row["SpanAttributes"]).get(DERIVED["messages"], "")
        row |= {"Facts": kept, "HasMedia": any(mark in messages for mark in DERIVED["media"])}
    return row


def as_value(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, list):
        return [as_value(name.removeprefix("Events.").removeprefix("Links."), item) for item in value]
    if name in ("Timestamp", "ReceivedAt"):
        whole, _, fraction = str(value).partition(".")
        return int(whole + fraction)
    return value


def compare(kind: Kind, raw: bytes, refused: frozenset[int] = frozenset(), *, with_rows: bool = True) -> int:
    """Hold the compiled core to the specification; return the number of items of the request, 0 if both refuse it."""
    expected = read(PythonCore(), kind, raw)
    assert read(COMPILED, kind, raw) == expected
    if isinstance(expected, type):
        return 0
    count = sum(expected[3])
    if not with_rows:
        return count
    defects = {index for index, _ in expected[6]}
    identities = [Identity(f"ro-{n // 2}", "at", None, "why" if n in refused | defects else "") for n in range(count)]
    assert rows(COMPILED, kind, raw, identities) == rows(PythonCore(), kind, raw, identities)
    some = frozenset({5, 7})
    assert rows(COMPILED, kind, raw, identities, some)[0] == rows(PythonCore(), kind, raw, identities, some)[0]
    return count
