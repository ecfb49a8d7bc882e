"""Removes rollouts from both stores: what `rollouts delete` and `queue prune` share.

The queue forgets rollouts first, so that nobody sees one without its spans; then ClickHouse does, by collector/deletion.py. As with
`maintain`, a ClickHouse server (AGL_CLICKHOUSE_URL) is reached from here, the embedded one through its collector. Before the first rollout
is touched, both are asked whether they can. Should ClickHouse go away in between, the error names what is left and the command that
finishes it: nothing else remembers rollouts that the queue has forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Final

import click

from agl_otel.collector.deletion import Deletion
from agl_otel.collector_calls import barriers, open_session, posting
from agl_otel.errors import AglError, UnavailableError
from agl_otel.queue.client import QueueClient
from agl_otel.settings import Settings
from agl_otel.traces.opened import CHDB_SCHEME, open_store

DELETE_SECONDS: Final = 600.0  # for some hundred rollouts; each table is gone through once
ALTERNATIVE: Final = "--keep-spans removes rollouts from the queue alone"
Erase = Callable[[Sequence[str]], Awaitable[None]]

keep_spans_option = click.option("--keep-spans", is_flag=True, help="From the queue only: their spans and logs stay.")


@contextlib.asynccontextmanager
async def eraser(settings: Settings, queue: QueueClient, *, keep_spans: bool) -> AsyncGenerator[Callable[[list[str]], Awaitable[int]]]:
    """What deletes some rollouts and answers how many the queue knew; with `keep_spans` it asks the queue alone.

    Raises UnavailableError where ClickHouse cannot be asked now; then nothing was deleted. What is yielded raises it where ClickHouse
    went away since, and says what is left.
    """
    if keep_spans:
        yield queue.delete
        return
    async with _erasing(settings, queue) as erase:
        try:
            await erase(())
        except AglError as error:
            raise UnavailableError(f"nothing was deleted, because the spans cannot be: {error}. {ALTERNATIVE}") from None

        async def delete(ids: list[str]) -> int:
            deleted = await queue.delete(ids)
            try:
                await erase(ids)
            except AglError as error:
                raise UnavailableError(
                    f"{len(ids)} rollouts are gone from the queue, but not what is stored of them: {error}. "
                    f"When that is mended, finish with: agl-otel rollouts delete --yes {' '.join(ids)}"
                ) from None
            return deleted

        yield delete


@contextlib.asynccontextmanager
async def _erasing(settings: Settings, queue: QueueClient) -> AsyncGenerator[Erase]:
    async with contextlib.AsyncExitStack() as closers:
        session = await closers.enter_async_context(open_session(settings.token.get_secret_value()))
        if settings.clickhouse_db.startswith(CHDB_SCHEME):
            deletion = None
        else:
            engine = await asyncio.to_thread(open_store, settings.clickhouse_db)
            closers.callback(engine.close)
            deletion = Deletion(engine)

        async def erase(ids: Sequence[str]) -> None:
            collectors = [address.rstrip("/") for address in (await queue.describe()).collectors]
            if not collectors and deletion is None:
                raise UnavailableError(
                    "no collector has said where it is: start one with `agl-otel up`, or name a server with AGL_CLICKHOUSE_URL"
                )
            await barriers(session, collectors)
            if deletion is not None:
                await deletion.run(ids)
                return
            url, body = f"{collectors[0]}/delete", {"rollouts": list(ids)}
            async with posting(session, url, body=body, seconds=DELETE_SECONDS, unable="deletes nothing"):
                pass

        yield erase
