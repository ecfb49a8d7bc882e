"""Removes rollouts from both stores: what `rollouts delete`, `queue prune` and `maintain` share.

The queue forgets rollouts first, so that nobody sees one without its spans; then ClickHouse does, by collector/deletion.py. As with
`maintain`, a ClickHouse server (AGL_CLICKHOUSE_URL) is reached from here, the embedded one through its collector. Before the first rollout
is touched, both are asked whether they can. Should ClickHouse go away in between, the error names what is left and the command that
finishes it: nothing else remembers rollouts that the queue has forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

import aiohttp
import click

from agl_otel.collector.deletion import Deletion
from agl_otel.errors import AglError, UnavailableError, UsageError
from agl_otel.queue.client import QueueClient
from agl_otel.queue.sqlite import sqlite_path
from agl_otel.settings import Settings
from agl_otel.traces.collector_client import barriers, open_session, posting
from agl_otel.traces.opened import CHDB_SCHEME, open_store
from agl_otel.types import RolloutStatus

CHUNK: Final = 500  # rollouts in one call
DELETE_SECONDS: Final = 600.0  # for some hundred rollouts; each table is gone through once
RUNS: Final = "runs"
LOGS: Final = "logs"
TEXTS: Final = (".json", ".jsonl", ".toml", ".txt", ".md", ".csv", ".log")
ALTERNATIVE: Final = "--keep-spans removes rollouts from the queue alone"


class Erase(Protocol):
    """Deletes what is stored of rollouts; `wipe` takes all that was ever deleted off the disk, and what was kept `aside` of some."""

    async def __call__(self, ids: Sequence[str], *, wipe: bool = False, aside: Sequence[str] = ()) -> None:
        """Raises UnavailableError, ClickHouseError."""
        ...


async def finished_before(opened: QueueClient, statuses: Sequence[RolloutStatus], before: float) -> AsyncIterator[list[str]]:
    """Ids of rollouts that ended before a time (Unix seconds), page by page; the caller removes each page."""
    while page := await opened.query_rollouts(status_in=statuses or None, ended_before=before, limit=CHUNK):
        yield [item.rollout_id for item in page]


def _without_keep_spans(context: click.Context, _: click.Parameter, wipe: bool) -> bool:
    if wipe and context.params["keep_spans"]:
        raise UsageError("--wipe and --keep-spans do not go together")
    return wipe


_WIPE_HELP: Final = "Off the disk, too, before it returns: a minute, and parts are written anew."
wipe_option = click.option("--wipe", is_flag=True, callback=_without_keep_spans, help=_WIPE_HELP)
keep_spans_option = click.option("--keep-spans", is_flag=True, is_eager=True, help="From the queue only: their spans and logs stay.")


@contextlib.asynccontextmanager
async def eraser(
    settings: Settings, queue: QueueClient, *, keep_spans: bool, wipe: bool = False
) -> AsyncGenerator[Callable[[list[str]], Awaitable[int]]]:
    """What deletes some rollouts and answers how many the queue knew; with `keep_spans` it asks the queue alone.

    With `wipe`, when the block ends, no file of ClickHouse's, of the collectors' logs and what they keep aside, and of the embedded queue
    holds what was deleted; run folders and logs of the data directory that name a rollout are told on stderr.

    Raises UnavailableError where ClickHouse cannot be asked now; then nothing was deleted. What is yielded raises it where ClickHouse
    went away since, and says what is left. Raises UsageError where a wipe was asked for elsewhere than at the queue's database.
    """
    database = _database(settings) if wipe else None
    if keep_spans:
        yield queue.delete
        return
    async with _erasing(settings, queue) as erase:
        try:
            await erase(())
        except AglError as error:
            raise UnavailableError(f"nothing was deleted, because the spans cannot be: {error}. {ALTERNATIVE}") from None

        gone: list[str] = []

        async def delete(ids: list[str]) -> int:
            gone.extend(ids)
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
        if wipe:
            await erase((), wipe=True, aside=gone)
            if database is not None:
                await asyncio.to_thread(empty_log, database)
            for kept in await asyncio.to_thread(_naming, settings.data_dir.absolute(), gone):
                what = "what was trained on" if kept.is_dir() else "what a service was told of them"
                click.echo(f"{kept} names them, and may hold {what}: look, and remove it yourself", err=True)


def _database(settings: Settings) -> Path | None:
    """The embedded queue's file; None where the queue is on PostgreSQL."""
    database = sqlite_path(settings.queue_db)
    if database is not None and not database.exists():
        raise UsageError(f"--wipe works where the data are, and {database} is not here: run it there, with --data-dir or AGL_QUEUE_URL")
    return database


