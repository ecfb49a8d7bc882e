"""`agl-otel queue`: count rollouts, list failed ones, remove old ones. Also `open_queue`, which all commands use."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from agl_otel.cli.common import data_dir_option, json_option, print_json, run_async, settings_for, setup_logging, store_option
from agl_otel.cli.output import clock, open_console, table_of
from agl_otel.errors import AglError, NotFoundError, UsageError
from agl_otel.queue.client import QueueClient
from agl_otel.queue.lifecycle import FINISHED
from agl_otel.settings import DAY_SECONDS
from agl_otel.stack.sharing import must_have_data, stack_for
from agl_otel.store.address import queue_address
from agl_otel.types import AttemptedRollout, Rollout, RolloutMode, RolloutStatus
from agl_otel.types.options import Whole

if TYPE_CHECKING:
    from agl_otel.traces.reader import TraceReader

CHUNK: Final = 500  # rollouts per call
BOTH_STORES: Final = ("queue", "collector")  # the services that deletion needs
LONGEST: Final = 1e10  # seconds: three hundred years
SECONDS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": DAY_SECONDS, "w": 7 * DAY_SECONDS}


@contextlib.asynccontextmanager
async def open_queue(data_dir: Path | None, store: str | None, *, only: Sequence[str] = ("queue",)) -> AsyncGenerator[QueueClient]:
    """Open the queue of a running stack, else start the services `only` on the data directory for the duration of the context.

    Raises SettingsError if there is neither a stack nor data.
    """
    settings = settings_for(data_dir, store)
    setup_logging(settings.log_level if settings.log_level == "DEBUG" else "WARNING")
    must_have_data(settings)
    token = settings.token.get_secret_value()
    async with stack_for(settings, only=only) as (address, _), QueueClient(await queue_address(address, token), token=token) as queue:
        yield queue


def progress(*, silent: bool) -> Progress:
    """Make a progress bar on stderr."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), disable=silent, transient=True)


@contextlib.contextmanager
def reading(what: str, *, silent: bool) -> Generator[Callable[[int, int], None]]:
    """Show a progress bar on stderr; yield a function that is told (number read, number of all)."""
    with progress(silent=silent) as bar:
        task = bar.add_task(what, total=None)
        yield lambda read, total: bar.update(task, completed=read, total=total)


