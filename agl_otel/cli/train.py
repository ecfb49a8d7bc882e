"""`agl-otel train JOB.toml`: run a training job."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from agl_otel.adapters.losses import cut_replies
from agl_otel.cli.common import Folder, data_dir_option, json_option, own_command, print_json, run_async, setup_logging, store_option
from agl_otel.cli.job_check import tell_check
from agl_otel.cli.live import LiveSteps
from agl_otel.cli.output import open_console
from agl_otel.cli.progress_lines import rollout_progress, step_progress
from agl_otel.errors import TrainingError, UnavailableError
from agl_otel.settings import Settings
from agl_otel.store import Store
from agl_otel.text import printable_lines

if TYPE_CHECKING:
    from agl_otel.algorithms.sft.report import RoundReport
    from agl_otel.algorithms.validation import Validation
    from agl_otel.jobs.job import Job
    from agl_otel.jobs.run import TaskResults
    from agl_otel.jobs.served import ServedRun


@click.command()
@click.argument("job_file", type=click.Path(path_type=Path), metavar="JOB.toml")
@data_dir_option
@store_option
@click.option("--run-dir", type=Folder(), help="The run's folder.  [default: runs/<time> in the data directory]")
@click.option("--force", is_flag=True, help="Resume a run that was begun with another agent, grader or algorithm.")
@click.option("--check", is_flag=True, help="List all errors in the job, and start nothing; exit code 2 if there are any.")
@json_option
def train(job_file: Path, data_dir: Path | None, store: str | None, run_dir: Path | None, force: bool, check: bool, as_json: bool) -> None:
    """Run the job in JOB.toml: score, train, score again (or run its agent alone, or your own algorithm).

    Uses the stack at --store or AGL_STORE; without one it starts a stack on --data-dir for the duration of the training. The run has a
    folder: run.json with its id and configuration, metrics.jsonl, logs; if weights are trained, the policy and checkpoints. Jobs to
    start from: examples/first_light/job.toml, examples/apo/job.toml and, for your own algorithm, examples/tutorial/job.toml.

    To resume a run, start it again with its --run-dir and its data directory or store. Finished work is not repeated: grpo, sft and verl
    continue after the last saved step, apo, gepa and random_search from their journal, baseline from the rollouts that succeeded. Your
    own algorithm gets the same run id and the lines it has written to metrics.jsonl from `run_folder`, and decides itself what to skip.
    A run that was begun with another agent, grader or algorithm of your own (the name, its file, or a module that the file imports from its
    own folder or the job's) is refused, and what has changed is listed. With --force it goes on, and run.json records since which step.

    With --check nothing is started: the job file, the files, functions, packages and models that it names, its tasks, and the store, if
    one is named or running, are checked, and all errors are listed at once. For grpo a table shows the memory that the trainer may need,
    against what its device has.
    """
    setup_logging()
    settings = Settings.load(data_dir=data_dir, store=store)
    console = open_console(stderr=as_json, highlight=False)
    if check:
        tell_check(job_file, settings, console, as_json=as_json)
        return
    folder = (run_dir or settings.data_dir / "runs" / time.strftime("%Y%m%d-%H%M%S")).resolve()

    where = ["--store", store] if store else ["--data-dir", str(data_dir)] if data_dir else []

    def interrupted() -> None:
        again = shlex.join([own_command(), "train", str(job_file), "--run-dir", str(folder), *where])
        if folder.exists():
            click.echo(f"to resume this run: {again}", err=True)

    try:
        result = run_async(lambda: _train(job_file, settings, folder, console, force), killed=interrupted)
    except (KeyboardInterrupt, TrainingError, UnavailableError):
        interrupted()
        raise
    look = shlex.join([own_command(), "runs", "show", str(folder), *where])
    console.print(f"to look at this run: {look}", soft_wrap=True, markup=False, highlight=False)
    if as_json:
        print_json(result)


async def _train(job_file: Path, settings: Settings, folder: Path, console: Console, force: bool) -> dict[str, Any]:
    from agl_otel.jobs.check import check_run_folder, checked_job

    job, warnings = checked_job(job_file)
    _echo([f"warning: {printable_lines(each)}" for each in warnings])
    check_run_folder(job, folder, force=force)
    run = {"prompts": _search, "sft": _tune, "verl": _on_verl, "grpo": _fit, "custom": _custom}[job.run_by.rpartition(".")[2]]
    click.echo(f"the run's folder is {folder}; {'connecting to' if settings.store else 'starting'} the stack …", err=True)
    return await run(job, settings, folder, console, force)


@asynccontextmanager
async def _stack(settings: Settings) -> AsyncGenerator[tuple[Store, asyncio.Future[None]]]:
    """Like `store_for`; prints a line on stderr once the stack answers, with the dashboard's address."""
    from agl_otel.stack.sharing import store_for

    async with store_for(settings) as (store, failed):
        web = store.description.web
        click.echo(f"the stack answers on {store.description.queue}" + (f", its dashboard on {web}/runs" if web else ""), err=True)
        yield store, failed


async def _scored_before(run: ServedRun, console: Console) -> TaskResults:
    async with _counted(run, "before", 0):
        found = await run.validate_before()
    console.print(f"score before: {found.scored.described()}")
    return found


async def _scored_after(run: ServedRun, report: Any, before: TaskResults, console: Console) -> dict[str, Any]:
    """Score the trained weights, name the best ones, and return the result of the run."""
    steps = len(report.steps)
    async with _counted(run, "after", steps):
        after = await run.validate_after(steps)
    console.print(f"score after: {after.scored.described()}  ({steps} step{'' if steps == 1 else 's'}: {report.stopped_because})")
    if (best := run.best) is not None:
        console.print(f"best score: {best.scored_weights.described(before.score)}", soft_wrap=True)
    return {
        "score_before": before.score,
        "score_after": after.score,
        "best_validation": None if best is None else asdict(best),
        "steps": steps,
        "stopped_because": report.stopped_because,
        "trajectories": sum(step.trajectories for step in report.steps),
        **_kept(run.folder, console),
    }


def _kept(folder: Path, console: Console) -> dict[str, Any]:
    """Print where the run's result is and how to use it, and return the same."""
    from agl_otel.algorithms.run_result import result_if_any

    found = result_if_any(folder)
    for line in [*(found.lines() if found is not None else ()), f"kept in {folder}"]:
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    return {"result": found.as_json() if found is not None else None, "folder": str(folder)}


def _counted(run: ServedRun, when: str, step: int) -> AbstractAsyncContextManager[None]:
    from agl_otel.jobs.served import validation_name

    prefix = f"ro-{run.run.run_id}-{validation_name(step)}-"
    return rollout_progress(run.store, f"scoring {when} the training", total=len(run.val_tasks), prefix=prefix)


async def _custom(job: Job, settings: Settings, folder: Path, console: Console, force: bool) -> dict[str, Any]:
    from agl_otel.algorithms import Baseline
    from agl_otel.jobs.custom import CustomRun

    train_tasks, val_tasks = job.tasks("train"), job.tasks("val") if job.data.val else None
    async with (
        _stack(settings) as (store, failed),
        CustomRun(job, store, folder, stack_failed=failed, settings=settings, force=force) as run,
    ):
        algorithm = await run.fit(train_tasks, val_tasks)
    result: dict[str, Any] = {}
    if isinstance(algorithm, Baseline):
        ended = algorithm.ended
        result |= {"rollouts": len(ended), "succeeded": sum(each.status == "succeeded" for each in ended), "score": algorithm.scores()}
        for mode, score in algorithm.scored().items():
            console.print(f"score in mode {mode}: {score.described()}")
        if ended and not result["succeeded"]:
            where = f"`{own_command()} rollouts show {ended[-1].rollout_id}`"
            console.print(f"none of {len(ended):,} rollouts succeeded: {where} shows why the last one failed", soft_wrap=True)
    return result | _kept(folder, console)


async def _search(job: Job, settings: Settings, folder: Path, console: Console, force: bool) -> dict[str, Any]:
    from agl_otel.jobs.prompts import PromptSearchRun

    train_tasks, val_tasks = job.tasks("train"), job.tasks("val")
    async with (
        _stack(settings) as (store, failed),
        PromptSearchRun(job, store, folder, stack_failed=failed, settings=settings, force=force) as searching,
    ):
        found = await searching.fit(train_tasks, val_tasks)
    best = {name: prompt.template for name, prompt in found.get_best_prompts().items()}
    console.print(f"best score: {found.best_score:.3f} on {len(val_tasks)} tasks  ({found.stopped_because})", soft_wrap=True)
    for name, template in best.items():
        console.print(f"{name}: {printable_lines(str(template))}", soft_wrap=True, markup=False)
    return {
        "best_score": found.best_score,
        "best": best,
        "stopped_because": found.stopped_because,
        **found.spend.described(),
        **_kept(folder, console),
    }


async def _tune(job: Job, settings: Settings, folder: Path, console: Console, force: bool) -> dict[str, Any]:
    from agl_otel.jobs.sft import SFTRun

    def show(done: RoundReport) -> None:
        notes = [f"; {kind} {words}" for kind, words in (("lost", done.losses), ("cut", cut_replies(done.replies_cut))) if words]
        console.print(f"round {done.step}: reward {done.reward_mean:.3f}, {done.kept} kept{''.join(notes)}", soft_wrap=True)

    async with (
        _stack(settings) as (store, failed),
        SFTRun(job, store, folder, stack_failed=failed, settings=settings, force=force) as tuning,
    ):
        _echo(tuning.described)
        await tuning.publish_policy()
        async with tuning.runners():
            before = await _scored_before(tuning, console)
            async with step_progress(store, tuning.run.run_id):
                report = await tuning.fit(job.tasks("train"), on_step=show, on_validation=_shown(console))
            return await _scored_after(tuning, report, before, console)


async def _on_verl(job: Job, settings: Settings, folder: Path, console: Console, force: bool) -> dict[str, Any]:
    from agl_otel.algorithms.verl.algorithm import summary_of
    from agl_otel.algorithms.verl.figures import ShownStep, is_step, validation_of
    from agl_otel.jobs.verl import VerlRun

    train_tasks, val_tasks = job.tasks("train"), job.tasks("val")

    def show(line: dict[str, Any]) -> None:
        if is_step(line):
            live.add(ShownStep.of(line))
        if (scored := validation_of(line)) is not None:
            console.print(f"   validation: {scored.described()}, after step {line['step']}", soft_wrap=True)

    async with (
        _stack(settings) as (store, failed),
        VerlRun(job, store, folder, stack_failed=failed, settings=settings, force=force) as run,
        run.runners(),
    ):
        with LiveSteps(console) as live:
            algorithm = await run.fit(train_tasks, val_tasks, on_step=show)
    return {**summary_of(algorithm.metrics), **_kept(folder, console)}


async def _fit(job: Job, settings: Settings, folder: Path, console: Console, force: bool) -> dict[str, Any]:
    from agl_otel.jobs.grpo import GRPORun

    async with (
        _stack(settings) as (store, failed),
        GRPORun(job, store, folder, stack_failed=failed, settings=settings, force=force) as training,
    ):
        _echo(training.described)
        await training.publish_policy()
        async with training.runners():
            before = await _scored_before(training, console)
            async with step_progress(store, training.run.run_id):
                with LiveSteps(console) as live:
                    report = await training.fit(job.tasks("train"), on_step=live.add, on_validation=_shown(console))
            return await _scored_after(training, report, before, console)


def _echo(lines: Sequence[str]) -> None:
    for line in lines:
        click.echo(line, err=True)


def _shown(console: Console) -> Callable[[Validation], None]:
    return lambda done: console.print(f"   validation: {done.scored.described()}, after step {done.step}", soft_wrap=True)
