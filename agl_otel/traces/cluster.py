"""The schema on a cluster: maps one statement to the statements that a cluster needs. Pure.

    table X          X_local on every node (replicated where there is Keeper), and X: a Distributed table over all X_local
    view S to T      from S_local to T_local, on the node that took the rows
    view of no rows  (its source is a Null table) into the Distributed T, which spreads them
    ALTER X … TTL    X_local

So readers and writers use the same table names as on a single server. Rows are sharded by the hash of their rollout id.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from agl_otel.traces.engine import DATABASE

LOCAL: Final = "_local"
EVERYWHERE: Final = "agl_migrations"  # complete on every node
SHARDING: Final = ("RolloutId", "TraceId", "ServiceName")  # the sharding key is the first of these that a table has
_DATABASE: Final = re.compile(rf"CREATE DATABASE IF NOT EXISTS {DATABASE}$")
_TABLE: Final = re.compile(rf"CREATE TABLE IF NOT EXISTS {DATABASE}\.(\w+) \((.*)\)\s*ENGINE = (\w+)(.*)$", re.S)
_FEED: Final = re.compile(rf"(CREATE MATERIALIZED VIEW IF NOT EXISTS {DATABASE}\.\w+)( TO {DATABASE}\.)(\w+)( AS\b.*)$", re.S)
_VIEW: Final = re.compile(rf"(CREATE VIEW IF NOT EXISTS {DATABASE}\.\w+)( AS\b.*)$", re.S)
_TTL: Final = re.compile(rf"ALTER TABLE {DATABASE}\.(\w+) ((?:MODIFY|REMOVE) TTL\b.*)$", re.S)
_SOURCE: Final = re.compile(rf"\bFROM {DATABASE}\.(\w+)")


def on_cluster(name: str) -> str:
    """Return the ON CLUSTER clause that makes every node of the cluster `name` run a statement; empty without a cluster."""
    return f" ON CLUSTER '{name}'" if name else ""


def stored_as(table: str, cluster: str) -> str:
    """Return the name of the table that holds a table's rows: on a cluster, each node's local one."""
    return f"{table}{LOCAL}" if cluster else table


def on_every_node(query: str, cluster: str) -> str:
    """Return a query for the rows of `query` (on system tables) from every node. Running it fails if a node is down."""
    return f"SELECT * FROM clusterAllReplicas('{cluster}', view({query}))" if cluster else query


@dataclass
class Cluster:
    """Translates the schema's statements for the cluster `name`."""

    name: str
    replicated: bool = True
    """Whether there is Keeper; without it, each shard is one node."""
    everywhere: bool = True
    """Whether to add ON CLUSTER, so that every node runs a statement, not only the connected one."""

    def statements(self, statement: str) -> Sequence[str]:
        """Return the statements to run instead of `statement`. Raises ValueError for an unknown kind of statement."""
        if _DATABASE.match(statement):
            return [f"{statement}{self._on}"]
        if found := _TABLE.match(statement):
            return self._table(*found.groups())
        if found := _FEED.match(statement):
            return [self._feed(*found.groups())]
        if found := _VIEW.match(statement):
            return [f"{found[1]}{self._on}{found[2]}"]
        if found := _TTL.match(statement):
            return [f"ALTER TABLE {DATABASE}.{found[1]}{LOCAL}{self._on} {found[2]}"]
        raise ValueError(f"no rule puts this statement on a cluster: {statement[:80]}")

    @property
    def _on(self) -> str:
        return on_cluster(self.name) if self.everywhere else ""

    def _table(self, name: str, columns: str, engine: str, tail: str) -> Sequence[str]:
        head = f"CREATE TABLE IF NOT EXISTS {DATABASE}."
        if name == EVERYWHERE:
            own = self._engine(engine, name, shard="all", replica="{shard}-{replica}")
            return [f"{head}{name}{self._on} ({columns}) ENGINE = {own}{tail}"]
        key = next((f"cityHash64({column})" for column in SHARDING if re.search(rf"^\s*{column} ", columns, re.M)), "rand()")
        local = f"{head}{name}{LOCAL}{self._on} ({columns}) ENGINE = {self._engine(engine, name)}{tail}"
        over = f"ENGINE = Distributed('{self.name}', '{DATABASE}', '{name}{LOCAL}', {key})"
        return [local, f"{head}{name}{self._on} AS {DATABASE}.{name}{LOCAL} {over}"]

    def _engine(self, engine: str, name: str, *, shard: str = "{shard}", replica: str = "{replica}") -> str:
        if not self.replicated:
            return engine
        return f"Replicated{engine}('/clickhouse/tables/{shard}/{DATABASE}/{name}', '{replica}')"

    def _feed(self, head: str, to: str, target: str, query: str) -> str:
        return f"{head}{self._on}{to}{target}{LOCAL}{_local(query)}"


def _local(query: str) -> str:
    """Return the query over the node's local tables."""
    return _SOURCE.sub(rf"FROM {DATABASE}.\1{LOCAL}", query)
