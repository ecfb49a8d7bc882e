"""A client of the collectors' HTTP API beside OTLP: barriers, and operations of the collector only (copy, delete, maintain, purge)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any, Final

import aiohttp

from agl_otel.errors import UnavailableError
from agl_otel.net.tls import connector
from agl_otel.text import error_text

CONNECT_SECONDS: Final = 5.0
BARRIER_SECONDS: Final = 60.0  # for a barrier; after this ClickHouse counts as down
REASON_SECONDS: Final = 2.0  # how much earlier than its client a collector gives up, so that its answer, which has the reason, arrives
PURGE_SECONDS: Final = 600.0  # deletion rewrites parts with deleted rows
COPY_SECONDS: Final = 3600.0  # merges are stopped as long, even if the client hangs


class NoSuchRouteError(UnavailableError):
    """The collector (the Go one) has no such route."""


def open_session(token: str, **options: Any) -> aiohttp.ClientSession:
    """Open a session that sends the stack's token; `options` are ClientSession's. The caller closes it."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return aiohttp.ClientSession(headers=headers, connector=connector(), **options)


@contextlib.asynccontextmanager
async def posting(
    session: aiohttp.ClientSession, url: str, *, seconds: float | None, body: Any = None, unable: str = ""
) -> AsyncGenerator[aiohttp.ClientResponse]:
    """POST `body` as JSON (if given) and yield the response, within `seconds` (None: no bound).

    Raises UnavailableError if the collector does not answer or refuses, NoSuchRouteError with `unable` if it lacks the route.
    """
    try:
        async with session.post(url, json=body, timeout=aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)) as answer:
            if answer.status == 404 and unable:
                raise NoSuchRouteError(f"the collector at {url} {unable}: name its ClickHouse with AGL_CLICKHOUSE_URL")
            if answer.status != 200:
                raise UnavailableError(f"the collector at {url} answers {answer.status}: {(await answer.text()).strip()[:500]}")
            yield answer
    except (aiohttp.ClientError, TimeoutError) as error:
        why = f"no answer within {seconds:.3g} s" if seconds and isinstance(error, TimeoutError) else error_text(error)
        raise UnavailableError(f"the collector does not answer at {url}: {why}") from None


async def barriers(
    session: aiohttp.ClientSession,
    collectors: Iterable[str],
    *,
    seconds: float = BARRIER_SECONDS,
    rollout_ids: Sequence[str] = (),
    patience_seconds: float | None = None,
) -> None:
    """Wait until everything that these collectors (base URLs) have acked is visible, and no dead letter of `rollout_ids` is left.

    Raises UnavailableError if one does not answer within `seconds`, or can store nothing for `patience_seconds` (default: nearly as long).
    """
    await asyncio.gather(*(_barrier(session, address, seconds, rollout_ids, patience_seconds) for address in collectors))


async def purge(session: aiohttp.ClientSession, collectors: Iterable[str]) -> None:
    """Wait until no file of these collectors (base URLs) holds data deleted so far. Raises UnavailableError.

    The Go collector has no such files: it acks data only when stored.
    """
    await asyncio.gather(*(_purge(session, address) for address in collectors))


async def _purge(session: aiohttp.ClientSession, address: str) -> None:
    with contextlib.suppress(NoSuchRouteError):
        async with posting(session, f"{address}/purge", seconds=PURGE_SECONDS, unable="purges nothing"):
            pass


async def unanswered(session: aiohttp.ClientSession, collectors: Sequence[str], *, seconds: float) -> dict[str, str]:
    """Return {collector: reason} of those of these collectors (base URLs) that do not answer a barrier within `seconds`."""
    answers = await asyncio.gather(*(_barrier(session, address, seconds, ()) for address in collectors), return_exceptions=True)
    failed = [error for error in answers if isinstance(error, BaseException) and not isinstance(error, UnavailableError)]
    if failed:
        raise failed[0]
    return {address: str(error) for address, error in zip(collectors, answers, strict=True) if error is not None}


async def _barrier(
    session: aiohttp.ClientSession, address: str, seconds: float, rollout_ids: Sequence[str], patience_seconds: float | None = None
) -> None:
    patience = seconds - min(REASON_SECONDS, seconds / 2) if patience_seconds is None else patience_seconds
    body = {"patience_seconds": patience, **({"rollouts": list(rollout_ids)} if rollout_ids else {})}
    async with posting(session, f"{address}/barrier", seconds=seconds, body=body):
        pass
