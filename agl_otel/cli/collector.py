"""`agl-otel collector status`: counters and latencies of the running collectors."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp
import click
from rich.console import Console
from rich.table import Table

from agl_otel.cli.common import data_dir_option, json_option, print_json, run_async, settings_for, setup_logging, store_option
from agl_otel.cli.output import open_console
from agl_otel.errors import UnavailableError
from agl_otel.settings import Settings
from agl_otel.stack.supervisor import running_address
from agl_otel.store import Store
from agl_otel.text import printable_lines
from agl_otel.traces.collector_client import open_session

STATUS_SECONDS: Final = 5.0
PREFIX: Final = "agl.collector."
OTHER_COLLECTOR: Final = "an OpenTelemetry Collector: it serves its metrics at the address in its configuration (:8888/metrics)"


@click.group()
def collector() -> None:
    """Look at the collectors: what they take, store and refuse."""


@collector.command()
@data_dir_option
@store_option
@json_option
def status(data_dir: Path | None, store: str | None, as_json: bool) -> int:
    """Show the state and the counters of every running collector.

    Exits with 1 if one of them does not respond, or is degraded, with the reason: ClickHouse does not answer, a disk or the log is full, or
    stored rows may be lost.
    """
    settings = settings_for(data_dir, store)
    setup_logging()
    token = settings.token.get_secret_value()

    async def main() -> list[dict[str, Any]]:
        async with await Store.connect(running_stack(settings), token=token) as opened:
            return await statuses_of(opened, token)

    found = run_async(main)
    if not found:
        raise UnavailableError("no collector has registered: start one with `agl-otel up`")
    if as_json:
        print_json(found)
    else:
        console = open_console(highlight=False)
        for each in found:
            print_status(console, each)
    return int(any("error" in each or trouble_of(each) for each in found))


def running_stack(settings: Settings) -> str:
    """Return the address of the running stack. Raises UnavailableError if there is none."""
    address = running_address(settings)
    if not address:
        raise UnavailableError(f"no stack runs on {settings.data_dir}: give --data-dir or --store, or start one with `agl-otel up`")
    return address


async def statuses_of(store: Store, token: str) -> list[dict[str, Any]]:
    """Read the status of every running collector (see `read_status`)."""
    addresses = (await store.queue.describe()).collectors
    async with status_session(token) as session:
        return await asyncio.gather(*(read_status(session, address) for address in addresses))


def status_session(token: str) -> aiohttp.ClientSession:
    """Open a session for `read_status`; the caller closes it."""
    return open_session(token, timeout=aiohttp.ClientTimeout(total=STATUS_SECONDS))


async def read_status(session: aiohttp.ClientSession, address: str) -> dict[str, Any]:
    """Return the status of the collector at `address`, or {"address", "error"}."""
    return {"address": address, **await _status(session, address)}


def trouble_of(found: Mapping[str, Any]) -> str:
    """Return why a collector with this status is degraded; empty if it is not."""
    of_earlier_release = [found["disk"]["message"]] if found["disk"]["level"] == "full" else found.get("store_problems", [])
    return found.get("reason", "") if "status" in found else "; ".join(of_earlier_release)


async def _status(session: aiohttp.ClientSession, address: str) -> dict[str, Any]:
    try:
        async with session.get(f"{address}/status") as answer:
            if answer.status == 404:
                return {"error": OTHER_COLLECTOR}
            if answer.status != 200:
                return {"error": f"HTTP {answer.status}: {(await answer.text())[:200]}"}
            return await answer.json()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return {"error": str(error) or type(error).__name__}


def print_status(console: Console, found: Mapping[str, Any]) -> None:
    """Print what `read_status` returned."""
    if "error" in found:
        console.print(printable_lines(f"{found['address']}: {found['error']}"), style="red", markup=False)
        return
    disk, trouble = found["disk"], trouble_of(found)
    state = "degraded" if trouble else "ok"
    title = f"{found['address']}: {state}, up {found['uptime_seconds']:.0f} s, {found.get('core', 'python')} core"
    table = Table(title=title, title_justify="left")
    table.add_column("metric", no_wrap=True)
    table.add_column("of")
    table.add_column("value", justify="right")
    for name, points in sorted(found["metrics"].items()):
        for point in points:
            attributes = ", ".join(str(value) for value in point["attributes"].values())
            table.add_row(name.removeprefix(PREFIX), attributes, _value(point))
    console.print(table)
    if trouble:
        console.print(printable_lines(f"degraded: {trouble}"), style="red", markup=False)
    if disk["level"] == "warning":
        console.print(printable_lines(disk["message"]), style="yellow", markup=False)
    dead_letters = found.get("kept_aside", {"requests": 0, "latest": []})
    if dead_letters["requests"]:
        console.print(f"{dead_letters['requests']} requests are dead letters, because they cannot be stored; the latest:", style="yellow")
    for each in dead_letters["latest"]:
        of = ", ".join(each.get("rollouts", [])[:3]) or "no rollout"
        console.print(printable_lines(f"  {each['file']} ({of}): {each['reason']}"), style="yellow", markup=False)


def _value(point: Mapping[str, Any]) -> str:
    if "count" not in point:
        return f"{point['value']:,.0f}"
    quantiles: Sequence[str] = [f"{name} ≤ {point[name]:g} s" for name in ("p50", "p99") if point[name] is not None]
    return f"{point['count']:,} × ({', '.join(quantiles)})" if quantiles else "0"
