"""The command line: one file for each group of commands, and here what they share at the door.

Exit codes: 0 fine; 1 the command failed; 2 it was used wrongly; 3 `doctor` found something missing; 130 interrupted.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Final

import click

from agl_otel import __version__
from agl_otel.errors import AglError, UsageError
from agl_otel.interpreter import load_quickly
from agl_otel.printable import printable_lines

COMMANDS: Final = {
    "up": "agl_otel.cli.up:up",
    "store": "agl_otel.cli.store:store",
    "demo": "agl_otel.cli.demo:demo",
    "run": "agl_otel.cli.run:run",
    "runner": "agl_otel.runner.__main__:runner",
    "train": "agl_otel.cli.train:train",
    "top": "agl_otel.cli.top:top",
    "runs": "agl_otel.cli.runs:runs",
    "rollouts": "agl_otel.cli.rollouts:rollouts",
    "queue": "agl_otel.cli.queue:queue",
    "resources": "agl_otel.cli.records:resources",
    "workers": "agl_otel.cli.records:workers",
    "traces": "agl_otel.cli.look:traces",
    "collector": "agl_otel.cli.collector:collector",
    "doctor": "agl_otel.cli.doctor:doctor",
    "maintain": "agl_otel.cli.maintain:maintain",
    "export": "agl_otel.cli.export:export",
    "disk": "agl_otel.cli.disk:disk",
    "token": "agl_otel.cli.token:token",
    "backup": "agl_otel.cli.data:backup",
    "restore": "agl_otel.cli.data:restore",
}
"""Loaded when they are used, so that `agl-otel --help` opens nothing."""
GONE: Final = {
    "vllm": "start vLLM itself with `vllm serve MODEL` (0.10.2 or later): the proxy asks it for token ids with every call",
    "prometheus": "let Prometheus scrape /metrics (or /v1/prometheus) on the port of `agl-otel store`, which serves it always",
    "agentops": "AgentOps is not needed: AgentOpsTracer records OpenTelemetry spans",
}
"""Commands of Agent Lightning 0.3, and what to use instead."""


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in GONE:
            raise UsageError(f"there is no `agl-otel {cmd_name}`: {GONE[cmd_name]}")
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(":")
        return getattr(importlib.import_module(module), name)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="agl-otel")
def cli() -> None:
    """Train AI agents from the OpenTelemetry they already emit.

    \b
    Start here:
      agl-otel demo                      train a tiny agent end to end, in about three minutes
      agl-otel doctor -- python my_agent.py    does my own agent's telemetry arrive?
      agl-otel up                        run the stack: queue, collector, proxy, web

    Settings come from flags, then AGL_* variables, then agl.toml, then defaults.
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """The `agl-otel` command: run, word errors for people, and exit with a code that means something."""
    if arguments is None:  # the process is this command's own
        load_quickly()
    try:
        code = cli(args=None if arguments is None else list(arguments), standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except AglError as error:
        click.secho(f"error: {printable_lines(str(error))}", fg="red", err=True)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    sys.exit(code if isinstance(code, int) else 0)
