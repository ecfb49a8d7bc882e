"""`agl-otel run -- COMMAND`: one attempt, then its trace as a tree."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import click

from agl_otel.cli.attempt_checks import wrong_in
from agl_otel.cli.common import data_dir_option, json_option, own_command, run_async, settings_for, setup_logging, store_option
from agl_otel.cli.environment_checks import important, inspect_environment
from agl_otel.cli.once import run_once
from agl_otel.cli.output import open_console, print_findings
from agl_otel.cli.traces import show_rollout
from agl_otel.errors import AgentError, UsageError
from agl_otel.runner.injection import inject_option
from agl_otel.runner.job import Grader, check_grader
from agl_otel.service.loading import load_function
from agl_otel.types.options import Finite
from agl_otel.types.strict import strict_json, why_no_json


@click.command()
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--task", default="{}", help="The task as JSON; its fields fill {placeholders} in COMMAND.")
@click.option("--timeout", "timeout_seconds", type=Finite(min=0, min_open=True), help="End the command after so many seconds.")
@inject_option
@data_dir_option
@store_option
@json_option
def run(
    command: tuple[str, ...],
    task: str,
    timeout_seconds: float | None,
    inject: bool,
    data_dir: Path | None,
    store: str | None,
    as_json: bool,
) -> None:
    """Run COMMAND once as an attempt of its own, then show its trace as a tree.

    \b
      agl-otel run -- python my_agent.py "What is 2 + 2?"

    COMMAND runs unmodified; its Python processes load the hook where they have OpenTelemetry's SDK. Its model calls go through the
    proxy to OPENAI_BASE_URL, else to the models of the running stack, else to OpenAI, with OPENAI_API_KEY. No other runner claims it,
    and no other rollout uses its model. Everything is stored in --data-dir. Ctrl-C ends the command and cancels its rollout; if `run`
    itself is killed, the rollout fails after 60 seconds of silence, or when the data directory is next opened after that.

    What prevents training is marked ✗ below the tree, on standard error. The exit code is of COMMAND alone: 0 if it ended well, also
    beside a ✗, and 1 if it failed. `agl-otel doctor -- COMMAND` exits with 3 for a ✗.
    """
    setup_logging()
    settings = settings_for(data_dir, store)

    async def main() -> None:
        seen = important(inspect_environment(command, os.environ, settings, with_packages=False))
        running = run_once(settings, command, by="run", task=parse_task(task), timeout_seconds=timeout_seconds, inject=inject)
        async with running as (opened, once):
            await show_rollout(opened, once.rollout.rollout_id, as_json=as_json, console=open_console(highlight=False))
            if not as_json and await opened.reader.printed(once.rollout.rollout_id):
                where = ["--data-dir", str(data_dir)] if data_dir is not None else ["--store", store] if store else []
                click.echo(f"what it printed: `{shlex.join([own_command(), 'rollouts', 'show', once.rollout.rollout_id, *where])}`")
            found = [*seen, *wrong_in(once)]
            print_findings(open_console(stderr=True, highlight=False), found)
            if once.rollout.status == "succeeded" and any(finding.state == "wrong" for finding in found):
                click.echo(
                    "the command ended well, so `run` exits with 0; what ✗ marks prevents training, and `doctor` exits with 3", err=True
                )
            if once.rollout.status != "succeeded":
                raise AgentError(f"rollout {once.rollout.rollout_id} {once.rollout.status}: {once.rollout.attempt.error}")

    run_async(main)


def load_grader(reference: str | None) -> Grader | None:
    """Load the function of --grader. Raises UsageError."""
    if reference is None:
        return None
    grader = load_function(reference)
    check_grader(grader)
    return grader


def parse_task(text: str) -> object:
    """Parse --task. Raises UsageError if it is not JSON."""
    try:
        return strict_json(text)
    except ValueError as error:
        raise UsageError(f'--task is not JSON ({why_no_json(error)}): write for example --task \'{{"question": "2 + 2?"}}\'') from error
