"""`python -m agl_otel.runner --function path:fn` or `… -- COMMAND`: run agents until SIGTERM.

Exit codes: 0 stopped in order or `--max-rollouts` done; 1 no stack answers; 2 usage error.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Final

import click

from agl_otel.errors import AglError, UsageError
from agl_otel.runner import forks_without_grpc  # noqa: F401  # pyright: ignore[reportUnusedImport]  # imported first, to load gRPC
from agl_otel.runner.agents import CommandAgent, ContainerAgent, FunctionAgent, HttpAgent, KubernetesAgent, Limits, load_function
from agl_otel.runner.agents.kubernetes import check_pod
from agl_otel.runner.agents.kubernetes_api import Cluster
from agl_otel.runner.injection import inject_option
from agl_otel.runner.job import Agent, Grader
from agl_otel.runner.limits import parse_size
from agl_otel.runner.process import run_runner
from agl_otel.runner.running import RunnerEvent
from agl_otel.service import logs as logformat
from agl_otel.settings import Settings
from agl_otel.text import printable, printable_lines
from agl_otel.types import RolloutMode, parse_labels
from agl_otel.types.options import Finite, RunMode, Whole

PROGRESS_EVERY: Final = 10  # attempts


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """The command-line options that describe the agent."""

    command: tuple[str, ...] = ()
    function: str | None = None
    url: str | None = None
    image: str | None = None
    kubernetes: bool = False
    kubernetes_api: str = ""
    namespace: str = ""
    pod: str = "{}"
    grader: str | None = None
    instrument: bool | None = None
    inject: bool = False
    warm: bool = False
    preload: tuple[str, ...] = ()
    hooked: bool = False
    memory_limit: str | None = None
    output_limit: str | None = None

    def build(self) -> Agent | Callable[[], Agent]:
        """Make the agent, or a factory for a function agent, whose code run_runner loads once the environment names the stack.

        Raises UsageError where the options name no agent, more than one, or one that cannot be run.
        """
        kinds = [bool(self.command) and not self.image, bool(self.function), bool(self.url), bool(self.image)]
        if sum(kinds) != 1:
            raise UsageError("give one agent: --function path/to/file.py:function, --url, --image, or a command after `--`")
        if self.function:
            return self._function_agent
        grader = load_function(self.grader) if self.grader else None
        if self.kubernetes:
            return self._kubernetes_agent(grader)
        if self.url:
            return HttpAgent(self.url, grader=grader, hooked=self.hooked)
        limits = Limits(*(parse_size(text) if text else None for text in (self.memory_limit, self.output_limit)))
        if self.image:
            return ContainerAgent(self.image, self.command, grader=grader, limits=limits, hooked=self.hooked or None)
        return CommandAgent(
            self.command, grader=grader, instrument="auto" if self.instrument is None else self.instrument,
            inject=self.inject, warm=self.warm, preload=self.preload, limits=limits, hooked=self.hooked or None,
        )  # fmt: skip

    def _kubernetes_agent(self, grader: Grader | None) -> Agent:
        if not self.image:
            raise UsageError("--kubernetes runs a container: name its image with --image")
        try:
            pod = check_pod(json.loads(self.pod))
        except ValueError as error:
            raise UsageError(f"--pod is not JSON: {error}") from None
        cluster = Cluster.found(self.kubernetes_api, self.namespace)
        return KubernetesAgent(self.image, self.command, cluster=cluster, grader=grader, pod=pod, hooked=self.hooked or None)

    def _function_agent(self) -> Agent:
        return FunctionAgent(load_function(self.function or ""), grader=load_function(self.grader) if self.grader else None)


class Progress:
    """Print a line for each attempt that ends, and totals after every PROGRESS_EVERY attempts."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()

    def show(self, event: RunnerEvent) -> None:
        """Print the lines for one event."""
        if event.kind == "ended":
            self.outcomes[event.outcome] += 1
            click.echo(event_line(event))
            if (done := self.outcomes.total()) % PROGRESS_EVERY == 0:
                click.echo(f"{done} rollouts done: {', '.join(f'{name} {count}' for name, count in sorted(self.outcomes.items()))}")


