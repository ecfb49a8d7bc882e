"""`agl-otel doctor -- COMMAND`: check that the user's own agent sends everything that training needs, and name remedies if not."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from agl_otel.adapters.own_sampling import own_sampling_of, several_choices_warning
from agl_otel.cli.collector import read_status, status_session
from agl_otel.cli.common import data_dir_option, json_option, print_json, run_async, settings_for, setup_logging, store_option
from agl_otel.cli.environment_checks import Finding, check_environment, inspect_environment
from agl_otel.cli.once import FinishedAttempt, run_once
from agl_otel.cli.output import open_console, plain
from agl_otel.cli.run import parse_task
from agl_otel.errors import AglError, UsageError
from agl_otel.settings import Settings
from agl_otel.store import Store
from agl_otel.text import printable
from agl_otel.types.columns import CallColumns
from agl_otel.types.options import Finite
from agl_otel_hook import conventions

MISSING_EXIT_CODE: Final = 3


def examine(once: FinishedAttempt) -> list[Finding]:
    """Check one attempt and its spans; findings are in the order in which things can go wrong. Pure: no I/O."""
    found = [check(once) for check in _CHECKS]
    return [*(replace(finding, remedy="") if finding.good else finding for finding in found), *_own_sampling(once), *_choices(once)]


def _command_succeeded(once: FinishedAttempt) -> Finding:
    detail = once.rollout.attempt.error or "exit code 0"
    return Finding("the command ended well", once.rollout.status == "succeeded", detail, "run it by hand and mend it first")


def _own_spans(once: FinishedAttempt) -> Finding:
    own = [
        span
        for span in once.spans
        if conventions.PROCESS in span.attributes and span.name not in (conventions.SPAN_LLM, conventions.SPAN_SEAL)
    ]
    remedy = (
        "is agl-otel-hook installed in the agent's own environment, and does the agent use an instrumented library "
        "(opentelemetry-instrumentation-…)? Frameworks with their own telemetry must have it enabled"
    )
    return Finding("its own spans arrive, with ids and marker", bool(own), f"{len(own)} spans" if own else "none", remedy)


def _model_calls(once: FinishedAttempt) -> Finding:
    calls = {
        (span.attributes.get(conventions.PROCESS), span.attributes.get(conventions.LLM_CALL, span.span_id))
        for span in once.spans
        if span.name == conventions.SPAN_LLM
    }
    remedy = "the agent must take its model's address from OPENAI_BASE_URL (or OPENAI_API_BASE, ANTHROPIC_BASE_URL)"
    return Finding("its model calls pass through the proxy", bool(calls), f"{len(calls)} calls" if calls else "none", remedy)


_UNANSWERED: Final = ("upstream_error", "upstream_timeout")
_NO_ANSWER: Final = (
    "the model server does not answer: is it up, and is its address right? That is OPENAI_BASE_URL of this command, else AGL_UPSTREAM_URL, "
    "else OpenAI's, which needs OPENAI_API_KEY; in a training, the endpoint of the resource main_llm"
)


def _token_ids(once: FinishedAttempt) -> Finding:
    calls = once.traces.calls
    with_ids = _calls_with(calls, calls.response.lengths > 0)
    failed = [span for span in once.spans if span.name == conventions.SPAN_LLM and span.status.status_code == "ERROR"]
    detail = f"{with_ids} of {calls.count} calls" + (f"; {plain(failed[0].status.description or '', 120)}" if failed else "")
    unanswered = any(span.attributes.get(conventions.LLM_INCOMPLETE) in _UNANSWERED for span in failed)
    remedy = (
        _NO_ANSWER
        if unanswered and not with_ids
        else (
            "the model server must support return_token_ids: vLLM 0.10.2 or newer, SGLang, or this package's. Hosted models do not "
            "return token ids. Messages and Responses mostly lack them: with litellm (AGL_LITELLM) such calls are sent to chat/completions"
        )
    )
    return Finding("token ids come with them", with_ids > 0 and with_ids == calls.count, detail, remedy)


def _logprobs(once: FinishedAttempt) -> Finding:
    calls = once.traces.calls
    good = _calls_with(calls, (calls.logprobs.lengths == calls.response.lengths) & (calls.response.lengths > 0))
    return Finding(
        "and log-probs", good > 0 and good == calls.count, f"{good} of {calls.count} calls", "start the model server with log-probs enabled"
    )


def _calls_with(calls: CallColumns, good: NDArray[np.bool_]) -> int:
    """Count the calls all of whose choices are `good`."""
    call = np.cumsum(~calls.further_choice) - 1
    return int((np.bincount(call[~good], minlength=calls.count) == 0).sum())


def _verdict(once: FinishedAttempt) -> Finding:
    verdict = once.traces.verdicts[once.rollout.rollout_id, once.rollout.attempt.attempt_id]
    return Finding(
        "everything it emitted is stored",
        verdict.kind == "complete",
        verdict.kind,
        "what is missing above makes it so; a killed process does too",
        [*verdict.reasons, *(f"note: {note}" for note in verdict.notes)],
    )


def _own_sampling(once: FinishedAttempt) -> list[Finding]:
    """Advise on sampling parameters, which matter to training alone. The attempt's resources set none, so the agent set those of calls."""
    requests = [span for span in once.spans if span.name == conventions.SPAN_LLM and not span.attributes.get(conventions.LLM_CHOICE)]
    calls = [own for span in requests if (own := own_sampling_of(span.attributes, {}))]
    if not calls:
        return [Finding("it leaves temperature and top_p to training", True, "no model call sets them")] if len(once.traces.calls) else []
    parameters = ", ".join(dict.fromkeys(name for own in calls for name in own))
    detail = f"{len(calls)} of {once.traces.calls.count} calls set {parameters}"
    remedy = (
        "the agent's values override those of a training run, whose log-probs then belong to another distribution: leave them out of the "
        "requests during training, or train with the same values"
    )
    return [Finding("it leaves temperature and top_p to training", True, detail, remedy)]


