"""An insert is sent again because its response was lost, and both are carried out: rows are stored once, on each code path and engine.

The second try asked what is stored before the first was carried out, so it knows of no rows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from agl_otel.collector.core import Core
from agl_otel.collector.identities import Identities, Identity
from agl_otel.collector.journal import Batch, Request, Signal
from agl_otel.collector.store_batch import BatchStore
from agl_otel.traces.address import ServerAddress
from agl_otel.traces.chdb import ChdbEngine
from agl_otel.traces.clickhouse_server import ServerEngine
from agl_otel.traces.cluster import Cluster
from agl_otel.traces.engine import Engine
from agl_otel.traces.schema import create_schema
from tests.clickhouse_server import ClickHouseServer
from tests.cores import both_cores

from .otlp import any_value, attributes, request_of, span

DAY_MS = 86_400_000
TABLES = ("otel_traces", "otel_logs", "otel_metrics_gauge")


@pytest.fixture(
    scope="module", params=["chdb", pytest.param("server", marks=pytest.mark.full), pytest.param("cluster", marks=pytest.mark.full)]
)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    place = tmp_path_factory.mktemp(request.param)
    if request.param == "chdb":
        made: Engine = ChdbEngine(place / "traces")
        create_schema(made, where="the test")
        yield made
        made.close()
        return
    options, cluster = (
        ({}, None) if request.param == "server" else ({"cluster": "agl", "replicated": "0"}, Cluster("agl", replicated=False))
    )
    with ClickHouseServer(place / "server") as server:
        if cluster:
            cluster.everywhere = False  # there is no Keeper here
        made = ServerEngine(ServerAddress.parse(server.url(**options)))
        create_schema(made, where="the test", cluster=cluster)
        yield made
        made.close()


def asked_before(store: BatchStore, first: frozenset[int]) -> None:
    """Make the first query of `store` for stored rows return an earlier result."""
    answers = iter([first])
    real = store._stored  # pyright: ignore[reportPrivateUsage] - the only place between asking and inserting

    def stored(place: Any, kind: str, wanted: range) -> frozenset[int]:
        found = next(answers, None)
        return real(place, kind, wanted) if found is None else found

    store._stored = stored  # pyright: ignore[reportPrivateUsage] - as above


def traces(rollout: str, *names: str, days_ago: int = 0) -> Request:
    raw = request_of([span(name) for name in names]).SerializeToString()
    return Request("traces", int(time.time() * 1000) - days_ago * DAY_MS, Identities.of([Identity(rollout, "at-1")] * len(names)), raw)


def logs(rollout: str) -> Request:
    request = ExportLogsServiceRequest()
    record = request.resource_logs.add().scope_logs.add().log_records.add(time_unix_nano=time.time_ns())
    record.body.CopyFrom(any_value("said"))
    return _other("logs", rollout, request.SerializeToString())


def metrics(rollout: str) -> Request:
    request = ExportMetricsServiceRequest()
    group = request.resource_metrics.add()
    group.resource.attributes.extend(attributes({"agentlightning.rollout_id": rollout}))
    group.scope_metrics.add().metrics.add(name="m").gauge.data_points.add(as_double=1.5, time_unix_nano=time.time_ns())
    return _other("metrics", rollout, request.SerializeToString())


def _other(signal: Signal, rollout: str, raw: bytes) -> Request:
    return Request(signal, int(time.time() * 1000), Identities.of([Identity(rollout, "at-1")]), raw)


def rows(engine: Engine, batch: Batch) -> dict[str, int]:
    """Return {table: rows of the batch}."""
    asked = {table: f"SELECT count() FROM otel.{table} WHERE BatchId = {{batch:UInt64}}" for table in TABLES}
    return {table: int(str(engine.select(sql, {"batch": batch.batch_id})[0][0])) for table, sql in asked.items()}


@both_cores
def test_a_second_try_that_found_no_rows_stores_nothing(engine: Engine, tmp_path: Path, used_core: Core) -> None:
    batch = Batch(1000 + len(used_core.name), 0, 3, {(rollout := f"ro-{used_core.name}"): 1})
    members = list(enumerate([traces(rollout, "a", "b"), traces(rollout, "c"), logs(rollout), metrics(rollout)]))
    for _ in range(2):  # the second is another process, which has only the log
        BatchStore(engine, tmp_path / "refused", used_core).store(batch, members, in_doubt=False)
    assert rows(engine, batch) == {"otel_traces": 3, "otel_logs": 1, "otel_metrics_gauge": 1}
    ((spans,),) = engine.select("SELECT Spans FROM otel.rollout_summary WHERE RolloutId = {r:String}", {"r": rollout})
    assert spans == 3


@both_cores
def test_a_retry_after_half_of_the_insert_stores_each_row_once(engine: Engine, tmp_path: Path, used_core: Core) -> None:
    """A batch over midnight has two parts: the first is stored; the second comes with the insert that still runs, and with the retry."""
    batch = Batch(3000 + len(used_core.name), 0, 1, {(rollout := f"ro-half-{used_core.name}"): 1})
    members = [(0, traces(rollout, "a", "b", days_ago=1)), (1, traces(rollout, "c", "d"))]
    one, other = (BatchStore(engine, tmp_path / "refused", used_core) for _ in range(2))
    one.store(batch, members, in_doubt=False)
    asked_before(other, frozenset((0, 1)))
    other.store(batch, members, in_doubt=True)
    assert rows(engine, batch)["otel_traces"] == 4
