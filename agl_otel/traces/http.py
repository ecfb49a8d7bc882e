"""A client of the ClickHouse HTTP protocol: one POST per query; parameters go into the URL, long ones into a form."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote

import aiohttp

from agl_otel.errors import QueryError, UnavailableError
from agl_otel.net.tls import connector
from agl_otel.text import error_text
from agl_otel.traces.engine import parameter

TIMEOUT_SECONDS = 120.0
OWN_HEADER = "agl-own-query"
"""Marks the program's own queries, for which the endpoint reserves threads (if the stack has a token, only for callers with it)."""
URL_CHARS = 2000  # parameters up to this total length go into the URL: a form costs both sides a millisecond more


class ClickHouseHttp:
    """Queries one endpoint, embedded or a server."""

    def __init__(self, url: str, *, token: str = "") -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """The connection pool, opened on first use; it belongs to the running loop."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers, timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS), connector=connector()
            )
        return self._session

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def fetch(
        self,
        sql: str,
        format_name: str,
        params: Mapping[str, object] | None = None,
        *,
        settings: Mapping[str, object] | None = None,
        own: bool = True,
    ) -> bytearray:
        """Run a query and return its result in `format_name`. The endpoint accepts some of ClickHouse's `settings`. `own`: see OWN_HEADER.

        Raises QueryError if the query is refused, UnavailableError if the endpoint does not answer.
        """
        if not self.url:
            raise UnavailableError("the stack has no ClickHouse yet: its collector is still starting, or `agl-otel up` runs without one")
        text = sql.strip().rstrip(";")
        given = {f"param_{name}": parameter(value) for name, value in (params or {}).items()}
        in_url = {"default_format": format_name, **{name: str(value) for name, value in (settings or {}).items()}}
        if sum(len(quote(value)) for value in given.values()) <= URL_CHARS:
            data: bytes | aiohttp.MultipartWriter = text.encode()
            in_url |= given
        else:
            data = _form({"query": text, **given})
        try:
            async with self.session.post(f"{self.url}/", params=in_url, data=data, headers={OWN_HEADER: "1"} if own else None) as response:
                body = bytearray()  # it grows in place; `response.read()` would join parts and hold them twice
                async for part in response.content.iter_any():
                    body += part
        except (aiohttp.ClientError, TimeoutError) as error:
            raise UnavailableError(f"ClickHouse does not answer at {self.url}: {error_text(error)}") from None
        if response.status == 503:
            raise UnavailableError(f"ClickHouse at {self.url} is away: {body[:2000].decode(errors='replace').strip()}")
        if response.status != 200:
            error = QueryError(
                f"ClickHouse at {self.url} refused a query ({response.status}): {body[:2000].decode(errors='replace').strip()}"
            )
            code = response.headers.get("X-ClickHouse-Exception-Code", "")
            error.code = int(code) if code.isdecimal() else 0
            raise error
        return body


def _form(values: Mapping[str, str]) -> aiohttp.MultipartWriter:
    with aiohttp.MultipartWriter("form-data") as form:
        for name, value in values.items():
            form.append(value).set_content_disposition("form-data", name=name)
    return form