def _choices(once: FinishedAttempt) -> list[Finding]:
    """Advise on calls with several choices, which matter to training alone."""
    calls = once.traces.calls
    several = int(calls.several_choices.sum())
    return [Finding("each call asks for one choice", True, "not all", several_choices_warning(several, len(calls)))] if several else []


_CHECKS: Sequence[Callable[[FinishedAttempt], Finding]] = (_command_succeeded, _own_spans, _model_calls, _token_ids, _logprobs, _verdict)


@click.command()
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--task", default="{}", help="The task as JSON; its fields fill {placeholders} in COMMAND.")
@click.option(
    "--timeout",
    "timeout_seconds",
    type=Finite(min=0, min_open=True),
    default=120.0,
    show_default=True,
    help="Seconds the command may take.",
)
@data_dir_option
@store_option
@json_option
def doctor(command: tuple[str, ...], task: str, timeout_seconds: float, data_dir: Path | None, store: str | None, as_json: bool) -> int:
    """Check with your own agent that everything training needs arrives, or name what is missing.

    \b
      agl-otel doctor -- python my_agent.py "What is 2 + 2?"

    First it checks the environment: variables that switch telemetry off, versions, frameworks with their own telemetry, ports, tokens.
    Then it runs COMMAND once, like `agl-otel run`, and checks spans, ids, model calls, token ids, log-probs, the verdict, and whether
    the agent sets its own temperature or top_p.
    Exits with 3 if something is missing.
    """
    setup_logging()
    settings = settings_for(data_dir, store)

    async def main() -> list[Finding]:
        around = check_environment(await asyncio.to_thread(inspect_environment, command, os.environ, settings))
        try:
            async with run_once(settings, command, task=parse_task(task), timeout_seconds=timeout_seconds) as (opened, once):
                statuses = await _statuses(opened, settings)
                return [*around, *examine(once), tables_are_whole(statuses), core_is_compiled(statuses)]
        except UsageError:
            raise
        except AglError as error:
            return [
                *around,
                Finding("the stack answers", False, str(error), "is it up (`agl-otel up`), is AGL_STORE right, and AGL_TOKEN?"),
            ]

    findings = run_async(main)
    if as_json:
        print_json({"good": all(f.good for f in findings), "findings": [vars(f) for f in findings]})
    else:
        _print(findings, command)
    return 0 if all(finding.good for finding in findings) else MISSING_EXIT_CODE


async def _statuses(opened: Store, settings: Settings) -> list[dict[str, Any]]:
    addresses = (await opened.queue.describe()).collectors
    async with status_session(settings.token.get_secret_value()) as session:
        return await asyncio.gather(*(read_status(session, address) for address in addresses))


def tables_are_whole(statuses: Sequence[Mapping[str, Any]]) -> Finding:
    """Check what the collectors report of their stores' disks: full, or damaged parts whose rows may be lost."""
    problems = list(dict.fromkeys(problem for each in statuses for problem in each.get("store_problems", [])))
    remedy = "make room on full disks; docs/data.md says what to do with damaged parts" if problems else ""
    return Finding("the tables of traces are whole", not problems, f"{len(problems)} problems" if problems else "yes", remedy, problems)


def core_is_compiled(statuses: Sequence[Mapping[str, Any]]) -> Finding:
    """Tell whether the collectors have the compiled core; without it they do the same more slowly."""
    without = sum(each.get("core") == "python" for each in statuses)
    chosen = any(each.get("core") == "python" and each.get("core_installed") for each in statuses)
    missing = "to spend less CPU, install a wheel for this platform, or in a checkout `make core` with Rust's cargo"
    remedy = ("to spend less CPU, unset AGL_CORE (core in agl.toml): it is installed" if chosen else missing) if without else ""
    return Finding("the collectors' core is compiled", True, f"not in {without} of {len(statuses)}" if without else "yes", remedy)


def _print(findings: Sequence[Finding], command: Sequence[str]) -> None:
    console = open_console(highlight=False)
    for finding in findings:
        mark = ("[yellow]![/]" if finding.remedy else "[green]✓[/]") if finding.good else "[red]✗[/]"
        console.print(f"{mark} {finding.what}: ", end="")
        console.print(plain(finding.detail, 200), markup=False)
        for reason in finding.reasons:  # uncut: the runner has shortened the commands in them
            console.print(Text(f"    {printable(reason)}"), soft_wrap=True)
        if finding.remedy:
            console.print(f"    {finding.remedy}", style="yellow", markup=False)
    if Path(command[0]).name.startswith("python") and not shutil.which(
        "opentelemetry-instrument", path=str(Path(shutil.which(command[0]) or command[0]).parent)
    ):
        console.print(
            f"    {command[0]} has no opentelemetry-instrument beside it: pip install agl-otel-hook into its environment",
            style="yellow",
            markup=False,
        )
