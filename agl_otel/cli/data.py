"""`agl-otel backup`, `agl-otel restore`, `agl-otel traces move` and `agl-otel queue move`: the data of a stack, somewhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console

from agl_otel.cli.common import data_dir_option, json_option, print_json, run_async, setup_logging, store_option
from agl_otel.cli.queue import open_queue
from agl_otel.errors import SettingsError
from agl_otel.service.lock import FileLock
from agl_otel.settings import Settings
from agl_otel.stack.supervisor import claim_data_dir, read_stack_file


@click.command()
@click.argument("target", type=click.Path(path_type=Path))
@data_dir_option
@store_option
@json_option
def backup(target: Path, data_dir: Path | None, store: str | None, as_json: bool) -> None:
    """Copy queue and traces of a stack, running or stopped, to the folder TARGET.

    TARGET must not exist yet. The traces are written in ClickHouse's Native format; everything is counted and hashed. A stack that runs
    goes on: all that was acknowledged before is in the copy.
    """
    from agl_otel.stack import backup as copies  # opens ClickHouse: not before it is needed

    settings = _settings(data_dir, store)
    if settings.store or read_stack_file(settings.data_dir.absolute()):

        async def running() -> dict[str, Any]:
            async with open_queue(data_dir, settings.store) as queue:
                return await copies.backup_running(settings, queue, target, _Show(as_json))

        manifest = run_async(running)
    else:
        with _claimed(settings):
            manifest = copies.backup(settings, target, _Show(as_json))
    _say(as_json, {"backup": str(target.absolute()), **manifest}, f"backed up {settings.data_dir} to {target}")


@click.command()
@click.argument("source", type=click.Path(path_type=Path, exists=True, file_okay=False))
@data_dir_option
@json_option
def restore(source: Path, data_dir: Path | None, as_json: bool) -> None:
    """Make a data directory from the backup in SOURCE.

    The data directory must not exist yet, and a ClickHouse server in AGL_CLICKHOUSE_URL must hold no traces: nothing is overwritten.
    """
    from agl_otel.stack import backup as copies

    settings = _settings(data_dir)
    manifest = copies.restore(source, settings, _Show(as_json))
    _say(as_json, {"data_dir": str(settings.data_dir.absolute()), **manifest}, f"restored {source} to {settings.data_dir}")


@click.command()
@click.option(
    "--to", "target", metavar="URL", help="clickhouse://user:password@host:9000/otel?http_port=8123  [default: AGL_CLICKHOUSE_URL]"
)
@data_dir_option
@json_option
def move(target: str | None, data_dir: Path | None, as_json: bool) -> None:
    """Copy the traces of a stopped stack to a ClickHouse server.

    The server must hold no traces yet. The embedded ones stay where they are; set AGL_CLICKHOUSE_URL and start the stack to use the server.
    """
    from agl_otel.traces.address import ServerAddress
    from agl_otel.traces.opened import CHDB_SCHEME, open_store
    from agl_otel.traces.transfer import move as move_traces

    settings = _settings(data_dir)
    url = target or settings.clickhouse_url
    if not url or url.startswith(CHDB_SCHEME):
        raise SettingsError("name the ClickHouse server with --to or AGL_CLICKHOUSE_URL: clickhouse://user:password@host:9000/otel")
    address = ServerAddress.parse(url)
    embedded = settings.data_dir.absolute() / "traces"
    if not embedded.exists():
        raise SettingsError(f"there are no embedded traces in {settings.data_dir}")
    with _claimed(settings):
        source = open_store(f"{CHDB_SCHEME}{embedded}")
        try:
            server = open_store(url)
            try:
                held = move_traces(source, server, _Show(as_json))
            finally:
                server.close()
        finally:
            source.close()
    moved = {table: each.rows for table, each in held.items()}
    _say(as_json, {"to": str(address), "rows": moved}, f"copied {sum(moved.values())} rows to {address}; {embedded} is as it was")


class _Show:
    """Progress for people, on stderr."""

    def __init__(self, quiet: bool) -> None:
        self._console = Console(stderr=True, quiet=quiet)

    def __call__(self, table: str, done: int, total: int) -> None:
        self._console.print(f"  {table}  {done} / {total}", highlight=False)


def _settings(data_dir: Path | None, store: str | None = None) -> Settings:
    settings = Settings.load(data_dir=data_dir, store=store)
    setup_logging(settings.log_level if settings.log_level == "DEBUG" else "WARNING")
    return settings


def _claimed(settings: Settings) -> FileLock:
    """The lock of an existing data directory: no stack starts on it meanwhile."""
    if not settings.data_dir.is_dir():
        raise SettingsError(f"there is no data directory {settings.data_dir}: name it with --data-dir")
    return claim_data_dir(settings.data_dir.absolute())


def _say(as_json: bool, content: dict[str, Any], text: str) -> None:
    if as_json:
        print_json(content)
    else:
        click.echo(text)
