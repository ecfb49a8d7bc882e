"""`agl-otel select`: choose attempts from traces, and keep them as a table with a name, versions and a digest."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any, Final, get_args

import click

from agl_otel.adapters.batches import LEFT_OUT
from agl_otel.cli.common import data_dir_option, json_option, print_json, run_async, settings_for, setup_logging, store_option
from agl_otel.cli.output import counted, moment
from agl_otel.cli.queue import reading, span_of_time
from agl_otel.cli.selections import Taken, gone_lines
from agl_otel.cli.training_files import check_target, writing_rows
from agl_otel.cli.training_steps import run_id_of
from agl_otel.errors import UsageError, writing
from agl_otel.jobs.select import Choice
from agl_otel.jobs.select import select as choose
from agl_otel.stack.sharing import open_store
from agl_otel.text import json_text, printable
from agl_otel.types import RolloutMode
from agl_otel.types.options import Finite, Whole
from agl_otel.types.selections import Selected

SHOWN: Final = 20
"""Clusters that are shown."""


@click.command()
@click.argument("name", metavar="NAME")
@click.option("--all", "everything", is_flag=True, help="All attempts that have ended.")
@click.option("--sql", metavar="QUERY", help="A read-only query for the column RolloutId, and maybe AttemptId and Value.")
@click.option(
    "--over",
    "modes",
    multiple=True,
    type=click.Choice(get_args(RolloutMode)),
    help="Only these modes (repeatable): production is adopted traffic.  [default: all but val and test]",
)
@click.option("--run", metavar="RUN", help="Only the rollouts of this run: its id, or its folder.")
@click.option("--since", metavar="SPAN", help="Only rollouts that began at most so long ago: 12h, 7d, 2w.")
@click.option("--reward", metavar="NAME", help="The reward dimension to use.  [default: the primary one]")
@click.option("--failed", is_flag=True, help="Only what failed, by cluster: no success, or a verdict that training does not take.")
@click.option("--below", type=Finite(), metavar="REWARD", help="With a lower reward, too, it failed.")
@click.option("--cluster", "clusters", multiple=True, metavar="TEXT", help="Only failures whose cluster has this in its name (repeatable).")
@click.option("--per-cluster", type=Whole(1), metavar="N", help="At most N attempts of a cluster.")
@click.option(
    "--near", type=Finite(0, 1, min_open=True), metavar="SHARE", help="Leave out tasks that are so much like an earlier one, as in 0.8."
)
@click.option("--per-task", type=Whole(1), metavar="N", help="At most N attempts at a task.")
@click.option("--by-value", is_flag=True, help="Those that teach most come first: the variance of the rewards at their task.")
@click.option("--top", type=Whole(1), metavar="N", help="At most N attempts.")
@click.option("--to", "target", type=click.Path(path_type=Path), metavar="FILE", help="Write the table to this .jsonl or .parquet, too.")
@click.option("--dry-run", is_flag=True, help="Store nothing: show what would be selected.")
@data_dir_option
@store_option
@json_option
def select(
    name: str,
    everything: bool,
    run: str | None,
    since: str | None,
    target: Path | None,
    dry_run: bool,
    data_dir: Path | None,
    store: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Choose attempts from traces, and keep them as the selection NAME, or as the next version of it.

    Of each rollout that has ended the latest attempt is read. The options narrow this down in the order in which they are listed. Without
    any of them nothing is selected: the selection NAME, or NAME@VERSION, that is stored is shown.

    `agl-otel export`, `judge` and `backtest` take --selection NAME, a job's [algorithm] selection = "NAME", and the page /review shows it.
    """
    setup_logging()
    if target is not None:
        if target.suffix not in (".jsonl", ".parquet"):
            raise UsageError(f"{target.name} is neither .jsonl nor .parquet: the ending selects the format")
        check_target(target, replace=False)
    began = time.time() - span_of_time(since) if since is not None else None
    given["failed"] = given["failed"] or given["below"] is not None or bool(given["clusters"]) or given["per_cluster"] is not None
    choice = Choice(run=run_id_of(run) if run is not None else None, since=began, **given)
    options = choice.given()
    if everything and given["sql"] is not None:
        raise UsageError("--all and --sql both say which rollouts to take: give one")
    if dry_run and not (options or everything):
        raise UsageError("--dry-run needs options that select something, such as --all")
    settings = settings_for(data_dir, store)

    async def main() -> dict[str, Any]:
        async with open_store(settings) as opened:
            if not (options or everything):
                selection = await opened.selection(name)
                report = {**Taken(selection, await opened.gone(selection)).report(), "made": selection.made}
                return _report(report, selection.rows, target)
            with reading("reading what failed", silent=as_json) as on_read:
                chosen = await choose(opened, choice, on_read=on_read)
            made = {"time": time.time(), "options": options, "read": chosen.read, "left_out": dict(chosen.left_out)}
            if dry_run or not chosen.rows:
                return _report({"selection": None, "made": made, "gone": {}}, chosen.rows, target)
            selection = await opened.put_selection(name, chosen.rows, made)
            return _report({**Taken(selection, []).report(), "made": made}, selection.rows, target)

    report = run_async(main)
    print_json(report) if as_json else _show(report, dry_run=dry_run)
    if not report["attempts"]:
        raise SystemExit(1)


def _report(report: dict[str, Any], rows: list[Selected], target: Path | None) -> dict[str, Any]:
    """Add the figures of the rows to a report, and write them to the target."""
    if target is not None:
        with writing(str(target)), writing_rows(target) as write:
            write([row.model_dump() for row in rows])
    clusters = Counter(row.cluster for row in rows if row.cluster)
    return {**report, "attempts": len(rows), "clusters": dict(clusters.most_common()), "file": target and str(target)}


def _show(report: dict[str, Any], *, dry_run: bool) -> None:
    made: dict[str, Any] = report["made"]
    what = counted(report["attempts"], "attempt")
    if report["selection"] is not None:
        click.echo(f"{printable(report['selection'])}: {what}, of {counted(made['read'], 'rollout')} read {moment(made['time'])}")
        click.echo(f"digest: {report['digest']}")
    else:
        click.echo(f"{what} of {counted(made['read'], 'rollout')}{'; nothing was stored' if dry_run else ': nothing is selected'}")
    if options := made["options"]:
        click.echo(f"options: {json_text(options)}")
    left_out: dict[str, int] = made["left_out"]
    for why in sorted(left_out, key=list(LEFT_OUT).index):
        click.echo(f"  {left_out[why]:,} left out: {LEFT_OUT[why]}")
    for line in gone_lines(report):
        click.echo(line)
    if clusters := [*report["clusters"].items()]:
        click.echo("what failed, by the number of attempts:")
        for cluster, count in clusters[:SHOWN]:
            click.echo(f"  {count:>6,}  {printable(cluster)}")
        if len(clusters) > SHOWN:
            click.echo(f"  and {len(clusters) - SHOWN:,} clusters more, which --json has")
    if report["file"]:
        click.echo(f"wrote the table to {report['file']}")