def event_line(event: RunnerEvent) -> str:
    """Describe in one line how an attempt ended."""
    who = f"{event.outcome:<10} {event.rollout_id} {event.attempt_id}"
    if event.error:
        lines = event.error.strip().splitlines()
        error = lines[0] if any(line.startswith("Traceback ") for line in lines[1:]) else lines[-1]  # see Capture.error_lines
        return f"{who} Ended after {event.seconds:.2f}s: {printable(error)}"
    reward = "none from the runner" if event.reward is None else f"{event.reward:g}" if event.reward % 1 else f"{event.reward:.1f}"
    collected = "" if event.spans is None else f" Collected {event.spans} span(s)."
    return f"{who} Completed in {event.seconds:.2f}s.{collected} Final reward: {reward}"


@click.command("runner")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option("--function", "--agent", "function", help="Agent: path/to/file.py:function or package.module:function.")
@click.option("--url", help="Agent: an HTTP endpoint that gets each task by POST.")
@click.option("--image", help="Agent: a container image, run by docker or podman with COMMAND as its arguments.")
@click.option("--kubernetes", is_flag=True, help="Run --image as a Kubernetes Job for each attempt, in this pod's cluster.")
@click.option("--kubernetes-api", default="", metavar="URL", help="API server of another cluster (e.g. from `kubectl proxy`).")
@click.option("--namespace", default="", help="Namespace of the Jobs; default that of this pod.")
@click.option(
    "--pod", default="{}", metavar="JSON", help="Pod spec fields of the Jobs: nodeSelector, tolerations, containers[0].resources …."
)
@click.option("--grader", help="Grader of the answers: path/to/file.py:function, called with (task, answer).")
@click.option("--concurrency", default=8, show_default=True, type=Whole(min=1), help="How many attempts run at once.")
@click.option("--max-rollouts", type=Whole(min=1), help="Claim this many rollouts, retries included, and stop when they have ended.")
@click.option("--mode", "modes", multiple=True, type=RunMode(), help="Only rollouts of this mode; may be repeated.")
@click.option(
    "--label", "labels", multiple=True, metavar="NAME=VALUE", help="Only rollouts with this label (agl.run: or none); repeatable."
)
@click.option("--store", default="", help="Address of the stack (host:port); default AGL_STORE, else the local queue.")
@click.option("--worker-id", help="Name of this runner; default: host name, process id and a random suffix.")
@click.option(
    "--instrument/--no-instrument",
    default=None,
    help="Load the hook in a COMMAND's Python processes, and start a Python program under opentelemetry-instrument, with which it must be "
    "installed (default: where it is).",
)
@inject_option
@click.option(
    "--warm/--fresh",
    default=False,
    show_default=True,
    help="Fork Python commands from a warm parent process, or start each attempt afresh.",
)
@click.option("--preload", multiple=True, metavar="MODULE", help="Module that the warm parent imports before forking; may be repeated.")
@click.option(
    "--hooked",
    is_flag=True,
    help="The agent's processes run under agl-otel's hook (detected for Python commands): missing span counts raise an alarm.",
)
@click.option("--memory-limit", metavar="SIZE", help="Resident memory of one attempt's processes, e.g. 2GiB.")
@click.option("--output-limit", metavar="SIZE", help="Output of one attempt, e.g. 10MiB.")
@click.option("--timeout", "timeout_seconds", type=Finite(min=0, min_open=True), help="Time limit of one attempt in seconds.")
def runner(modes: tuple[RolloutMode, ...], labels: tuple[str, ...], **options: Any) -> None:
    """Claim rollouts and run an agent for each: a Python function, an HTTP endpoint, a container, or a COMMAND after `--`.

    In COMMAND `{question}` is replaced by that value of the task. The grader gets the command's standard output as the answer.
    """
    settings = Settings.load()
    logformat.configure(settings.log_level, settings.log_format)
    agent_options = {field.name: options.pop(field.name) for field in fields(AgentOptions)}
    agent = AgentOptions(**agent_options).build()
    counts = asyncio.run(run_runner(agent, modes=modes, labels=parse_labels(labels), on_event=Progress().show, **options))
    click.echo(", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "nothing was claimed")


if __name__ == "__main__":
    try:
        runner()
    except AglError as error:
        click.echo(f"error: {printable_lines(str(error))}", err=True)
        sys.exit(2 if isinstance(error, UsageError) else 1)
