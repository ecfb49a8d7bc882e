"""`agl-otel demo`: train the example agent end to end on this machine.

Presentation only: Stack and GRPORun do the work, as under `agl-otel up` and `agl-otel train`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console

from agl_otel.cli.common import (
    Folder,
    clickhouse_option,
    collector_option,
    json_option,
    own_command,
    print_json,
    run_async,
    setup_logging,
    warn_of_passwords,
)
from agl_otel.cli.output import open_console
from agl_otel.cli.traces import show_rollout
from agl_otel.errors import AglError, SettingsError
from agl_otel.settings import Settings
from agl_otel.types.options import Whole

SHOWN_TASKS: Final = 4
REACHED: Final = 0.9
EXAMPLE: Final = Path("examples/first_light/job.toml")


@click.command()
@click.option("--target", type=Whole(0, 3), default=1, show_default=True, help="Which of the four behaviours is rewarded.")
@click.option("--seed", type=Whole(), default=0, show_default=True, help="Seed of the policy, the sampling and the order of the tasks.")
@click.option(
    "--shuffle-rewards", is_flag=True, help="Control experiment: shuffle the rewards within each step. Nothing should be learned."
)
@click.option("--max-steps", type=Whole(1), help="Stop after so many steps, whatever the score.")
@click.option("--stay", is_flag=True, help="Keep the stack with its dashboard afterwards, until Ctrl+C.")
@click.option("--data-dir", type=Folder(), help="Folder of all data.  [default: .agl/demo-<time>]")
@clickhouse_option
@collector_option
@json_option
def demo(
    target: int, seed: int, shuffle_rewards: bool, max_steps: int | None, stay: bool, data_dir: Path | None, as_json: bool, **flags: Any
) -> int:
    """Train an unmodified agent from its own traces, on this machine.

    Starts its own stack on free ports, makes a tiny model, runs the agent, trains it with GRPO, and runs it again. No GPU, no key, no
    network. Needs the [train] extra.
    """
    setup_logging()
    warn_of_passwords(flags)
    console = open_console(stderr=as_json, highlight=False)
    folder = data_dir or Path(".agl") / time.strftime("demo-%Y%m%d-%H%M%S")
    algorithm: dict[str, Any] = {"shuffle_rewards": shuffle_rewards} | ({"max_steps": max_steps} if max_steps else {})
    overrides = {"data": {"options": {"target": target}}, "policy": {"seed": seed}, "algorithm": algorithm}
    must_learn = not (shuffle_rewards or max_steps)

    def ended(result: dict[str, Any], dashboard: str | None) -> None:
        _closing(result, folder, console, dashboard)
        if as_json:
            print_json(result)
        if must_learn and result["score_after"] < REACHED:
            raise AglError(
                f"the agent did not learn the task: {result['score_after']:.2f} after {result['steps']} steps, expected at least {REACHED}"
            )

    run_async(lambda: _demo(folder, overrides, console, flags, ended, stay))
    return 0


async def _demo(
    folder: Path,
    overrides: dict[str, dict[str, Any]],
    console: Console,
    flags: dict[str, Any],
    ended: Callable[[dict[str, Any], str | None], None],
    stay: bool,
) -> None:
    started = time.monotonic()
    try:
        import_module("agl_otel.algorithms.grpo.algorithm")  # with torch: looked for before anything is started
        from agl_otel.jobs.job import Job
    except ModuleNotFoundError as error:
        remedy = "pip install 'agl-otel[train]'; with uvx: uvx --find-links FOLDER_OF_WHEELS --from 'agl-otel[train]' agl-otel demo"
        raise SettingsError(f"the demo needs the [train] extra ({error.name} is missing): {remedy}") from error
    job = Job.load(example_job(), overrides=overrides)
    settings = Settings.private(data_dir=folder, **flags)
    async with _started(settings, job, console) as run:
        result = await run.play()
        result["seconds"] = round(time.monotonic() - started, 1)
        if stay:
            ended(result, run.stack.addresses()["web"])
            await run.stack.failed
    ended(result, None)


def example_job() -> Path:
    """Return the demo's job file: below the current folder, in the checkout this package is installed from, or in its wheel."""
    package = Path(__file__).resolve().parents[1]
    return next(base / EXAMPLE for base in (Path(), package.parent, package) if (base / EXAMPLE).exists())


