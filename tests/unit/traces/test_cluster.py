"""Every statement of the schema has a form for clusters."""

from __future__ import annotations

import re

import pytest

from agl_otel.traces.cluster import Cluster
from agl_otel.traces.schema import statements


def everything(cluster: Cluster) -> list[str]:
    return [each for statement in statements() for each in cluster.statements(statement)]


def test_every_statement_can_be_translated_for_a_cluster() -> None:
    made = everything(Cluster("c1"))
    assert all("ON CLUSTER 'c1'" in each for each in made)
    local = {found[1] for each in made if (found := re.match(r"CREATE TABLE IF NOT EXISTS otel\.(\w+)_local ", each))}
    over = {found[1] for each in made if (found := re.match(r"CREATE TABLE IF NOT EXISTS otel\.(\w+) .*ENGINE = Distributed", each))}
    assert local == over
    assert {"otel_traces", "otel_logs", "rollout_summary_states", "services"} <= local


def test_rows_are_sharded_by_rollout() -> None:
    (made,) = [each for each in everything(Cluster("c1")) if each.startswith("CREATE TABLE IF NOT EXISTS otel.otel_traces ON")]
    assert made.endswith("AS otel.otel_traces_local ENGINE = Distributed('c1', 'otel', 'otel_traces_local', cityHash64(RolloutId))")


def test_views_stay_on_the_node_of_their_rows() -> None:
    made = {
        found[1]: each
        for each in everything(Cluster("c1"))
        if (found := re.match(r"CREATE MATERIALIZED VIEW \S+ \S+ \S+ otel\.(\w+)", each))
    }
    assert " TO otel.services_local AS" in made["services_mv"]
    assert "FROM otel.otel_traces_local" in made["services_mv"]


def test_without_keeper_the_engines_stay_and_with_it_they_replicate() -> None:
    assert not any("Replicated" in each for each in everything(Cluster("c1", replicated=False)))
    (made,) = [each for each in everything(Cluster("c1")) if "otel.rollout_summary_states_local ON" in each and "CREATE TABLE" in each]
    assert "ENGINE = ReplicatedAggregatingMergeTree('/clickhouse/tables/{shard}/otel/rollout_summary_states', '{replica}') ORDER BY" in made


def test_retention_is_set_on_the_table_that_holds_the_rows() -> None:
    cluster = Cluster("c1")
    for change in ("MODIFY TTL toDateTime(ReceivedAt) + toIntervalDay(3)", "REMOVE TTL"):
        assert cluster.statements(f"ALTER TABLE otel.otel_logs {change}") == [f"ALTER TABLE otel.otel_logs_local ON CLUSTER 'c1' {change}"]


def test_an_unknown_statement_is_refused() -> None:
    with pytest.raises(ValueError, match="no rule"):
        Cluster("c1").statements("TRUNCATE TABLE otel.otel_logs")
