"""A real ClickHouse stores the same rows of both cores."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from agl_otel.collector.core import Kind, PythonCore, core
from agl_otel.collector.identities import Identities, Identity
from agl_otel.collector.journal import Batch, Request
from agl_otel.collector.scan import AHEAD_NANO
from agl_otel.collector.store_batch import BatchStore
from agl_otel.traces.chdb import ChdbEngine
from agl_otel.traces.schema import create_schema
from tests.cores import needs_compiled_core
from tests.otlp_requests import NOW, log_requests, trace_requests


@pytest.fixture(scope="module")
def stored_rows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChdbEngine]:
    made = ChdbEngine(tmp_path_factory.mktemp("rows") / "traces")
    create_schema(made, where="the test")
    yield made
    made.close()


batches = itertools.count(1)


@needs_compiled_core
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])  # each: four inserts
@given(trace_requests(), log_requests())
def test_clickhouse_stores_the_same_rows_of_both_cores(stored_rows: ChdbEngine, traces: Any, logs: Any) -> None:
    kinds: list[tuple[Kind, Any]] = [("traces", traces), ("logs", logs)]
    for signal, request in kinds:
        raw, seen = request.SerializeToString(), []
        scan, _ = core().scan(signal, raw, latest=NOW + AHEAD_NANO, max_attributes=100)
        defects = dict(scan.defects)
        identities = [Identity("ro-1", "at-1", index, defects.get(index, "")) for index in range(sum(scan.groups))]
        for used in (PythonCore(), core()):
            batch = next(batches)
            BatchStore(stored_rows, Path("unused"), used).store(
                Batch(batch, 0, 0), [(0, Request(signal, NOW // 10**6, Identities.of(identities), raw))], in_doubt=False
            )
            found = stored_rows.select(f"SELECT * EXCEPT (BatchId) FROM otel.otel_{signal} WHERE BatchId = {batch} ORDER BY BatchPos")
            seen.append(json.dumps(found))
        assert seen[0] == seen[1]
