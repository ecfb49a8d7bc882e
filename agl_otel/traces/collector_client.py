"""What clients ask of collectors over HTTP, beside OTLP: a barrier, and the work that only a collector can do (copy, delete, maintain)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any, Final

import aiohttp

from agl_otel.errors import UnavailableError
from agl_otel.net.tls import connector

CONNECT_SECONDS: Final = 5.0
BARRIER_SECONDS: Final = 60.0  # until what was acked is stored; longer, and ClickHouse is away
COPY_SECONDS: Final = 3600.0  # merges wait as long, also for a client that hangs


def open_session(token: str, **options: Any) -> aiohttp.ClientSession:
    """A session that shows the stack's token; `options` are ClientSession's. Close it."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return aiohttp.ClientSession(headers=headers, connector=connector(), **options)


@contextlib.asynccontextmanager
async def posting(
    session: aiohttp.ClientSession, url: str, *, seconds: float | None, body: Any = None, unable: str = ""
) -> AsyncGenerator[aiohttp.ClientResponse]:
    """The answer to a POST of `body` (as JSON, where it is given), within `seconds` (None: no bound).

    Raises UnavailableError where a collector does not answer or refuses; `unable` says what one that has no such path does not do.
    """
    try:
        async with session.post(url, json=body, timeout=aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)) as answer:
            if answer.status == 404 and unable:
                raise UnavailableError(f"the collector at {url} {unable}: name its ClickHouse with AGL_CLICKHOUSE_URL")
            if answer.status != 200:
                raise UnavailableError(f"the collector at {url} answers {answer.status}: {(await answer.text()).strip()[:500]}")
            yield answer
    except (aiohttp.ClientError, TimeoutError) as error:
        raise UnavailableError(f"the collector does not answer at {url}: {error or 'it takes too long'}") from None


async def barriers(
    session: aiohttp.ClientSession,
    collectors: Iterable[str],
    *,
    seconds: float = BARRIER_SECONDS,
    wipe: bool = False,
    rollout_ids: Sequence[str] = (),
) -> None:
    """Return when all that these collectors (base URLs) acked before now is visible; with `wipe`, and in no file of their logs.

    With `wipe` nothing of the rollouts `rollout_ids` is left in what they keep aside, either.

    Raises UnavailableError where one does not answer, or cannot wipe.
    """
    await asyncio.gather(*(_barrier(session, address, seconds, wipe, rollout_ids) for address in collectors))


async def unanswered(session: aiohttp.ClientSession, collectors: Sequence[str], *, seconds: float) -> dict[str, str]:
    """Those of these collectors (base URLs) that do not answer a barrier within `seconds`, and why."""
    answers = await asyncio.gather(*(_barrier(session, address, seconds, False, ()) for address in collectors), return_exceptions=True)
    failed = [error for error in answers if isinstance(error, BaseException) and not isinstance(error, UnavailableError)]
    if failed:
        raise failed[0]
    return {address: str(error) for address, error in zip(collectors, answers, strict=True) if error is not None}


async def _barrier(session: aiohttp.ClientSession, address: str, seconds: float, wipe: bool, rollout_ids: Sequence[str]) -> None:
    body = {"wipe": True, "rollouts": list(rollout_ids)} if wipe else None
    async with posting(session, f"{address}/barrier", seconds=seconds, body=body) as answer:
        if not wipe:
            return
        found: dict[str, Any] = await answer.json()
        if "position" in found and not found.get("wiped"):  # a Go collector has no position: what it acks is stored
            raise UnavailableError(
                f"the collector at {address} is of an earlier release and keeps its log: start this release's in its place"
            )