@asynccontextmanager
async def _started(settings: Settings, job: Any, console: Console) -> AsyncGenerator[_Demo]:
    """Start the stack, a store over it and the training run, with a line for each; stop them at the end of the context."""
    from agl_otel.jobs.grpo import GRPORun
    from agl_otel.stack.supervisor import Stack
    from agl_otel.store import Store

    with console.status("starting queue, collector, proxy and web …"):
        stack = Stack(settings)
        await stack.__aenter__()
    try:
        console.print(f"[bold]1.[/] The stack is up: queue {stack.address}, data in {settings.data_dir}")
        async with await Store.connect(stack.address) as store, AsyncExitStack() as begun:
            with console.status("making a tiny model and its server …"):
                folder = settings.data_dir.absolute() / "run"
                training = await begun.enter_async_context(GRPORun(job, store, folder, stack_failed=stack.failed, settings=settings))
            console.print(f"[bold]2.[/] A 0.2 M-parameter Llama is made and served at {training.server_url}")
            yield _Demo(stack, store, training, console)
    finally:
        await stack.__aexit__(None, None, None)


class _Demo:
    """The parts of the demo, over a running stack and training."""

    def __init__(self, stack: Any, store: Any, training: Any, console: Console) -> None:
        self.stack, self.store, self.training, self.console = stack, store, training, console
        self.tasks: list[Any] = training.job.tasks("val")
        self.verdicts: Counter[str] = Counter()
        self.rollouts = 0
        self.spans = 0

    async def play(self) -> dict[str, Any]:
        """Run the agent before training, train, and run it after; return the figures."""
        show = partial(self.console.print, soft_wrap=True)
        training = self.training
        await training.publish_policy()
        show("[bold]3.[/] The agent before training, unmodified, as a command under opentelemetry-instrument:")
        await self._commands(step=0)
        async with training.runners(mode=None):
            before = self._scored("before", await self._waiting(training.validate_before()))
            show("[bold]4.[/] GRPO trains it from its traces:")
            report = await self._train()
            after = self._scored("after", await self._waiting(training.validate_after(len(report.steps))))
        show("[bold]5.[/] The unmodified command once more:")
        await self._commands(step=len(report.steps))
        return await self._result(before, report, after)

    async def _commands(self, *, step: int) -> None:
        tasks = self.tasks[:SHOWN_TASKS]
        async with self.training.runners(command=True, mode="test"):
            done = await self.training.evaluate(tasks, mode="test", run_id=self.training.run.run_id, step=step)
        self._count(done)
        for task, reward in zip(tasks, done.rewards, strict=True):
            mark = "[green]✓[/]" if reward == 1 else "[red]✗[/]"
            self.console.print(f"   {mark} {task['question']!r} expects {task['expected']}: reward {reward}")
        await show_rollout(self.store, done.rollout_ids[0], console=self.console)

    async def _waiting(self, evaluation: Awaitable[Any]) -> Any:
        with self.console.status(f"scoring {len(self.tasks)} held-out tasks …"):
            return await evaluation

    def _scored(self, when: str, done: Any) -> Any:
        self._count(done)
        self.console.print(f"   score {when} training: [bold]{done.scored.described()}[/]", soft_wrap=True)
        return done

    def _count(self, done: Any) -> None:
        self.rollouts += len(done.rollout_ids)
        self.spans += done.spans
        self.verdicts += done.verdicts

    async def _train(self) -> Any:
        from agl_otel.cli.live import LiveSteps

        with LiveSteps(self.console) as live:
            report = await self.training.fit(self.training.job.tasks("train"), on_step=live.add)
        for step in report.steps:
            self.rollouts += step.rollouts
            self.spans += step.spans
            self.verdicts += Counter(step.verdicts)
        self.console.print(f"   {len(report.steps)} steps: {report.stopped_because}")
        return report

    async def _result(self, before: Any, report: Any, after: Any) -> dict[str, Any]:
        from agl_otel.cli.plot import plot_rewards
        from agl_otel.jobs.audit import compare_with_record, count_trajectories

        record = await compare_with_record(self.store, self.training.record)
        trained = [rollout.rollout_id for rollout in await self.store.queue.query_rollouts(mode_in=["train"])]
        job = self.training.job
        return {
            "score_before": round(before.score, 4),
            "score_after": round(after.score, 4),
            "without_reward_before": before.scored.missing,
            "without_reward_after": after.scored.missing,
            "steps": len(report.steps),
            "rollouts": self.rollouts,
            "trajectories": sum(step.trajectories for step in report.steps),
            "trajectories_in_clickhouse": await count_trajectories(self.store, trained),
            "spans": self.spans,
            "verdicts": dict(self.verdicts),
            "max_ratio_error": max(step.max_ratio_error for step in report.steps),
            "calls_equal_to_model_server": record.equal,
            "calls_not_equal": record.different + record.unknown + record.not_stored,
            "target": job.data.options["target"],
            "seed": job.policy.seed,
            "shuffle_rewards": bool(job.algorithm.get("shuffle_rewards")),
            "tasks_scored": len(self.tasks),
            "plot": str(self._plot(report, plot_rewards)),
            "data_dir": str(self.stack.data_dir),
            "rollout_shown": after.rollout_ids[0],
        }

    def _plot(self, report: Any, plot: Any) -> Path:
        return plot(
            [step.reward_mean for step in report.steps], self.stack.data_dir / "reward.png", title="agl-otel demo: mean reward by step"
        )