def span_of_time(text: str) -> float:
    """Parse a duration such as `90s`, `15m`, `12h`, `30d` or `2w` to seconds. Raises UsageError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip())
    if found is not None and (seconds := float(found[1]) * SECONDS[found[2]]) < LONGEST:
        return seconds
    raise UsageError(f"{text[:40]!r} is not a span of time: write a number and s, m, h, d or w, as in 30d")


async def rollouts_of(
    queue: QueueClient, statuses: Sequence[RolloutStatus], modes: Sequence[RolloutMode], *, run: str | None = None
) -> AsyncGenerator[Rollout]:
    """Iterate over all rollouts with these statuses and modes (none: all), and of this run (None: of all)."""
    query: dict[str, Any] = {"status_in": list(statuses) or None, "mode_in": list(modes) or None, "run": run, "limit": CHUNK}
    seen = 0
    while page := await queue.query_rollouts(**query, offset=seen):
        seen += len(page)
        for rollout in page:
            yield rollout


async def rollout_ids_of(queue: QueueClient, statuses: Sequence[RolloutStatus], modes: Sequence[RolloutMode]) -> list[str]:
    """List the ids of all rollouts with these statuses and modes (none: all)."""
    return [rollout.rollout_id async for rollout in rollouts_of(queue, statuses, modes)]


def _without_keep_spans(context: click.Context, _: click.Parameter, wait: bool) -> bool:
    if wait and context.params["keep_spans"]:
        raise UsageError("--wait and --keep-spans do not go together")
    return wait


_WAIT_HELP: Final = "Wait until they have left every file, too; else `agl-otel maintain` clears them within 24 hours."
wait_option = click.option("--wait", is_flag=True, callback=_without_keep_spans, help=_WAIT_HELP)
keep_spans_option = click.option("--keep-spans", is_flag=True, is_eager=True, help="Delete from the queue only; spans and logs stay.")


async def rollouts_named_by(name: str, reader: TraceReader) -> tuple[str, list[str]]:
    """Return what an id names among the spans, and its rollouts; ("", []) if it names nothing, or the spans cannot be read.

    That is a trace, with at most two rollouts, a conversation, with the latest, or a rollout.
    """
    try:
        found = await reader.named_by(name)
    except AglError:  # of the trace store: what was asked for is missing anyway
        return "", []
    kind = next((kind for kind in ("trace", "conversation", "rollout") if any(kind == each for each, _ in found)), "")
    return kind, sorted({rollout_id for each, rollout_id in found if each == kind and rollout_id})


async def not_in_queue(name: str, reader: TraceReader | None = None) -> NotFoundError:
    """Return the error for an id that no rollout of the queue has; with a reader it says whether there are spans under it."""
    found, rollouts = ("", []) if reader is None else await rollouts_named_by(name, reader)
    if rollouts and found != "rollout":
        several = "s" if len(rollouts) > 1 else ""
        return NotFoundError(f"{name!r} is a {found} of rollout{several} {' and '.join(rollouts)}: name {'one' if several else 'that'}")
    sql = 'agl-otel traces sql "SELECT SpanName, SpanAttributes FROM otel_traces WHERE {}"'
    if found == "trace":
        shown = sql.format(f"TraceId = '{name.lower()}'")
        return NotFoundError(f"{name!r} is a trace of no rollout: `{shown}` shows it; AGL_UNIDENTIFIED=adopt makes rollouts of such traces")
    if found == "rollout":
        shown = sql.format(f"RolloutId = '{name}'")
        return NotFoundError(f"the queue has no rollout {name!r}, but there are spans with this id: `{shown}` shows them (docs/otlp.md)")
    return NotFoundError(f"there is no rollout {name!r}; `agl-otel rollouts ls` lists them")


async def must_exist(queue: QueueClient, rollout_ids: Sequence[str], reader: TraceReader | None = None) -> list[str]:
    """Return the ids without duplicates. Raises the error of `not_in_queue` for one that the queue does not know."""
    for start in range(0, len(rollout_ids), CHUNK):
        part = rollout_ids[start : start + CHUNK]
        known = {item.rollout_id for item in await queue.query_rollouts(rollout_id_in=part)}
        if missing := [name for name in part if name not in known]:
            raise await not_in_queue(missing[0], reader)
    return [*dict.fromkeys(rollout_ids)]


@click.group()
def queue() -> None:
    """Look at the queue: count rollouts, list failed ones, remove old ones."""


@queue.command()
@data_dir_option
@store_option
@json_option
def stats(data_dir: Path | None, store: str | None, as_json: bool) -> None:
    """Count rollouts by status, and show how long the next one has waited."""

    async def main() -> None:
        async with open_queue(data_dir, store) as opened:
            found = await opened.statistics()
        if as_json:
            print_json(found)
            return
        oldest = found["oldest_claimable_age_seconds"]
        by_status: dict[str, int] = found["rollouts_by_status"]
        rows: list[tuple[str, object]] = [
            (f"rollouts {status}", by_status[status]) for status in get_args(RolloutStatus) if status in by_status
        ]
        rows += [
            ("rollouts in all", found["total_rollouts"]),
            ("can be claimed now", found["claimable"]),
            ("the next has waited", None if oldest is None else f"{oldest:.1f} s"),
            ("attempts", found["total_attempts"]),
            ("workers", found["total_workers"]),
            ("sets of resources", found["total_resources"]),
            ("up for", f"{found['uptime']:.0f} s"),
        ]
        open_console().print(table_of(f"queue on {found['name']}", ("what", "how many"), rows))

    run_async(main)


@queue.command()
@click.option("--mode", "modes", multiple=True, type=click.Choice(get_args(RolloutMode)), help="Only these modes (repeatable).")
@click.option("--limit", type=Whole(0), default=20, show_default=True)
@data_dir_option
@store_option
@json_option
def dead(modes: tuple[RolloutMode, ...], limit: int, data_dir: Path | None, store: str | None, as_json: bool) -> None:
    """List rollouts that failed after their last attempt and why, the latest first.

    `agl-otel rollouts retry` puts them back into the queue.
    """

    async def main() -> None:
        async with open_queue(data_dir, store) as opened:
            page = await opened.query_rollouts(
                status_in=["failed"], mode_in=modes or None, sort_by="end_time", sort_order="desc", limit=limit
            )
        if as_json:
            print_json({"total": page.total, "items": [item.model_dump(mode="json", exclude={"token"}) for item in page]})
            return
        rows: list[tuple[object, ...]] = []
        for item in page:
            attempt = item.attempt if isinstance(item, AttemptedRollout) else None
            attempts = f"{attempt.sequence_id if attempt else 0} of {item.config.max_attempts}"
            why = item.reason or (attempt.error if attempt else None) or "set to failed"
            rows.append((item.rollout_id, item.mode, attempts, attempt.status if attempt else None, why, clock(item.end_time)))
        open_console().print(table_of(f"{len(page)} of {page.total} dead", ("rollout", "mode", "attempts", "last", "why", "ended"), rows))

    run_async(main)


@queue.command()
@click.option("--older-than", metavar="SPAN", help="Finished longer ago than this: 12h, 30d, 2w.  [default: the setting retention_days]")
@click.option(
    "--status", "statuses", multiple=True, type=click.Choice(sorted(FINISHED)), help="Only these (repeatable).  [default: all finished]"
)
@click.option("--dry-run", is_flag=True, help="Count only.")
@keep_spans_option
@wait_option
@data_dir_option
@store_option
@json_option
def prune(
    older_than: str | None,
    statuses: tuple[RolloutStatus, ...],
    dry_run: bool,
    keep_spans: bool,
    wait: bool,
    data_dir: Path | None,
    store: str | None,
    as_json: bool,
) -> None:
    """Remove old finished rollouts with their attempts, spans and logs.

    They leave every file within 24 hours, or before the command ends with --wait, as with `agl-otel rollouts delete`. If retention_days
    is set, the stack removes them itself: from the queue by `agl-otel maintain`, from ClickHouse by the day of receipt.
    """
    settings = settings_for(data_dir, store)
    days = settings.retention_days
    if older_than is None and not days:
        raise UsageError("give an age, as in --older-than 30d: retention_days is 0, which keeps everything")
    before = time.time() - (span_of_time(older_than) if older_than is not None else days * DAY_SECONDS)

    async def main() -> None:
        from agl_otel.cli.erase import eraser
        from agl_otel.maintain.maintainer import finished_before

        queue_only = keep_spans or dry_run
        async with open_queue(data_dir, store, only=("queue",) if queue_only else BOTH_STORES) as opened:
            found = (await opened.query_rollouts(status_in=statuses or None, ended_before=before, limit=1)).total
            removed = 0
            if found and not dry_run:
                async with eraser(settings, opened, keep_spans=keep_spans, wait=wait) as delete:
                    with progress(silent=as_json) as bar:
                        task = bar.add_task("removing", total=found)
                        async for ids in finished_before(opened, statuses, before):
                            removed += await delete(ids)
                            bar.update(task, completed=removed)
        if as_json:
            print_json({"found": found, "removed": removed})
        else:
            click.echo(f"{found} rollouts would be removed" if dry_run else f"removed {removed} rollouts")

    run_async(main)
