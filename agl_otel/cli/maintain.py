"""`agl-otel maintain`: the maintenance of a stack's stores as a command; `up` runs it as a service."""

from __future__ import annotations

from pathlib import Path

import click

from agl_otel.cli.common import data_dir_option, json_option, print_json, run_async, setup_logging, store_option
from agl_otel.errors import InUseError
from agl_otel.maintain.maintainer import INTERVAL_SECONDS, SUMMARY, maintainer
from agl_otel.settings import Settings
from agl_otel.types.options import Finite


@click.command()
@click.option("--once", is_flag=True, help="Run one full pass, then end.")
@click.option("--interval", default=INTERVAL_SECONDS, show_default=True, type=Finite(min=0.1), help="Seconds between passes.")
@data_dir_option
@store_option
@json_option
def maintain(once: bool, interval: float, data_dir: Path | None, store: str | None, as_json: bool) -> None:
    """Maintain a stack's stores; `up` runs this as a service.

    Identifies spans that arrived before the spans that carry their rollout's id, makes rollouts of unidentified traces
    (AGL_UNIDENTIFIED=adopt), creates the schema of a ClickHouse server, clears deleted rows from files, and removes finished rollouts older
    than retention_days from the queue. Several may run: one works, the others wait.
    """
    settings = Settings.load(data_dir=data_dir, store=store)
    setup_logging(settings.log_level)

    async def main() -> None:
        async with maintainer(settings) as made:
            if not once:
                await made.run(interval)
            report = await made.once()
            if report is None:
                raise InUseError("another `agl-otel maintain` holds the lease (one runs with `agl-otel up`): it does this already")
            if as_json:
                print_json(report)
            else:
                click.echo(SUMMARY % report)

    run_async(main)