def _closing(result: dict[str, Any], data_dir: Path, console: Console, dashboard: str | None = None) -> None:
    """Print the result; with the `dashboard` of a stack that stays, else with the command that shows it."""
    missing = [result["without_reward_before"], result["without_reward_after"]]
    without = "; without a reward, which count as 0: {} before, {} after".format(*missing) if any(missing) else ""
    score = f"[bold]{result['score_before']:.2f} → {result['score_after']:.2f}[/] on {result['tasks_scored']} held-out tasks{without}"
    rows: Sequence[tuple[str, str]] = (
        ("score", score),
        (
            "trained on",
            f"{result['trajectories']} trajectories in {result['steps']} steps; ClickHouse says {result['trajectories_in_clickhouse']}",
        ),
        ("token ids", f"{result['calls_equal_to_model_server']} calls equal to the model server's record, {result['calls_not_equal']} not"),
        ("log-probs", f"greatest |ratio − 1| at a first update: {result['max_ratio_error']:.1e}"),
        ("observed", f"{result['rollouts']} rollouts, {result['spans']} spans, verdicts {result['verdicts']}"),
        ("reward plot", result["plot"]),
        ("data", f"{result['data_dir']}   ({result['seconds']:.0f} s)"),
    )
    console.print()
    for name, text in rows:
        console.print(f"   {name:12} {text}", soft_wrap=True)
    console.print("\nNext:")
    if dashboard is None:
        address = f"http://127.0.0.1:{Settings.model_fields['web_port'].default}/runs"
        console.print(f"   {own_command()} up --data-dir {data_dir}   (the dashboard at {address})", soft_wrap=True)
    console.print(f"   {own_command()} rollouts --data-dir {data_dir}", soft_wrap=True)
    console.print(f"   {own_command()} traces show {result['rollout_shown']} --data-dir {data_dir}", soft_wrap=True)
    if dashboard is not None:
        console.print(f"\n   dashboard    {dashboard}/runs   (until Ctrl+C)", soft_wrap=True)
