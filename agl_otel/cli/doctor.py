"""`agl-otel doctor -- COMMAND`: check that the user's own agent sends everything that training needs, and name remedies if not."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import click

from agl_otel.cli.attempt_checks import examine
from agl_otel.cli.collector import statuses_of
from agl_otel.cli.common import data_dir_option, json_option, print_json, run_async, settings_for, setup_logging, store_option
from agl_otel.cli.environment_checks import check_environment, inspect_environment
from agl_otel.cli.findings import Finding, advice, good, wrong
from agl_otel.cli.model_server_check import check_model_server
from agl_otel.cli.once import run_once
from agl_otel.cli.output import open_console, print_findings
from agl_otel.cli.run import load_grader, parse_task
from agl_otel.errors import AglError, UsageError
from agl_otel.runner.injection import inject_option
from agl_otel.runner.job import Grader
from agl_otel.settings import Settings
from agl_otel.types.options import Finite

MISSING_EXIT_CODE: Final = 3


@click.command()
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--task", default="{}", help="The task as JSON; its fields fill {placeholders} in COMMAND.")
@click.option("--grader", metavar="FUNCTION", help="Give the reward by FILE.py:function, called with task and answer, as a runner does.")
@click.option(
    "--timeout",
    "timeout_seconds",
    type=Finite(min=0, min_open=True),
    default=120.0,
    show_default=True,
    help="Seconds the command may take.",
)
@inject_option
@data_dir_option
@store_option
@json_option
def doctor(
    command: tuple[str, ...],
    task: str,
    grader: str | None,
    timeout_seconds: float,
    inject: bool,
    data_dir: Path | None,
    store: str | None,
    as_json: bool,
) -> int:
    """Check with your own agent that everything training needs arrives, or name what is missing.

    \b
      agl-otel doctor -- python my_agent.py "What is 2 + 2?"

    First it looks around the agent: variables that switch telemetry off, versions, frameworks with their own telemetry, ports.
    Then it asks the model server for its models, runs COMMAND once, like `agl-otel run`, and checks its model calls, hook, spans, token
    ids, log-probs, sampling, reward and trajectories, and what training would refuse.

    \b
      ✓ good    ! advice    ✗ wrong: mend it    – not checked, because of an earlier ✗

    Exits with 3 if something is wrong. The rollout is a trial, which exports and training leave out.
    """
    setup_logging()
    settings, given_task, given_grader = settings_for(data_dir, store), parse_task(task), load_grader(grader)
    found = run_async(lambda: _findings(settings, command, given_task, given_grader, timeout_seconds, inject))
    is_good = all(finding.state != "wrong" for finding in found)
    if as_json:
        print_json({"good": is_good, "findings": [finding.as_json() for finding in found]})
    else:
        print_findings(open_console(highlight=False), found)
    return 0 if is_good else MISSING_EXIT_CODE


async def _findings(
    settings: Settings, command: Sequence[str], task: Any, grader: Grader | None, timeout_seconds: float, inject: bool
) -> list[Finding]:
    looking = asyncio.create_task(asyncio.to_thread(inspect_environment, command, os.environ, settings, inject=inject))
    try:
        server = await check_model_server(settings)
        seen = await looking
        around = [*check_environment(seen), server]
        if server.state == "wrong":
            return [*around, Finding("the command ended well", "skipped", f"not started (first: {server.what})")]
        running = run_once(settings, command, by="doctor", task=task, timeout_seconds=timeout_seconds, grader=grader, inject=inject)
        async with running as (opened, once):
            statuses = await statuses_of(opened, settings.token.get_secret_value())
            once = replace(once, packages=seen.packages or {})
            arrived = replace(seen, scopes=frozenset(str(span.scope.get("name", "")) for span in once.spans))
            around = [*check_environment(arrived), server]
            here = find_spec("agl_otel.collector._native") is not None
            return [*around, *examine(once, around), tables_are_whole(statuses), core_is_compiled(statuses, here=here)]
    except UsageError:
        raise
    except AglError as error:
        remedy = "is it up (`agl-otel up`), is AGL_STORE right, and AGL_TOKEN?"
        return [*check_environment(await looking), wrong("the stack answers", str(error), remedy)]


def tables_are_whole(statuses: Sequence[Mapping[str, Any]]) -> Finding:
    """Check what the collectors report of their stores' disks: full, or damaged parts whose rows may be lost."""
    what = "the tables of traces are whole"
    problems = list(dict.fromkeys(problem for each in statuses for problem in each.get("store_problems", [])))
    if not problems:
        return good(what)
    return wrong(what, f"{len(problems)} problems", "make room on full disks; docs/data.md says what to do with damaged parts", problems)


def core_is_compiled(statuses: Sequence[Mapping[str, Any]], *, here: bool) -> Finding:
    """Tell whether the collectors have the compiled core; without it they do the same more slowly. `here`: this environment has it."""
    what, without = "the collectors' core is compiled", sum(each.get("core") == "python" for each in statuses)
    if not without:
        return good(what)
    chosen = any(each.get("core") == "python" and each.get("core_installed") for each in statuses)
    missing = "to spend less CPU, install a wheel for this platform, or in a checkout `make core` with Rust's cargo"
    again = "to spend less CPU, start the stack again from this environment, which has it"
    remedy = "to spend less CPU, unset AGL_CORE (core in agl.toml): it is installed" if chosen else again if here else missing
    return advice(what, f"not in {without} of {len(statuses)}", remedy)
