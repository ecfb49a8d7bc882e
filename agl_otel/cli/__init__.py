"""The `agl-otel` command: one file for each group of commands, loaded when it is used.

Exit codes: 0 fine; 1 the command failed; 2 it was used wrongly; 3 `doctor` found something missing; 130 interrupted.
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
from agl_otel.service.interpreter import load_quickly
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
    "traces": "agl_otel.cli.look:traces",
    "collector": "agl_otel.cli.collector:collector",
    "doctor": "agl_otel.cli.doctor:doctor",
    "maintain": "agl_otel.cli.maintain:maintain",
    "export": "agl_otel.cli.export:export",
    "disk": "agl_otel.cli.disk:disk",
    "token": "agl_otel.cli.token:token",
    "data": "agl_otel.cli.data:data",
}
"""Loaded when they are used, so that `agl-otel --help` opens nothing."""
GONE: Final = {
    "vllm": "start vLLM itself with `vllm serve MODEL` (0.10.2 or later): the proxy asks it for token ids with every call",
    "prometheus": "let Prometheus scrape /metrics (or /v1/prometheus) on the port of `agl-otel store`, which serves it always",
    "agentops": "AgentOps is not needed: AgentOpsTracer records OpenTelemetry spans",
}
"""Commands of Agent Lightning 0.3, and what to use instead."""


UNWRITABLE: Final = frozenset({errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""What a write to a pipe, a disk or a device that takes no more fails with."""


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
        _open_streams()
        load_quickly()
        if sys.argv[1:2] != ["export"]:  # whose files are for others to train on
            keep_private()
        _write_any_text()
    try:
        try:
            code = _code_of(arguments)
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        _end_output()
        if error.errno != errno.EPIPE:  # else nobody reads on, which is no error of anybody's
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
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return 130
    except AglError as error:
        click.secho(f"error: {printable_lines(str(error))}", fg="red", err=True)
        return 2 if isinstance(error, UsageError) else 1
    return code if isinstance(code, int) else 0


def _open_streams() -> None:
    """Have streams that the caller closed (`>&-`) go nowhere: Python has None for them, and the next file would take their number."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:  # something was opened under its number since: it goes on under its own
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", errors="backslashreplace", closefd=False))


def _write_any_text() -> None:
    """Escape what the encoding of a terminal, pipe or file does not have."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _end_output() -> None:
    """Let what is still to be written go nowhere: the interpreter flushes when it ends, and would complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError, ValueError):  # a stream without a file
        os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
