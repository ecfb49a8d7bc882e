"""`agl-otel rollouts` and `agl-otel traces`: what is in the store, of a running stack or of a data directory at rest."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, get_args

import click
from rich.console import Console
from rich.table import Table

from agl_otel.cli.common import data_dir_option, json_option, print_json, run_async, setup_logging, store_option
from agl_otel.cli.data import move
from agl_otel.cli.render import attempt_tree, plain
from agl_otel.errors import NotFoundError
from agl_otel.settings import Settings
from agl_otel.stack import open_store
from agl_otel.store import Store
from agl_otel.types import AttemptedRollout, RolloutMode, RolloutStatus


@click.command()
@data_dir_option
@store_option
@click.option("--status", "statuses", multiple=True, type=click.Choice(get_args(RolloutStatus)), help="Only these statuses (repeatable).")
@click.option("--mode", "modes", multiple=True, type=click.Choice(get_args(RolloutMode)), help="Only these modes (repeatable).")
@click.option("--limit", type=click.IntRange(1), default=20, show_default=True)
@json_option
def rollouts(
    data_dir: Path | None, store: str | None, statuses: tuple[RolloutStatus, ...], modes: tuple[RolloutMode, ...], limit: int, as_json: bool
) -> None:
    """List rollouts, the newest first."""
    settings = Settings.load(data_dir=data_dir, store=store)
    setup_logging(settings.log_level if settings.log_level == "DEBUG" else "WARNING")

    async def main() -> None:
        async with open_store(settings) as opened:
            page = await opened.queue.query_rollouts(
                status_in=statuses or None, mode_in=modes or None, sort_by="start_time", sort_order="desc", limit=limit
            )
        if as_json:
            print_json({"total": page.total, "items": [item.model_dump(mode="json", exclude={"token"}) for item in page]})
            return
        table = Table(title=f"{len(page)} of {page.total} rollouts", title_justify="left")
        for column in ("rollout", "mode", "status", "attempt", "input", "started", "seconds"):
            table.add_column(column, no_wrap=column == "rollout")
        for item in page:
            attempt = item.attempt.attempt_id if isinstance(item, AttemptedRollout) else ""
            started = time.strftime("%H:%M:%S", time.localtime(item.start_time))
            seconds = f"{item.end_time - item.start_time:.2f}" if item.end_time else ""
            text = plain(json.dumps(item.input, ensure_ascii=False))
            table.add_row(item.rollout_id, item.mode or "", item.status, attempt, text, started, seconds)
        Console().print(table)

    run_async(main)


@click.group()
def traces() -> None:
    """Look at what agents emitted: one rollout as a tree, or SQL."""


traces.add_command(move)


@traces.command()
@click.argument("rollout_id")
@data_dir_option
@store_option
@json_option
def show(rollout_id: str, data_dir: Path | None, store: str | None, as_json: bool) -> None:
    """Show the spans of one rollout as a tree, with its verdict.

    ROLLOUT_ID may be shortened to any part that only one rollout has.
    """
    settings = Settings.load(data_dir=data_dir, store=store)
    setup_logging()

    async def main() -> None:
        async with open_store(settings) as opened:
            await show_rollout(opened, rollout_id, as_json=as_json)

    run_async(main)


async def show_rollout(store: Store, rollout_id: str, *, as_json: bool = False, console: Console | None = None) -> None:
    """Print every attempt of one rollout. Raises NotFoundError where no rollout, or more than one, has that id."""
    page = await store.queue.query_rollouts(rollout_id_in=[rollout_id]) or await store.queue.query_rollouts(
        rollout_id_contains=rollout_id, limit=2
    )
    if len(page) != 1:
        what = f"{page.total} rollouts have {rollout_id!r} in their id: write more of it" if page else f"no rollout {rollout_id!r}"
        raise NotFoundError(f"{what}. `agl-otel rollouts` lists them")
    rollout = page[0]
    found = await store.traces([rollout], deadline_seconds=0)
    spans = await store.spans(rollout.rollout_id)
    attempts = await store.queue.query_attempts([rollout.rollout_id])
    if as_json:
        verdicts = [verdict.model_dump() for verdict in found.verdicts.values()]
        content: dict[str, Any] = {"rollout": rollout.model_dump(mode="json", exclude={"token"}), "verdicts": verdicts}
        print_json({**content, "spans": [span.model_dump(mode="json") for span in spans]})
        return
    for attempt in attempts:
        own = [span for span in spans if span.attempt_id == attempt.attempt_id]
        verdict = found.verdicts.get((rollout.rollout_id, attempt.attempt_id))
        (console or Console()).print(attempt_tree(rollout, attempt, own, verdict))


@traces.command()
@click.argument("query")
@data_dir_option
@store_option
@json_option
def sql(query: str, data_dir: Path | None, store: str | None, as_json: bool) -> None:
    """Run a read-only ClickHouse QUERY, e.g. "SELECT SpanName, count() FROM otel_traces GROUP BY 1"."""
    settings = Settings.load(data_dir=data_dir, store=store)
    setup_logging()

    async def main() -> None:
        async with open_store(settings) as opened:
            await opened.reader.barrier()
            rows = await opened.reader.query(query)
        if as_json:
            print_json(rows)
            return
        table = Table()
        for column in rows[0] if rows else ():
            table.add_column(plain(column))
        for row in rows:
            table.add_row(*(plain(value) for value in row.values()))
        Console().print(table if rows else "no rows")

    run_async(main)
