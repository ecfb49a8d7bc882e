"""`agl-otel resources` and `agl-otel workers`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import get_args

import click

from agl_otel.cli.common import data_dir_option, json_option, print_json, run_async, store_option
from agl_otel.cli.output import clock, lasted, open_console, table_of
from agl_otel.cli.queue import open_queue
from agl_otel.errors import NotFoundError
from agl_otel.text import json_text
from agl_otel.types import WorkerStatus
from agl_otel.types.options import Whole


@click.group()
def resources() -> None:
    """Look at resources: the prompts and model addresses that agents are given."""


@resources.command("ls")
@click.option("--all-versions", is_flag=True, help="Old versions too.")
@click.option("--limit", type=Whole(0), default=20, show_default=True)
@data_dir_option
@store_option
@json_option
def list_resources(all_versions: bool, limit: int, data_dir: Path | None, store: str | None, as_json: bool) -> None:
    """List sets of resources, the latest first."""

    async def main() -> None:
        async with open_queue(data_dir, store) as queue:
            page = await queue.query_resources(all_versions=all_versions, sort_by="update_time", sort_order="desc", limit=limit)
        if as_json:
            print_json({"total": page.total, "items": [item.without_keys().model_dump(mode="json") for item in page]})
            return
        rows = [
            (r.resources_id, r.version, ", ".join(f"{n} ({v.resource_type})" for n, v in r.resources.items()), clock(r.update_time))
            for r in page
        ]
        open_console().print(table_of(f"{len(page)} of {page.total} sets", ("resources", "version", "what", "written"), rows))

    run_async(main)


@resources.command()
@click.argument("resources_id", required=False)
@click.option("--version", type=Whole(1), help="An old version.  [default: the current one]")
@data_dir_option
@store_option
@json_option
def show(resources_id: str | None, version: int | None, data_dir: Path | None, store: str | None, as_json: bool) -> None:
    """Show one set of resources, or the latest, without the keys of models."""

    async def main() -> None:
        async with open_queue(data_dir, store) as queue:
            found = await queue.get_resources(resources_id, version=version)
        if found is None:
            name = (
                "no resources yet"
                if resources_id is None
                else f"no resources {resources_id!r}" + (f" version {version}" if version else "")
            )
            raise NotFoundError(f"{name}: `agl-otel resources ls` lists what there is")
        content = found.without_keys().model_dump(mode="json")
        if as_json:
            print_json(content)
        else:
            click.echo(json_text(content, indent=2))

    run_async(main)


@click.group()
def workers() -> None:
    """Look at workers: the processes that claim rollouts."""


@workers.command("ls")
@click.option("--status", "statuses", multiple=True, type=click.Choice(get_args(WorkerStatus)), help="Only these (repeatable).")
@click.option("--limit", type=Whole(0), default=50, show_default=True)
@data_dir_option
@store_option
@json_option
def list_workers(statuses: tuple[WorkerStatus, ...], limit: int, data_dir: Path | None, store: str | None, as_json: bool) -> None:
    """List workers, what they run and their last heartbeats."""

    async def main() -> None:
        async with open_queue(data_dir, store) as queue:
            page = await queue.query_workers(status_in=statuses or None, limit=limit)
        if as_json:
            print_json({"total": page.total, "items": [item.model_dump(mode="json") for item in page]})
            return
        now = time.time()
        rows = [
            (
                w.worker_id,
                w.status,
                w.current_rollout_id,
                w.current_attempt_id,
                _ago(w.last_heartbeat_time, now),
                _ago(w.last_dequeue_time, now),
            )
            for w in page
        ]
        columns = ("worker", "status", "rollout", "attempt", "last heartbeat", "last claim")
        open_console().print(table_of(f"{len(page)} of {page.total} workers", columns, rows))

    run_async(main)


def _ago(at: float | None, now: float) -> str:
    return "" if at is None else f"{lasted(max(0.0, now - at))} ago"
