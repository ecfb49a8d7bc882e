"""Both cores read what protobuf's rules allow on the wire alike, and as collector/conformance/wire says; so does the Go processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import DecodeError

from agl_otel.collector.core import Core, Kind
from agl_otel.collector.identify import identify
from agl_otel.collector.memory import TraceMemory
from agl_otel.collector.scan import AHEAD_NANO, PARENT_ID, SPAN_ID, TIMESTAMP, TRACE_ID
from agl_otel.collector.unreadable import remove_unreadable
from tests.cores import both_cores, rows

FILE = Path(__file__).parents[3] / "collector" / "conformance" / "wire" / "wire.json"
VECTORS = json.loads(FILE.read_text())
CODES = {TRACE_ID: "trace_id", SPAN_ID: "span_id", PARENT_ID: "parent_id", TIMESTAMP: "timestamp"}


def received(used: Core, kind: Kind, raw: bytes, now: int) -> dict[str, Any]:
    """What becomes of a request, in the form of the vectors; its unreadable items at the end."""
    limits: dict[str, int] = {"latest": now + AHEAD_NANO, "max_attributes": 100}
    removed = 0
    try:
        try:
            scan, _ = used.scan(kind, raw, **limits)
        except DecodeError:
            raw, removed = remove_unreadable(kind, raw)
            scan, _ = used.scan(kind, raw, **limits)
    except DecodeError:
        return {"refused": True}
    identities = list(identify(scan, {}, TraceMemory(), records=kind == "logs"))
    made = iter(dict(row) for row in rows(used, kind, raw, identities)[0])
    items: list[Any] = []
    for each in identities:
        if each.reason:
            items.append({"reject": CODES.get(each.reason, each.reason)})
            continue
        row = next(made)
        item = {
            "text": row["Body"] if kind == "logs" else row["SpanName"],
            "attributes": dict(row["LogAttributes" if kind == "logs" else "SpanAttributes"]),
            "resource": dict(row["ResourceAttributes"]),
            "scope": row["ScopeName"],
        }
        ids = {"rollout": each.rollout_id, "attempt": each.attempt_id, "sequence": each.sequence}
        items.append({name: value for name, value in (ids | item).items() if value})
    return {"items": items + [{"reject": "unreadable"}] * removed}


@both_cores
@pytest.mark.parametrize("vector", VECTORS["vectors"], ids=lambda vector: vector["name"])
def test_the_vectors_of_the_wire(vector: dict[str, Any], used_core: Core) -> None:
    expected = (
        {"refused": True}
        if vector.get("refused")
        else {"items": sorted(vector["items"], key=lambda item: item.get("reject") == "unreadable")}
    )
    assert received(used_core, vector["signal"], bytes.fromhex(vector["request"]), int(VECTORS["nowUnixNano"])) == expected
