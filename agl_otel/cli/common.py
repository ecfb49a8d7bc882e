"""Shared by commands: options that name a stack, running async code under Ctrl+C, logging, JSON output."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar
from urllib.parse import urlsplit

import click

from agl_otel.net.auth import is_loopback
from agl_otel.runner.groups import kill_all as kill_agents
from agl_otel.service import logs as logformat
from agl_otel.service.main import on_stop_signals
from agl_otel.service.private import access_problem
from agl_otel.service.processes import kill_all
from agl_otel.settings import PORTS, Settings
from agl_otel.text import json_text
from agl_otel.types.options import Whole

T = TypeVar("T")
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
INTERRUPTED: Final = 130


class Folder(click.Path):
    """The path of a folder. Refuses a file, and an empty path (an unset shell variable), which would mean the current folder."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, readable=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path."""
        if value == "":
            self.fail("the path is empty: name a folder", param, ctx)
        if Path(value).is_file():
            self.fail(f"{value} is a file: name a folder, or a path where one can be made", param, ctx)
        if why := access_problem(Path(value)):
            self.fail(why, param, ctx)
        return super().convert(value, param, ctx)


data_dir_option: Decorator = click.option("--data-dir", type=Folder(), help="Folder of all data.  [default: .agl]")
store_option: Decorator = click.option("--store", metavar="ADDRESS", help="A running stack: host:4747 or http://host:4748.")
clickhouse_option: Decorator = click.option(
    "--clickhouse", "clickhouse_url", metavar="URL", help="clickhouse://…  [default: embedded, in the data directory]"
)
collector_option: Decorator = click.option(
    "--collector", metavar="PATH", help="An OpenTelemetry Collector with our processor (`make otelcol`).  [default: the Python one]"
)
json_option: Decorator = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")


def settings_for(data_dir: Path | None, store: str | None) -> Settings:
    """Load the settings of a command on a store. --data-dir without --store takes precedence over AGL_STORE."""
    return Settings.load(data_dir=data_dir, store="" if data_dir is not None and store is None else store)


def port_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --host, --log-level and one option for each port."""
    for port in reversed(PORTS):
        flag = f"--{port.replace('_', '-')}"
        command = click.option(flag, type=Whole(0, 65535), help=f"0 takes a free one.  [default: {Settings.model_fields[port].default}]")(
            command
        )
    command = click.option("--jaeger-port", type=Whole(1, 65535), help="For a Jaeger that reads from here.  [default: none]")(command)
    command = click.option("--log-level", type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"], case_sensitive=False))(command)
    return click.option("--host", help="Address to listen on.  [default: 127.0.0.1]")(command)


class Terminated(KeyboardInterrupt):
    """The command was ended by SIGTERM. For one that serves until then, such as under a service manager, that is no failure."""


def run_async(main: Callable[[], Coroutine[Any, Any, T]], *, killed: Callable[[], None] = lambda: None) -> T:
    """Run `main`. Ctrl+C or SIGTERM cancels it, so that it stops what it started; a second signal kills all child processes at once,
    calls `killed` and ends this process.

    Raises KeyboardInterrupt (after SIGTERM Terminated), with the message of main's CancelledError if it has one, after an interrupted run.
    """
    kind: type[KeyboardInterrupt] = KeyboardInterrupt

    async def without_exit() -> T | SystemExit:
        try:
            return await main()
        except SystemExit as end:  # rich raises it on a closed pipe; raised in a task, it would abort the event loop
            return end

    async def guarded() -> T | SystemExit:
        task = asyncio.ensure_future(without_exit())

        def interrupt(number: signal.Signals) -> None:
            nonlocal kind
            kind = Terminated if number == signal.SIGTERM else KeyboardInterrupt
            click.echo("stopping … (once more to stop at once)", err=True)
            task.cancel()

        def end(_: signal.Signals) -> NoReturn:
            kill_all()
            kill_agents()
            killed()
            os._exit(INTERRUPTED)

        on_stop_signals(interrupt, end)
        try:
            return await task
        except asyncio.CancelledError as interrupted:
            raise kind(*interrupted.args) from None

    done = asyncio.run(guarded())
    if isinstance(done, SystemExit):
        raise done
    return done


def warn_of_passwords(flags: Mapping[str, Any]) -> None:
    """Warn of flags with a password: every user of the machine can read it in `ps`. Environment variables are safe."""
    for flag, value in flags.items():
        if isinstance(value, str) and "://" in value and urlsplit(value).password:
            name = flag.removesuffix("_url").replace("_", "-")
            text = f"--{name} holds a password, which other users of this machine can see in `ps`: set AGL_{flag.upper()} instead"
            click.echo(f"warning: {text}", err=True)


def warn_of_open_host(settings: Settings) -> None:
    """Warn of a stack that other machines reach without a token, or with one that travels in the clear."""
    if is_loopback(settings.host):
        return
    if not settings.token.get_secret_value():
        text = "there is no token: anyone who reaches it may read and change everything. Set AGL_TOKEN, or listen on 127.0.0.1"
    elif not settings.tls_cert:
        text = "there is no TLS: the token can be read on the way. Set AGL_TLS_CERT and AGL_TLS_KEY, unless a proxy before it has them"
    else:
        return
    click.echo(f"warning: host {settings.host} accepts connections from other machines, and {text} (docs/security.md)", err=True)


def setup_logging(level: str = "WARNING") -> None:
    """Log to stderr in the short format of commands."""
    logformat.configure(level, line="%(levelname)s %(message)s")


def print_json(value: Any) -> None:
    """Print one JSON document."""
    click.echo(json_text(value))


def own_command() -> str:
    """Return how to call this command: `agl-otel`, or its path if the shell would not find it or would find another one."""
    program = Path(sys.argv[0])
    if program.name != "agl-otel":
        return "agl-otel"
    outside = os.pathsep.join(part for part in os.environ.get("PATH", "").split(os.pathsep) if part != str(program.parent))
    activated = os.environ.get("VIRTUAL_ENV") and not os.environ.get("UV")
    if activated or shutil.which("agl-otel", path=outside):
        return "agl-otel"
    return str(program.relative_to(Path.cwd()) if program.is_relative_to(Path.cwd()) else program)
