"""Two real ClickHouse servers as the shards of a cluster `agl`, and an engine over them.

There is no Keeper here, which ClickHouse needs to do something ON CLUSTER: the engine has each server do it instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

from agl_otel.traces.address import ServerAddress
from agl_otel.traces.clickhouse_server import ServerEngine
from agl_otel.traces.cluster import Cluster
from agl_otel.traces.schema import create_schema
from tests.clickhouse_server import ClickHouseServer


@contextlib.contextmanager
def two_shards(directory: Path) -> Generator[list[ClickHouseServer]]:
    """Servers on folders of their own below `directory`."""
    made = [ClickHouseServer(directory / f"shard{number}") for number in (1, 2)]
    try:
        for server in made:
            server.shards = [each.tcp_port for each in made]
            server.start()
        yield made
    finally:
        for server in made:
            server.kill()


class EachShard(ServerEngine):
    """The cluster through its first server, with an empty database of this version's schema."""

    def __init__(self, servers: Sequence[ClickHouseServer]) -> None:
        first, *others = (ServerAddress.parse(server.url(cluster="agl", replicated="0")) for server in servers)
        super().__init__(first)
        self._others = [ServerEngine(address) for address in others]
        self.command("DROP DATABASE IF EXISTS otel ON CLUSTER 'agl' SYNC")
        create_schema(self, where="the test", cluster=Cluster("agl", replicated=False))

    def command(self, sql: str, params: Mapping[str, object] | None = None) -> None:
        """Run a statement; what is said ON CLUSTER, which ClickHouse must be able to read as it stands, on every server."""
        here = sql.replace(" ON CLUSTER 'agl'", "")
        super().command(here, params)
        if here != sql:
            self.select("SELECT formatQuery({sql:String})", {"sql": sql})
            for other in self._others:
                other.command(here, params)

    def close(self) -> None:
        """Close the connections to all."""
        super().close()
        for other in self._others:
            other.close()
