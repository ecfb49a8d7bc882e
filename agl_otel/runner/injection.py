"""Bring the hook into the Python processes of an agent's command, by its environment alone. Pure, but for where packages are.

PYTHONPATH begins with a folder of the hook whose sitecustomize does the rest in each process (hook/agl_otel_hook/inject), also below
`sh -c`, `uv run` and `poetry run`. `python -I` and `-E` do not read PYTHONPATH, and `-S` runs no sitecustomize: there is no hook.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import click

import agl_otel_hook
from agl_otel_hook import conventions
from agl_otel_hook.inject.agl_otel_inject import BROUGHT, FITTING, program_of, skips, version_of

PYTHONS: Final = ((3, 10), (3, 13))
"""The oldest and the newest Python into which the hook is brought (sitecustomize.py)."""
HOOK: Final = "agl-otel-hook"
FOLDER: Final = str(Path(agl_otel_hook.__file__).absolute().parent / "inject")

SHELLS: Final = ("sh", "bash", "dash", "zsh")
LAUNCHERS: Final = ("hatch", "pdm", "pipenv", "poetry", "uv")
"""Programs whose `run` starts another."""
MODULE: Final = ("-m", "--module")
VALUED: Final = (
    *("--directory", "--env-file", "--extra", "--group", "--index", "--only-group", "--package", "--project", "--python", "-p"),
    *("--with", "--with-editable", "--with-requirements"),
)
"""Options of `uv run` and others that the next word belongs to."""

inject_option = click.option(
    "--inject",
    is_flag=True,
    help="Bring OpenTelemetry into a COMMAND's Pythons that have no SDK, with the instrumentations that are installed beside agl-otel.",
)


def install_line() -> str:
    """Return the command that installs the hook into another environment: from where it was installed here: it is on no package index."""
    hook = metadata.distribution(HOOK)
    origin = urlsplit(json.loads(hook.read_text("direct_url.json") or "{}").get("url", ""))
    if origin.scheme == "file" and Path(unquote(origin.path)).exists():
        return f"pip install {shlex.quote(unquote(origin.path))}"
    return f"pip install agl_otel_hook-{hook.version}-py3-none-any.whl (`make wheel` in a checkout puts it into dist/)"


def versions_in(packages: Mapping[str, str]) -> dict[str, tuple[int, ...] | None]:
    """Return what `to_bring` asks for, from {package: version}."""
    found = {name: packages.get(name.replace("_", "-")) for name in (*FITTING, *BROUGHT)}
    return {name: version_of(version) if version is not None else None for name, version in found.items()}


def is_off(environment: Mapping[str, str]) -> bool:
    """Return whether the environment switches the hook off."""
    return environment.get(conventions.ENV_HOOK) == conventions.HOOK_OFF


def injection(base: Mapping[str, str], command: Sequence[str], *, inject: bool) -> dict[str, str]:
    """Return the variables to set for `command` in the environment `base`.

    inject: whether OpenTelemetry is brought too, into interpreters without it, as AGL_HOOK may also say. A pattern of AGL_HOOK_SKIP that
    the command's own program matches is left out: it was meant for programs that the agent starts.
    """
    if is_off(base):
        return {conventions.ENV_HOOK: conventions.HOOK_OFF}  # `base` may lose it on the way (process_environment)
    inject = inject or base.get(conventions.ENV_HOOK) == conventions.HOOK_INJECT
    program = program_in(command)
    patterns = base.get(conventions.ENV_HOOK_SKIP, conventions.HOOK_SKIP).split(",")
    behind = without_hook(base).get("PYTHONPATH")
    return {
        "PYTHONPATH": os.pathsep.join([FOLDER, *([behind] if behind else [])]),
        conventions.ENV_HOOK_SKIP: ",".join(each for each in patterns if not skips(program, each)),
        conventions.ENV_HOOK_PACKAGES: str(metadata.distribution("opentelemetry-sdk").locate_file("")),
        **({conventions.ENV_HOOK: conventions.HOOK_INJECT} if inject else {}),
    }


def program_in(command: Sequence[str]) -> str:
    """Return the name of the program that a command runs; of Python that of its script or module, empty where it has none.

    What `sh -c` (its first command), `env`, `uv run` and the like start is looked at instead of them.
    """
    words = list(command)
    while words and "=" in words[0]:  # a variable of `env` or the shell
        del words[0]
    if not words:
        return ""
    name, rest = Path(words[0]).name, words[1:]
    if name.startswith("python"):
        return program_of(words)
    if name in SHELLS and rest and rest[0].startswith("-") and rest[0].endswith("c"):
        try:
            return program_in(shlex.split(rest[1])) if rest[1:] else ""
        except ValueError:  # a quote that is not closed, for the shell to report
            return ""
    if name in ("env", "exec"):
        return program_in(rest)
    if name in LAUNCHERS and "run" in rest:
        rest = rest[rest.index("run") + 1 :]
        while rest and rest[0].startswith("-") and rest[0] not in MODULE:
            del rest[: 2 if rest[0] in VALUED else 1]
        return rest[1] if rest[1:] and rest[0] in MODULE else program_in(rest)
    return name


def without_hook(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the hook's folder in PYTHONPATH."""
    folders = [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder != FOLDER]
    return {**environment, "PYTHONPATH": os.pathsep.join(folders)}
