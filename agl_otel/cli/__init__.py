"""The `agl-otel` command: one file per group of commands, imported on use.

Exit codes: 0 success; 1 the command failed; 2 wrong usage; 3 `doctor` found something missing, or `backtest` or
`replay` a worse policy; 4 `backtest` or `replay` cannot tell; 130 interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Final

import click

from agl_otel import __version__
from agl_otel.errors import AglError, UsageError
from agl_otel.service.interpreter import tune_for_startup
from agl_otel.service.private import keep_private
from agl_otel.text import printable_lines

COMMANDS: Final = {
    "up": ("agl_otel.cli.up:up", "Run the stack until Ctrl+C: queue, collector, proxy and web."),
    "store": ("agl_otel.cli.store:store", "Run the stack without runners; all of it answers at one URL."),
    "demo": ("agl_otel.cli.demo:demo", "Train an unmodified agent from its own traces, on this machine."),
    "run": ("agl_otel.cli.run:run", "Run a command once as an attempt, then show its trace as a tree."),
    "runner": ("agl_otel.runner.__main__:runner", "Claim rollouts and run an agent for each."),
    "train": ("agl_otel.cli.train:train", "Run a job file: score, train, score again."),
    "top": ("agl_otel.cli.top:top", "Watch a running stack: rollouts, workers, collectors."),
    "runs": ("agl_otel.cli.runs:runs", "List, show and compare runs, or export a run's model."),
    "rollouts": ("agl_otel.cli.rollouts:rollouts", "List rollouts and work on them."),
    "select": ("agl_otel.cli.select:select", "Choose attempts from traces, for training, export and review."),
    "backtest": ("agl_otel.cli.backtest:backtest", "Estimate what another policy would have earned."),
    "replay": ("agl_otel.cli.replay:replay", "Compare the tool calls of another policy with recorded ones."),
    "feedback": ("agl_otel.cli.feedback:feedback", "Reward, comment or correct what an agent did, after the fact."),
    "improve": ("agl_otel.cli.improve:improve", "Improve weights or prompts from the traffic of a running product."),
    "rubrics": ("agl_otel.cli.rubrics:rubrics", "List, show and write what reviewers and judges go by."),
    "judge": ("agl_otel.cli.judge:judge", "Have a model score attempts by a rubric; compare it with people."),
    "queue": ("agl_otel.cli.queue:queue", "Count rollouts, list failed ones, remove old ones."),
    "resources": ("agl_otel.cli.records:resources", "Show the prompts and model addresses that agents are given."),
    "workers": ("agl_otel.cli.records:workers", "Show the processes that claim rollouts."),
    "traces": ("agl_otel.cli.traces:traces", "Show what agents emitted: as a tree, by step, or with SQL."),
    "collector": ("agl_otel.cli.collector:collector", "Show what the collectors take, store and refuse."),
    "doctor": ("agl_otel.cli.doctor:doctor", "Check with your own agent that what training needs arrives."),
    "maintain": ("agl_otel.cli.maintain:maintain", "Maintain a stack's stores; `up` runs this as a service."),
    "export": ("agl_otel.cli.export:export", "Write training data to a file or folder."),
    "disk": ("agl_otel.cli.disk:disk", "Show the disk usage of a data directory by part."),
    "token": ("agl_otel.cli.token:token", "Make a token for some services and a limited time."),
    "data": ("agl_otel.cli.data:data", "Back up, restore, or move the data of a stack."),
}
"""{command: (module and name, summary)}. A command is imported on use; the summary is what `agl-otel --help` says of it."""
REMOVED: Final = {
    "vllm": "start vLLM itself with `vllm serve MODEL` (0.10.2 or later): the proxy asks it for token ids with every call",
    "prometheus": "let Prometheus scrape /metrics (or /v1/prometheus) on the port of `agl-otel store`, which serves it always",
    "agentops": "AgentOps is not needed: AgentOpsTracer records OpenTelemetry spans",
}
"""{removed command of Agent Lightning 0.3: what to use instead}."""


UNWRITABLE: Final = frozenset({errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""Errors of a write to a closed pipe, a full disk or a failing device."""


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in REMOVED:
            raise UsageError(f"there is no `agl-otel {cmd_name}`: {REMOVED[cmd_name]}")
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        return getattr(importlib.import_module(module), name)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Name the nearest command to one that there is not; click does so in groups whose commands it holds."""
        if args[0] not in (*COMMANDS, *REMOVED) and (near := get_close_matches(args[0], COMMANDS, 1)):
            ctx.fail(f"No such command {args[0]!r}. Did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="agl-otel")
def cli() -> None:
    """Train AI agents from the OpenTelemetry they already emit.

    \b
    Start here:
      agl-otel demo                      train a tiny agent end to end, in about two minutes
      agl-otel doctor -- python my_agent.py    does my own agent's telemetry arrive?
      agl-otel up                        run the stack: queue, collector, proxy, web

    Settings come from flags, then AGL_* variables, then agl.toml, then defaults.
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the `agl-otel` command, print errors as one line, and exit with one of the codes above."""
    if arguments is None:  # called as the console script, which owns the process
        _open_streams()
        tune_for_startup()
        if sys.argv[1:2] != ["export"] and sys.argv[1:3] != ["runs", "export"]:  # their files may be meant for other users
            keep_private()
        _escape_unencodable()
    try:
        try:
            code = _code_of(arguments)
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        _discard_output()
        if error.errno != errno.EPIPE:  # a reader that stops early (`| head`) is no error
            with contextlib.suppress(OSError):
                click.secho(f"error: {error.filename or 'the output'} cannot be written: {error.strerror}", fg="red", err=True)
        code = 1
    sys.exit(code)


def _code_of(arguments: Sequence[str] | None) -> int:
    try:
        code = cli(args=None if arguments is None else list(arguments), standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt) as error:
        said = (error.__cause__ or error).args  # click raises Abort from a KeyboardInterrupt
        click.echo(": ".join(["interrupted", *map(str, said)]), err=True)
        return 130
    except AglError as error:
        click.secho(f"error: {printable_lines(str(error))}", fg="red", err=True)
        return 2 if isinstance(error, UsageError) else 1
    return code if isinstance(code, int) else 0


def _open_streams() -> None:
    """Open /dev/null for standard streams that the caller closed (`>&-`), else the next opened file would get their descriptor."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:  # the stream's descriptor is in use already
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", errors="backslashreplace", closefd=False))


def _escape_unencodable() -> None:
    """Escape characters that the output's encoding lacks instead of failing on them."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    """Redirect stdout to /dev/null: the interpreter flushes it at exit, and would report the error again."""
    null = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError, ValueError):  # stdout has no file descriptor
        os.dup2(null, sys.stdout.fileno())
    os.close(null)
