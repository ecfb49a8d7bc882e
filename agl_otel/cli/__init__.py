"""The `agl-otel` command: one file per group of commands, imported on use.

Exit codes: 0 success; 1 the command failed; 2 wrong usage; 3 `doctor` found something missing; 130 interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Final

import click

from agl_otel import __version__
from agl_otel.errors import AglError, UsageError
from agl_otel.service.interpreter import tune_for_startup
from agl_otel.service.private import keep_private
from agl_otel.text import printable_lines

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
    "traces": "agl_otel.cli.traces:traces",
    "collector": "agl_otel.cli.collector:collector",
    "doctor": "agl_otel.cli.doctor:doctor",
    "maintain": "agl_otel.cli.maintain:maintain",
    "export": "agl_otel.cli.export:export",
    "disk": "agl_otel.cli.disk:disk",
    "token": "agl_otel.cli.token:token",
    "data": "agl_otel.cli.data:data",
}
"""{command: module and name}, imported on use to keep `agl-otel --help` fast."""
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
                click.secho(f"error: the output cannot be written: {error.strerror}", fg="red", err=True)
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
