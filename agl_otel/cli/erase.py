"""Delete rollouts. Shared by `rollouts delete` and `queue prune`.

Rollouts are deleted from the queue first, so that no query finds one without its spans; then from ClickHouse (collector/deletion.py),
from proxies' journals, collectors' dead letters, and the records of runs (`forget_in_runs`). Deleted rows remain in ClickHouse's parts
and in the logs of collectors and queue until `Stored.purge` clears those, which needs no ids: `maintain` calls it every few hours,
`--wait` at once.

A ClickHouse server (AGL_CLICKHOUSE_URL) is reached directly, the embedded one through its collector. Both are checked before anything is
deleted. If ClickHouse becomes unavailable in between, the error names what remains and the command that finishes the deletion.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from pathlib import Path
from typing import Final

import click

from agl_otel.errors import AglError, UnavailableError, UsageError
from agl_otel.maintain.stored import stored_parts
from agl_otel.queue.client import QueueClient
from agl_otel.settings import Settings

DELETE_SECONDS: Final = 600.0  # for one chunk; each table is scanned once
RUNS: Final = "runs"
LOGS: Final = "logs"
TEXTS: Final = (".jsonl", ".frames", ".damaged", ".txt", ".md", ".csv", ".log")
KEPT: Final = "metrics.jsonl"  # figures of steps, which resuming a run needs; it holds nothing of spans
ALTERNATIVE: Final = "--keep-spans removes rollouts from the queue alone"


@contextlib.asynccontextmanager
async def eraser(
    settings: Settings, queue: QueueClient, *, keep_spans: bool, wait: bool = False
) -> AsyncGenerator[Callable[[list[str]], Awaitable[int]]]:
    """Yield a function that deletes rollouts by id and returns how many of them the queue knew; with `keep_spans` only from the queue.

    With `wait`, leaving the context clears the deleted rows from all files. Files of the data directory that cannot be cleared are named
    on stderr.

    Raises UsageError if `wait` is given on another machine than that of the queue's database, UnavailableError if ClickHouse cannot
    delete; then nothing was deleted. The yielded function raises UnavailableError if ClickHouse fails later, and names what remains.
    """
    if keep_spans:
        yield queue.delete
        return
    async with stored_parts(settings, queue) as stored:
        if wait and stored.database is not None and not stored.database.exists():
            raise UsageError(
                f"--wait works where the data are, and {stored.database} is not here: run it there, with --data-dir or AGL_QUEUE_URL"
            )
        try:
            await stored.delete(())
        except AglError as error:
            raise UnavailableError(f"nothing was deleted, because the spans cannot be: {error}. {ALTERNATIVE}") from None

        gone: list[str] = []

        async def delete(ids: list[str]) -> int:
            gone.extend(ids)
            deleted = await queue.delete(ids)
            try:
                await stored.delete(ids)
            except AglError as error:
                raise UnavailableError(
                    f"{len(ids)} rollouts are deleted from the queue, but their stored data are not: {error}. "
                    f"When that is mended, finish with: agl-otel rollouts delete --yes {' '.join(ids)}"
                ) from None
            return deleted

        yield delete
        for text in await asyncio.to_thread(forget_in_runs, settings.data_dir.absolute(), gone):
            click.echo(text, err=True)
        if wait:
            await stored.purge()


# --- run folders


def forget_in_runs(data_dir: Path, rollout_ids: Sequence[str]) -> list[str]:
    """Remove the records of runs that name one of these rollouts, or of runs that made one; return messages about what remains.

    Records are rows, journals, tasks and logs; run.json, figures, weights and checkpoints are kept. Records of a run in use are kept too,
    and logs of services are only named in the messages.
    """
    ids = [rollout_id.encode() for rollout_id in rollout_ids]
    remaining: list[str] = []
    for run in sorted(path for path in (data_dir / RUNS).glob("*") if path.is_dir()):
        made = _made_by_run(run, rollout_ids)
        texts = [path for path in run.rglob("*") if path.suffix in TEXTS and path.name != KEPT and path.is_file()]
        if records := [path for path in texts if made or _names(path, ids)]:
            with _lock_unused(run) as unused:
                for path in records if unused else ():
                    path.unlink(missing_ok=True)
            if not unused:
                remaining.append(f"{run} names them, and a process works on it: delete them again when it has ended")
        if made:
            remaining.append(f"{run} made them: its weights and checkpoints stay")
    logs = [path for path in sorted((data_dir / LOGS).glob("*")) if _names(path, ids)]
    return [*remaining, *(f"{path} names them, and may hold what a function agent printed: look, and remove it yourself" for path in logs)]


def _names(path: Path, ids: Sequence[bytes]) -> bool:
    data = path.read_bytes() if path.is_file() else b""
    return any(rollout_id in data for rollout_id in ids)


def _made_by_run(run: Path, rollout_ids: Sequence[str]) -> bool:
    """Return whether a run made one of these rollouts, which their ids show: most records name no rollout."""
    from agl_otel.algorithms.run_folder import RUN  # half a second to import

    try:
        run_id = json.loads((run / RUN).read_text())["run_id"]
    except (OSError, ValueError, KeyError, TypeError):
        return False  # not a run, or a damaged one
    return any(rollout_id.startswith(f"ro-{run_id}-") for rollout_id in rollout_ids)


@contextlib.contextmanager
def _lock_unused(run: Path) -> Generator[bool]:
    """Yield whether the run is not in use (algorithms/run_folder.py), and keep it locked in the context."""
    lock = run / "lock"
    if not lock.exists():
        yield True
        return
    with lock.open("r+") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