def empty_log(database: Path) -> None:
    """Empty the log of the embedded queue: SQLite overwrites what is deleted (secure_delete), and its log holds what was written before.

    Raises UnavailableError where somebody reads it.
    """
    with contextlib.closing(sqlite3.connect(database, timeout=60)) as opened:
        (busy, *_) = opened.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    if busy:
        raise UnavailableError(f"{database}-wal is being read and still holds what was deleted: ask for the same deletion again")


def _naming(data_dir: Path, rollout_ids: Sequence[str]) -> list[Path]:
    """The folders of runs that made one of these rollouts or have a file that names it, and such logs of services; weights name none."""
    wanted = [rollout_id.encode() for rollout_id in rollout_ids]

    def names(path: Path) -> bool:
        data = path.read_bytes() if path.is_file() else b""
        return any(rollout_id in data for rollout_id in wanted)

    runs = sorted(path for path in (data_dir / RUNS).glob("*") if path.is_dir())
    found = [run for run in runs if _made(run, rollout_ids) or any(names(path) for path in run.rglob("*") if path.suffix in TEXTS)]
    return found + sorted(filter(names, (data_dir / LOGS).glob("*")))


def _made(run: Path, rollout_ids: Sequence[str]) -> bool:
    """Whether a run made one of these, whose ids begin with its own: verl's run folder keeps tasks and weights, and names none."""
    from agl_otel.algorithms.run_folder import RUN  # half a second, which a wipe alone has to spend

    try:
        run_id = json.loads((run / RUN).read_text())["run_id"]
    except (OSError, ValueError, KeyError, TypeError):
        return False  # no run, or a damaged one
    return any(rollout_id.startswith(f"ro-{run_id}-") for rollout_id in rollout_ids)


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

        async def erase(ids: Sequence[str], *, wipe: bool = False, aside: Sequence[str] = ()) -> None:
            described = await queue.describe()
            collectors = [address.rstrip("/") for address in described.collectors]
            if not collectors and deletion is None:
                raise UnavailableError(
                    "no collector has said where it is: start one with `agl-otel up`, or name a server with AGL_CLICKHOUSE_URL"
                )
            await barriers(session, collectors, wipe=wipe, rollout_ids=aside)
            if ids:
                await _tell_proxies(session, described.proxies, ids)
            if deletion is not None:
                await deletion.run(ids)
                if wipe:
                    await deletion.wipe()
                return
            url, body = f"{collectors[0]}/delete", {"rollouts": list(ids), "wipe": wipe}
            async with posting(session, url, body=body, seconds=DELETE_SECONDS, unable="deletes nothing"):
                pass

        yield erase


async def _tell_proxies(session: aiohttp.ClientSession, proxies: Sequence[str], ids: Sequence[str]) -> None:
    """Have the journals of proxies keep nothing of these; one that is away sends nothing of a rollout that the queue has forgotten."""
    for address in proxies:
        try:
            async with posting(session, f"{address.rstrip('/')}/delete", body={"rollouts": list(ids)}, seconds=DELETE_SECONDS):
                pass
        except UnavailableError as error:
            click.echo(f"the proxy at {address} was not told, and forgets them when it starts again: {error}", err=True)
