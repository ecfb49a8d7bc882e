"""The server's address: a postgresql:// URL, whose password is kept out of every message and log."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import psycopg
from psycopg.conninfo import conninfo_to_dict

from agl_otel.errors import AglError, SettingsError, UnavailableError

SCHEMES: Final = ("postgresql", "postgres")
DEFAULTS: Final[dict[str, Any]] = {
    "application_name": "agl-otel queue",
    "client_encoding": "UTF8",
    "connect_timeout": 5,
    "keepalives_idle": 10,  # a server whose machine vanished is detected within half a minute
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}
SESSION: Final = b"""
SET jit = off;
SET enable_seqscan = off;
SET enable_sort = off;
SET lock_timeout = '10s';
SET idle_in_transaction_session_timeout = '60s';
SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'
"""
"""Settings of every connection: no commit is acknowledged before it is on the server's disk, no transaction holds locks for ever.

Plans are cached, and the first ones are made for empty tables, where scanning and
sorting a whole table looks cheap: hence both are avoided if an index will do.
"""
_WRONG_URL: Final = (
    "AGL_QUEUE_URL is no PostgreSQL URL: write postgresql://USER:PASSWORD@HOST:PORT/DATABASE, with every special character of user and "
    "password percent-encoded (/ is %2F, @ is %40, # is %23)"
)
_REFUSED: Final = re.compile(
    r"authentication failed|no password supplied|password required|pg_hba\.conf|(?:role|database) \".*\" does not exist|permission denied"
)


@dataclass(frozen=True)
class Address:
    """A server, a database and a user."""

    params: dict[str, Any] = field(repr=False)
    """libpq's connection parameters, including the password."""
    shown: str
    """The URL for messages: without password and query."""

    @classmethod
    def parse(cls, url: str) -> Address:
        """Parse a URL of libpq's form. Raises SettingsError, whose message does not repeat the URL."""
        try:
            parts = urlsplit(url)
        except ValueError:
            raise SettingsError(_WRONG_URL) from None
        credentials, _, host = parts.netloc.rpartition("@")
        if "@" in parts.path or "#" in url:  # an unencoded password: part of it would be taken for host or database
            raise SettingsError(_WRONG_URL)
        user, _, password = credentials.partition(":")
        bare = f"postgresql://{user + '@' if user else ''}{host}{parts.path}{'?' + parts.query if parts.query else ''}"
        try:
            params: dict[str, Any] = {**DEFAULTS, **conninfo_to_dict(bare)}
        except psycopg.Error:
            raise SettingsError(_WRONG_URL) from None
        if password:
            params["password"] = unquote(password)
        database = f"/{params['dbname']}" if "dbname" in params else ""
        who = f"{params['user']}@" if "user" in params else ""
        where = str(params.get("host", host))
        port = f":{params['port']}" if "port" in params and "," not in where else ""
        return cls(params, f"postgresql://{who}{where}{port}{database}")

    def connect(self, settings: bytes = b"") -> psycopg.Connection[Any]:
        """Open a connection in autocommit mode and run `settings` on it.

        Raises SettingsError if the server refuses the login, UnavailableError if it does not answer.
        """
        try:
            connection = psycopg.connect(**self.params, autocommit=True, prepare_threshold=1)
            connection.execute(SESSION)
            if settings:
                connection.execute(settings)
        except psycopg.Error as error:
            raise self._cannot_connect(error) from None
        connection.prepared_max = 200
        return connection

    def words(self, error: Exception) -> str:
        """Return a driver's error message as one line, without the password."""
        text = " ".join(str(error).split())
        password = str(self.params.get("password", ""))
        return text.replace(password, "***") if password else text

    def _cannot_connect(self, error: psycopg.Error) -> AglError:
        text = self.words(error)
        if _REFUSED.search(text):
            return SettingsError(
                f"the queue's database {self.shown} refuses us ({text}): correct user, password or database in AGL_QUEUE_URL"
            )
        return UnavailableError(f"the queue's database {self.shown} does not answer ({text}): start it, or correct AGL_QUEUE_URL")
