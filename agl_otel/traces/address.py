"""A ClickHouse server's address and credentials: the parts of clickhouse://user:password@host:9000/otel?http_port=8123.

The URL holds a password and is never printed; messages, logs and health answers show `str(address)`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

from agl_otel.errors import SettingsError
from agl_otel.traces.engine import DATABASE

SCHEMES: Final = ("clickhouse", "clickhouses")  # the second means TLS on both ports
EXAMPLE: Final = "clickhouse://user:password@host:9000/otel?http_port=8123"
_OPTIONS: Final = {"http_port": "", "cluster": "", "replicated": "1", "insert_quorum": ""}


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """One ClickHouse server, or one node of a cluster."""

    host: str
    port: int
    """The port of the native protocol."""
    http_port: int
    user: str = "default"
    password: str = field(default="", repr=False)
    secure: bool = False
    """Whether both ports use TLS."""
    cluster: str = ""
    """The cluster's name in the server's remote_servers; empty for a single server."""
    replicated: bool = True
    """Whether a cluster's tables are replicated (needs Keeper)."""
    insert_quorum: str = ""
    """How many replicas must confirm an insert (a number, or `auto`); empty: the server's setting."""

    @classmethod
    def parse(cls, url: str) -> ServerAddress:
        """Parse a URL. Raises SettingsError, without the password, if it is invalid."""
        parts = urlsplit(url)
        if parts.scheme not in SCHEMES:
            raise SettingsError(f"the ClickHouse URL must start with clickhouse:// or chdb:///, not {parts.scheme!r}: {EXAMPLE}")
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        if unknown := sorted(options.keys() - _OPTIONS.keys()):
            raise SettingsError(f"the ClickHouse URL has unknown options: {', '.join(unknown)}. Known: {', '.join(_OPTIONS)}")
        database = parts.path.strip("/") or DATABASE
        if database != DATABASE:
            raise SettingsError(f"the ClickHouse database is always called {DATABASE}, not {database!r}: {EXAMPLE}")
        secure = parts.scheme == "clickhouses"
        quorum = options.get("insert_quorum", "")
        if quorum and quorum != "auto" and not quorum.isdecimal():
            raise SettingsError(f"insert_quorum in the ClickHouse URL is a number or `auto`, not {quorum!r}")
        try:
            port = parts.port or (9440 if secure else 9000)
            http_port = int(options.get("http_port") or (8443 if secure else 8123))
        except ValueError:
            raise SettingsError(f"a port in the ClickHouse URL is not a number from 1 to 65535: {EXAMPLE}") from None
        return cls(
            host=parts.hostname or "127.0.0.1",
            port=port,
            http_port=http_port,
            user=unquote(parts.username or "default"),
            password=unquote(parts.password or ""),
            secure=secure,
            cluster=options.get("cluster", ""),
            replicated=options.get("replicated", "1") not in ("0", "false"),
            insert_quorum=quorum,
        )

    @property
    def ping(self) -> str:
        """The URL of its health check, which needs no credentials."""
        return f"{'https' if self.secure else 'http'}://{self._host}:{self.http_port}/ping"

    @property
    def _host(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host

    def __str__(self) -> str:
        return f"clickhouse://{self.user}@{self._host}:{self.port}/{DATABASE}"
