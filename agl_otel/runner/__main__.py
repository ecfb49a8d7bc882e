"""`python -m agl_otel.runner --function path:fn` or `… -- COMMAND`: run agents until SIGTERM.

Exit codes: 0 stopped in order or `--max-rollouts` done; 1 no stack answers; 2 used wrongly.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from typing import Any

import click

from agl_otel.errors import AglError, UsageError
from agl_otel.runner.agents import CommandAgent, FunctionAgent, load_function
from agl_otel.runner.job import Agent
from agl_otel.runner.process import run_runner
from agl_otel.runner.running import RunnerEvent
from agl_otel.settings import Settings
from agl_otel.types import RolloutMode


def build_agent(
    command: tuple[str, ...], function: str | None, grader: str | None, instrument: bool | None = None
) -> Agent | Callable[[], Agent]:
    """The agent that the options ask for; a function's code is loaded later, in the environment that names the stack (run_runner).

    Raises UsageError where the options name none or two, or one that cannot be run.
    """
    if bool(command) == bool(function):
        raise UsageError("give one agent: --function path/to/file.py:function, or a command after `--`")

    def load() -> Agent:
        return FunctionAgent(load_function(function or ""), grader=load_function(grader) if grader else None)

    if function:
        return load
    return CommandAgent(command, grader=load_function(grader) if grader else None, instrument="auto" if instrument is None else instrument)


def print_event(event: RunnerEvent) -> None:
    """One line for each attempt that is done with."""
    if event.kind == "ended":
        why = f": {event.error.strip().splitlines()[-1]}" if event.error else ""
        click.echo(f"{event.outcome:<10} {event.rollout_id} {event.attempt_id} {event.seconds:.2f} s{why}")


@click.command("runner")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option("--function", help="Agent: path/to/file.py:function or package.module:function.")
@click.option("--grader", help="Grader of the answers: path/to/file.py:function, called with (task, answer).")
@click.option("--concurrency", default=8, show_default=True, type=click.IntRange(min=1), help="How many attempts run at once.")
@click.option("--max-rollouts", type=click.IntRange(min=1), help="Stop after so many.")
@click.option(
    "--mode", "modes", multiple=True, type=click.Choice(["train", "val", "test"]), help="Only rollouts of this mode; may be repeated."
)
@click.option("--store", default="", help="Address of the stack (host:port); default AGL_STORE, else the local queue.")
@click.option("--worker-id", help="Name of this runner; default made of host and process.")
@click.option(
    "--instrument/--no-instrument", default=None, help="Run a Python command under opentelemetry-instrument (default: where installed)."
)
def runner(
    command: tuple[str, ...],
    function: str | None,
    grader: str | None,
    instrument: bool | None,
    modes: tuple[RolloutMode, ...],
    **options: Any,
) -> None:
    """Claim rollouts and run an agent for each: a Python function, or a COMMAND after `--`.

    In COMMAND `{question}` is filled from the task; what it prints is the answer that the grader gets.
    """
    logging.basicConfig(level=Settings.load().log_level, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    agent = build_agent(command, function, grader, instrument)
    counts = asyncio.run(run_runner(agent, modes=modes, on_event=print_event, **options))
    click.echo(", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "nothing was claimed")


if __name__ == "__main__":
    try:
        runner()
    except AglError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2 if isinstance(error, UsageError) else 1)
