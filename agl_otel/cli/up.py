"""`agl-otel up`: run the stack in the foreground."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.table import Table

from agl_otel.cli.common import (
    clickhouse_option,
    collector_option,
    data_dir_option,
    json_option,
    port_options,
    print_json,
    run_async,
    setup_logging,
    warn_of_open_host,
    warn_of_passwords,
)
from agl_otel.cli.output import open_console
from agl_otel.settings import Settings
from agl_otel.stack.supervisor import Stack


@click.command()
@data_dir_option
@click.option("--queue", "queue_url", metavar="URL", help="postgresql://…  [default: SQLite in the data directory]")
@clickhouse_option
@collector_option
@port_options
@json_option
def up(data_dir: Path | None, as_json: bool, **flags: Any) -> None:
    """Run the stack until Ctrl+C: queue, collector, proxy and web.

    All data are in --data-dir; stack.json there lists the addresses of the services. A service that ends is restarted, with a back-off
    of up to a minute if it keeps ending; the others keep running. Clients need one address, the queue's: AGL_STORE=127.0.0.1:4747.
    """
    settings = Settings.load(data_dir=data_dir, **flags)
    setup_logging(settings.log_level)
    warn_of_passwords(flags)
    warn_of_open_host(settings)

    stack = Stack(settings)
    stack.prefork()

    async def main() -> None:
        await warn_of_silent_clickhouse(settings)
        async with stack:
            _show(stack, as_json)
            await warn_of_degraded_collector(stack, settings.token.get_secret_value())
            await stack.failed

    try:
        run_async(main)
    except KeyboardInterrupt:  # or SIGTERM: to stop is what was asked for
        click.echo("stopped", err=True)


async def warn_of_silent_clickhouse(settings: Settings) -> None:
    """Warn of a ClickHouse server that does not answer: the stack starts without it, and stores nothing until it does."""
    from agl_otel.net.http_server import is_healthy  # with aiohttp, which few stacks need in this process
    from agl_otel.traces.address import ServerAddress
    from agl_otel.traces.opened import CHDB_SCHEME

    if not settings.clickhouse_url or settings.clickhouse_url.startswith(CHDB_SCHEME):
        return
    server = ServerAddress.parse(settings.clickhouse_url)
    if not await is_healthy(server.ping):
        text = f"ClickHouse at {server} does not answer at {server.ping}: nothing is stored until it does (docs/clickhouse.md)"
        click.echo(f"warning: {text}", err=True)


async def warn_of_degraded_collector(stack: Stack, token: str) -> None:
    """Warn of a collector that takes nothing in, for example because its disk is full."""
    from agl_otel.cli.collector import read_status, status_session, trouble_of

    async with status_session(token) as session:
        status = await read_status(session, stack.addresses()["otlp_http"])
    if "error" not in status and (trouble := trouble_of(status)):
        click.echo(f"warning: the collector is degraded: {trouble}", err=True)


def _show(stack: Stack, as_json: bool) -> None:
    if as_json:
        print_json({"data_dir": str(stack.data_dir), "addresses": stack.addresses()})
        return
    table = Table(title="agl-otel is up", title_justify="left", show_header=False, box=None)
    for name, address in stack.addresses().items():
        table.add_row(name.replace("_", " "), address)
    table.add_row("data", str(stack.data_dir))
    console = open_console()
    console.print(table)
    console.print(f"\nPoint clients at it:  export AGL_STORE={stack.address}\nCtrl+C stops it.", highlight=False)
