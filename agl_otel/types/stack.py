"""Where the services of a stack are."""

from __future__ import annotations

from pydantic import Field

from agl_otel.types.model import Model


class Describe(Model):
    """Where the services of a stack are, as the caller can reach them; an address that is absent is not running."""

    queue: str
    """host:port of the queue's gRPC; https://host:port where it speaks TLS, and so the others."""
    collector_grpc: str | None = None
    """host:port."""
    collector_http: str | None = None
    """http://host:port, without a path."""
    clickhouse: str | None = None
    """http://host:port of the ClickHouse HTTP protocol."""
    proxy: str | None = None
    """http://host:port, without a path."""
    web: str | None = None
    collectors: list[str] = Field(default_factory=list[str])
    """Every collector's http address: a reader asks all of them for a barrier."""
    proxies: list[str] = Field(default_factory=list[str])
    """Every proxy's http address: a runner closes its attempts at each."""
    clickhouses: list[str] = Field(default_factory=list[str])
    """Every address of the ClickHouse HTTP protocol: each collector before a server is a door to it."""
    down: dict[str, str] = Field(default_factory=dict[str, str])
    """{service that ended and is to be started again: how it ended, and when it is started}, as its supervisor announces it."""
    version: str = ""
