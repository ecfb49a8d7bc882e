"""`agl-otel train JOB.toml`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from agl_otel.cli.common import data_dir_option, json_option, print_json, run_async, setup_logging, store_option
from agl_otel.cli.live import LiveSteps
from agl_otel.errors import SettingsError
from agl_otel.settings import Settings


@click.command()
@click.argument("job_file", type=click.Path(path_type=Path), metavar="JOB.toml")
@data_dir_option
@store_option
@json_option
def train(job_file: Path, data_dir: Path | None, store: str | None, as_json: bool) -> None:
    """Train what JOB.toml describes: score, train, score again.

    Uses the stack at --store or AGL_STORE; without one it starts a stack on --data-dir for as long as it trains. The run is kept
    in runs/<time> below the data directory: the policy, metrics.jsonl, logs. examples/first_light/job.toml is a job to start from.
    """
    setup_logging()
    settings = Settings.load(data_dir=data_dir, store=store)
    console = Console(stderr=as_json, highlight=False)
    result = run_async(lambda: _train(job_file, settings, console))
    if as_json:
        print_json(result)


async def _train(job_file: Path, settings: Settings, console: Console) -> dict[str, Any]:
    try:
        from agl_otel.trainer import Job, Training
    except ModuleNotFoundError as error:
        raise SettingsError(f"training needs the [train] extra ({error.name} is missing): pip install 'agl-otel[train]'") from error
    from agl_otel.stack import stack_for

    job = Job.load(job_file)
    train_tasks, val_tasks = job.tasks("train"), job.tasks("val")
    folder = settings.data_dir.absolute() / "runs" / time.strftime("%Y%m%d-%H%M%S")
    async with stack_for(settings) as (store, failed), Training(job, store, folder, stack_failed=failed) as training:
        await training.publish_policy()
        async with training.runners():
            before = await training.evaluate(val_tasks)
            console.print(f"score before: {before.score:.3f} on {len(val_tasks)} tasks")
            with LiveSteps(console) as live:
                report = await training.fit(train_tasks, on_step=live.add)
            after = await training.evaluate(val_tasks)
    console.print(
        f"score after: {after.score:.3f}  ({len(report.steps)} steps: {report.stopped_because})\nkept in {folder}", soft_wrap=True
    )
    return {
        "score_before": before.score,
        "score_after": after.score,
        "steps": len(report.steps),
        "stopped_because": report.stopped_because,
        "trajectories": sum(step.trajectories for step in report.steps),
        "folder": str(folder),
    }
