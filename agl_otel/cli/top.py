"""`agl-otel top`: a live view of a running stack: rollouts by status, workers, collectors, and the rollouts that ended last."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from agl_otel.cli.collector import PREFIX, read_status, running_stack, status_session, trouble_of
from agl_otel.cli.common import data_dir_option, json_option, print_json, run_async, settings_for, setup_logging, store_option
from agl_otel.cli.output import clock, lasted, open_console, plain, table_of
from agl_otel.errors import UnavailableError
from agl_otel.queue.lifecycle import FINISHED
from agl_otel.store import Store
from agl_otel.types import UNRESPONSIVE_SECONDS, Rollout, Worker
from agl_otel.types.options import Finite

WORKERS: Final = 20  # workers on the screen: those with the latest heartbeats
ENDED: Final = 5


@dataclass(frozen=True)
class Reading:
    """The state of a stack at one moment."""

    at: float
    """Monotonic time in seconds."""
    statistics: Mapping[str, Any]
    workers: Sequence[Worker]
    """The workers with the latest heartbeats, at most WORKERS."""
    ended: Sequence[Rollout]
    """The rollouts that ended last."""
    collectors: Sequence[Mapping[str, Any]]
    down: Mapping[str, str] = field(default_factory=dict[str, str])
    """{service: its exit, and when it will be restarted}."""

    @property
    def finished(self) -> int:
        """Number of finished rollouts."""
        return sum(count for status, count in self.statistics["rollouts_by_status"].items() if status in FINISHED)

    def metric_sum(self, metric: str) -> float:
        """Sum a counter or gauge over the collectors that responded."""
        found = [point for each in self.collectors for point in each.get("metrics", {}).get(PREFIX + metric, ())]
        return sum(point["value"] for point in found)

    def as_json(self, before: Reading | None) -> dict[str, Any]:
        """Return the reading as a JSON object, with rates since `before`."""
        return {
            "statistics": dict(self.statistics),
            "finished_per_second": rate(self, before, "finished"),
            "spans_per_second": rate(self, before, "accepted"),
            "workers": [each.model_dump(mode="json") for each in self.workers],
            "collectors": [dict(each) for each in self.collectors],
            "down": dict(self.down),
        }


@click.command()
@click.option("--every", type=Finite(0.2), default=2.0, show_default=True, help="Seconds between two readings.")
@click.option("--once", is_flag=True, help="Take two readings, print, and end.")
@data_dir_option
@store_option
@json_option
def top(every: float, once: bool, data_dir: Path | None, store: str | None, as_json: bool) -> None:
    """Watch a running stack until Ctrl+C: rollouts, workers, collectors, and what has just ended.

    Without a terminal, or with --json, it takes two readings, prints once and ends.
    """
    settings = settings_for(data_dir, store)
    setup_logging()
    console = open_console(highlight=False)
    token = settings.token.get_secret_value()

    async def main() -> None:
        async with await Store.connect(running_stack(settings), token=token) as opened, status_session(token) as session:

            async def read() -> Reading:
                statistics, workers, ended, described = await asyncio.gather(
                    opened.queue.statistics(),
                    opened.queue.query_workers(sort_by="last_heartbeat_time", sort_order="desc", limit=WORKERS),
                    opened.queue.query_rollouts(status_in=sorted(FINISHED), sort_by="end_time", sort_order="desc", limit=ENDED),
                    opened.queue.describe(),
                )
                collectors = await asyncio.gather(*(read_status(session, address) for address in described.collectors))
                return Reading(time.monotonic(), statistics, workers, ended, collectors, described.down)

            before, now = None, await read()
            if once or as_json or not console.is_terminal:
                await asyncio.sleep(every)
                before, now = now, await read()
                print_json(now.as_json(before)) if as_json else console.print(screen(now, before))
                return
            with Live(screen(now, before), console=console, auto_refresh=False, screen=True) as live:
                while True:
                    await asyncio.sleep(every)
                    try:
                        before, now = now, await read()
                        live.update(screen(now, before), refresh=True)
                    except UnavailableError as error:  # the stack may be restarting
                        live.update(Text(plain(error, 500), "red"), refresh=True)

    try:
        run_async(main)
    except KeyboardInterrupt:
        if once or as_json or not console.is_terminal:
            raise


def rate(now: Reading, before: Reading | None, what: str) -> float | None:
    """Return the increase per second since `before` of `finished` rollouts or of a collector counter; None if a counter was reset."""
    if before is None or now.at <= before.at:
        return None
    grown = now.finished - before.finished if what == "finished" else now.metric_sum(what) - before.metric_sum(what)
    return None if grown < 0 else grown / (now.at - before.at)


def screen(now: Reading, before: Reading | None) -> RenderableType:
    """Render a reading."""
    counts = now.statistics
    line = Text(f"{counts['total_rollouts']:,} rollouts, {counts['total_attempts']:,} attempts, queue on {counts['name']}")
    line.append(f", up {lasted(counts['uptime'])}   {clock(time.time())}", "dim")
    statuses = "   ".join(f"{status} {count:,}" for status, count in sorted(counts["rollouts_by_status"].items()) if count)
    oldest = counts["oldest_claimable_age_seconds"]
    waiting = f"{counts['claimable']:,} can be claimed" + (f", the first for {oldest:,.0f} s" if oldest is not None else "")
    parts: list[RenderableType] = [
        line,
        Text(statuses or "no rollout yet"),
        Text(f"{waiting}   finished {per_second(rate(now, before, 'finished'))}   spans {per_second(rate(now, before, 'accepted'))}"),
    ]
    parts += [Text(plain(f"{service} {why}", 400), "bold red") for service, why in sorted(now.down.items())]
    parts += [_collector(each) for each in now.collectors] or [Text("no collector has registered", "yellow")]
    there = [each for each in now.workers[:WORKERS] if not _is_gone(each)]
    gone = counts["total_workers"] - len(there) if len(there) < len(now.workers) else 0
    title = f"workers ({counts['total_workers']:,}" + (f", {gone:,} of them gone: `agl-otel workers ls`)" if gone else ")")
    parts.append(table_of(title, _WORKER, [_worker(each) for each in there]))
    if now.ended:
        rows = [(each.rollout_id, each.status, clock(each.end_time), each.mode, each.input) for each in now.ended]
        parts.append(table_of("ended last", ("rollout", "status", "at", "mode", "input"), rows))
    return Group(*parts)


def per_second(value: float | None) -> str:
    """Format a rate."""
    return "-" if value is None else f"{value:,.1f}/s"


_WORKER: Final = ("worker", "status", "runs", "cpu %", "memory %", "heard", "rollout")


def _is_gone(worker: Worker) -> bool:
    return time.time() - (worker.last_heartbeat_time or math.inf) > UNRESPONSIVE_SECONDS


def _worker(worker: Worker) -> tuple[object, ...]:
    stats = worker.heartbeat_stats or {}
    places = f"{stats['running']} of {stats['concurrency']}" if {"running", "concurrency"} <= stats.keys() else None
    return (
        worker.worker_id,
        worker.status,
        places,
        stats.get("cpu_usage_pct"),
        stats.get("mem_pct"),
        clock(worker.last_heartbeat_time),
        worker.current_rollout_id,
    )


def _collector(found: Mapping[str, Any]) -> Text:
    if "error" in found:
        return Text(f"collector {found['address']}: {plain(found['error'], 200)}", "red")
    metrics, disk = found["metrics"], found["disk"]

    def value(name: str) -> float:
        return sum(point["value"] for point in metrics.get(PREFIX + name, ()))

    backlog, log = value("backlog"), value("log_bytes") / (1 << 20)
    trouble, warning = trouble_of(found), disk["message"] if disk["level"] == "warning" else ""
    style = "bold red" if trouble else "yellow" if warning else ""
    why = f": {plain(trouble or warning, 400)}" if trouble or warning else ""
    state = "degraded" if trouble else "warning" if warning else "ok"
    return Text(f"collector {found['address']}: {backlog:,.0f} rows wait in a log of {log:,.1f} MiB, {state}{why}", style)
