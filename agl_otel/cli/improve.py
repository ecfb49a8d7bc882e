"""`agl-otel improve JOB.toml`: learn from a running product's traffic, and let the better weights or prompts answer its users."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Any

import click

from agl_otel.cli.common import Folder, data_dir_option, json_option, own_command, print_json, run_async, setup_logging, store_option
from agl_otel.cli.job_check import tell_check
from agl_otel.cli.output import open_console
from agl_otel.errors import UnavailableError
from agl_otel.settings import Settings
from agl_otel.types.options import Whole


@click.command()
@click.argument("job_file", type=click.Path(path_type=Path), metavar="JOB.toml")
@data_dir_option
@store_option
@click.option("--run-dir", type=Folder(), help="The run's folder.  [default: runs/<time> in the data directory]")
@click.option("--cycles", type=Whole(1), metavar="N", help="End after N cycles, those of before a stop included.  [default: never]")
@click.option("--force", is_flag=True, help="Resume a run that was begun with another agent, grader or algorithm.")
@click.option("--check", is_flag=True, help="List all errors in the job, and start nothing; exit code 2 if there are any.")
@json_option
def improve(
    job_file: Path,
    data_dir: Path | None,
    store: str | None,
    run_dir: Path | None,
    cycles: int | None,
    force: bool,
    check: bool,
    as_json: bool,
) -> None:
    """Learn from the rewards of a running product's users, and give them the better weights, or the better prompts.

    Calls of no rollout that reach the stack's proxy are answered by the promoted weights, and their traces are adopted
    (AGL_UNIDENTIFIED=adopt). When [improve] `attempts` of them have a reward, a cycle begins: they are trained on (grpo or sft, with the
    options of [algorithm]), a gate asks what speaks against the new weights (held-out tasks, a back-test, drift, alarms of exploited
    rewards), a canary answers a share of the conversations, or greater ones step by step, and by its rewards the weights are promoted or
    rolled back.

    With a search for prompts (apo, gepa, random_search) the product asks for the prompts of each conversation (docs/improving.md). The
    search runs on tasks that are made of the traffic, and the gate asks the held-out tasks alone.

    Start it again with the same --run-dir to go on: whatever had ended is not repeated, and nothing is promoted twice. While it is not
    running, the policy does not answer; prompts stay as they were. With --check nothing is started, as by `agl-otel train --check`.
    """
    setup_logging()
    settings = Settings.load(data_dir=data_dir, store=store)
    console = open_console(stderr=as_json, highlight=False)
    if check:
        tell_check(job_file, settings, console, as_json=as_json, improves=True)
        return
    folder = (run_dir or settings.data_dir / "runs" / time.strftime("%Y%m%d-%H%M%S")).resolve()
    where = ["--store", store] if store else ["--data-dir", str(data_dir)] if data_dir else []

    def interrupted() -> None:
        bounded = ["--cycles", str(cycles)] if cycles else []
        again = shlex.join([own_command(), "improve", str(job_file), "--run-dir", str(folder), *bounded, *where])
        if folder.exists():
            click.echo(f"to go on: {again}", err=True)

    def say(line: str) -> None:
        console.print(line, soft_wrap=True, markup=False, highlight=False)

    async def main() -> dict[str, Any]:
        click.echo(f"reading {job_file}: its agent, tasks and model …", err=True)
        from agl_otel.jobs.check import checked_job
        from agl_otel.jobs.improve import improvement_of
        from agl_otel.stack.sharing import store_for

        job, warnings = checked_job(job_file)
        for warning in warnings:
            click.echo(f"warning: {warning}", err=True)
        kind = improvement_of(job)
        say(f"the run's folder is {folder}; {'connecting to' if settings.store else 'starting'} the stack, then what answers users …")
        async with (
            store_for(settings) as (opened, failed),
            kind(job, opened, folder, stack_failed=failed, settings=settings, force=force, on_event=say) as loop,
        ):
            served = f"{settings.upstream_resources}@{loop.production.version}"
            say(f"run {loop.run_id}: users are answered by {loop.promoted} (resources {served})")
            ended = await loop.improve(cycles)
            say(f"{cycles} cycles have ended; {loop.while_away}")
            cycles_done = [{"cycle": each.number, "verdict": each.verdict, "why": each.why} for each in ended]
            return {"run": loop.run_id, "folder": str(folder), "promoted": str(loop.promoted), "cycles": cycles_done}

    try:
        result = run_async(main, killed=interrupted)
    except (KeyboardInterrupt, UnavailableError):
        interrupted()
        raise
    if as_json:
        print_json(result)
