"""The addresses of a stack's services."""

from __future__ import annotations

from pydantic import Field

from agl_otel.types.model import Model


class Describe(Model):
    """The addresses of a stack's services as the caller can reach them; a service without an address is not running."""

    queue: str
    """host:port of the queue's gRPC; https://host:port with TLS, as for the others."""
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
    """Every collector's HTTP address: a reader requests a barrier from all of them."""
    proxies: list[str] = Field(default_factory=list[str])
    """Every proxy's HTTP address: a runner closes its attempts at each."""
    clickhouses: list[str] = Field(default_factory=list[str])
    """Every address of the ClickHouse HTTP protocol: each collector in front of a server provides one."""
    down: dict[str, str] = Field(default_factory=dict[str, str])
    """{service that ended and will be restarted: how it ended, and when it restarts}, as registered by its supervisor."""
    version: str = ""
