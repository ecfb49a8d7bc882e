"""Write docs/cli.md and docs/settings.md from the code itself: `make docs`. A test holds the files against this output."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from agl_otel.cli import cli
from agl_otel.settings import CONFIG_FILE, SECRETS, Settings

HERE = Path(__file__).parent
NOTE = "<!-- Written by `make docs`; do not edit. -->"


def commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    """Every command below `command` with its full name, itself first."""
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=path)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            if child:
                yield from commands(child, f"{path} {name}")


def cli_page() -> str:
    """The help of every command."""
    parts = [
        NOTE,
        "# The command line",
        "",
        "Exit codes: 0 fine; 1 failed; 2 used wrongly; 3 `doctor` found something missing; 130 interrupted.",
        "",
    ]
    for path, command in commands(cli, "agl-otel"):
        text = command.get_help(click.Context(command, info_name=path, max_content_width=100, terminal_width=100))
        parts += [f"## {path}", "", "```text", text.rstrip(), "```", ""]
    return "\n".join(parts)


def settings_page() -> str:
    """Every setting with its variable, default and meaning."""
    parts = [
        NOTE,
        "# Settings",
        "",
        f"Flags win over environment variables, those over `{CONFIG_FILE}` in the current folder, those over the defaults.",
        "",
        "| setting | variable | default | meaning |",
        "|---|---|---|---|",
    ]
    for name, field in Settings.model_fields.items():
        default = "" if name in SECRETS else str(field.default)
        meaning = " ".join((field.description or "").split()).replace("|", "\\|")
        parts.append(
            f"| `{name}` | `AGL_{name.upper()}` | `{default}` | {meaning} |"
            if default
            else f"| `{name}` | `AGL_{name.upper()}` | | {meaning} |"
        )
    return "\n".join(parts) + "\n"


PAGES = {"cli.md": cli_page, "settings.md": settings_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (HERE / name).write_text(page())
        sys.stdout.write(f"docs/{name}\n")
