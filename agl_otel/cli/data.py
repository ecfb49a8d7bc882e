"""`agl-otel data`: backup, restore, and the move from embedded stores to servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console

from agl_otel.cli.common import (
    data_dir_option,
    json_option,
    print_json,
    run_async,
    settings_for,
    setup_logging,
    store_option,
    warn_of_passwords,
)
from agl_otel.cli.queue import open_queue
from agl_otel.errors import SettingsError
from agl_otel.service.lock import FileLock
from agl_otel.settings import Settings
from agl_otel.stack.supervisor import claim_data_dir, read_stack_file


@click.group()
def data() -> None:
    """Back up, restore, or move the data of a stack."""


@data.command()
@click.argument("target", type=click.Path(path_type=Path))
@data_dir_option
@store_option
@json_option
def backup(target: Path, data_dir: Path | None, store: str | None, as_json: bool) -> None:
    """Copy queue and traces of a stack, running or stopped, to the folder TARGET.

    TARGET must not exist yet. Each store is copied by its own means (SQLite's backup, pg_dump, ClickHouse's Native format), counted and
    hashed. A running stack keeps running: the copy holds everything that was acknowledged before it began.
    """
    from agl_otel.stack import backup as copies  # imports ClickHouse, which is slow

    settings = _settings(data_dir, store)
    if settings.store or read_stack_file(settings.data_dir.absolute()):

        async def running() -> dict[str, Any]:
            async with open_queue(data_dir, settings.store) as queue:
                return await copies.backup_running(settings, queue, target, _Progress(as_json))

        manifest = run_async(running)
    else:
        with _locked(settings):
            manifest = copies.backup(settings, target, _Progress(as_json))
    _report(as_json, {"backup": str(target.absolute()), **manifest}, f"backed up {settings.data_dir} to {target}")


@data.command()
@click.argument("source", type=click.Path(path_type=Path, exists=True, file_okay=False))
@data_dir_option
@json_option
def restore(source: Path, data_dir: Path | None, as_json: bool) -> None:
    """Restore a data directory from the backup in SOURCE.

    The data directory must not exist yet, and servers in AGL_CLICKHOUSE_URL and AGL_QUEUE_URL must hold nothing: nothing is overwritten.
    A queue from PostgreSQL can be restored to PostgreSQL only, one from SQLite to either.
    """
    from agl_otel.stack import backup as copies

    settings = _settings(data_dir)
    manifest = copies.restore(source, settings, _Progress(as_json))
    _report(as_json, {"data_dir": str(settings.data_dir.absolute()), **manifest}, f"restored {source} to {settings.data_dir}")


@data.command()
@click.option("--queue", "queue_url", metavar="URL", help="postgresql://user:password@host:5432/database  [default: AGL_QUEUE_URL]")
@click.option(
    "--clickhouse",
    "clickhouse_url",
    metavar="URL",
    help="clickhouse://user:password@host:9000/otel?http_port=8123  [default: AGL_CLICKHOUSE_URL]",
)
@data_dir_option
@json_option
def move(queue_url: str | None, clickhouse_url: str | None, data_dir: Path | None, as_json: bool) -> None:
    """Copy the queue and the traces of a stopped stack to a PostgreSQL and a ClickHouse server, or only one of them.

    A store without a URL stays embedded. The servers must be empty (on PostgreSQL: the schema that the URL names). The embedded data are
    kept; to use the servers, set AGL_QUEUE_URL and AGL_CLICKHOUSE_URL and start the stack.
    """
    from agl_otel.stack.backup import move as move_stores
    from agl_otel.traces.opened import CHDB_SCHEME

    settings = _settings(data_dir)
    warn_of_passwords({"queue_url": queue_url, "clickhouse_url": clickhouse_url})
    queue, traces = queue_url or settings.queue_url, clickhouse_url or settings.clickhouse_url
    queue = "" if queue.startswith("sqlite:") else queue
    traces = "" if traces.startswith(CHDB_SCHEME) else traces
    if not (queue or traces):
        raise SettingsError(
            "name a server: --queue postgresql://user:password@host/database (or AGL_QUEUE_URL), "
            "--clickhouse clickhouse://user:password@host:9000/otel (or AGL_CLICKHOUSE_URL), or both"
        )
    with _locked(settings):
        moved = move_stores(settings, queue_url=queue, clickhouse_url=traces, progress=_Progress(as_json))
    rows = " and ".join(f"{sum(counts.values())} rows of the {store}" for store, counts in moved.items())
    _report(as_json, moved, f"copied {rows}; {settings.data_dir} is as it was")


class _Progress:
    """Prints progress to stderr."""

    def __init__(self, quiet: bool) -> None:
        self._console = Console(stderr=True, quiet=quiet)

    def __call__(self, table: str, done: int, total: int) -> None:
        self._console.print(f"  {table}  {done} / {total}", highlight=False)


def _settings(data_dir: Path | None, store: str | None = None) -> Settings:
    settings = settings_for(data_dir, store)
    setup_logging(settings.log_level if settings.log_level == "DEBUG" else "WARNING")
    return settings


def _locked(settings: Settings) -> FileLock:
    """Lock an existing data directory, so that no stack can start on it."""
    if not settings.data_dir.is_dir():
        raise SettingsError(f"there is no data directory {settings.data_dir}: name it with --data-dir")
    return claim_data_dir(settings.data_dir.absolute())


def _report(as_json: bool, content: dict[str, Any], text: str) -> None:
    if as_json:
        print_json(content)
    else:
        click.echo(text)
