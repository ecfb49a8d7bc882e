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


def contexts(context: click.Context) -> Iterator[click.Context]:
    """The context of every command below that of `context`, itself first, as `agl-otel` would make them."""
    yield context
    if isinstance(context.command, click.Group):
        for name in context.command.list_commands(context):
            child = context.command.get_command(context, name)
            if child:
                yield from contexts(click.Context(child, parent=context, info_name=name, **child.context_settings))


def cli_page() -> str:
    """The help of every command."""
    parts = [
        NOTE,
        "# The command line",
        "",
        "Exit codes: 0 fine; 1 failed; 2 used wrongly; 3 `doctor` found something missing; 130 interrupted.",
        "",
    ]
    for context in contexts(click.Context(cli, info_name="agl-otel", terminal_width=100, **cli.context_settings)):
        path, text = context.command_path, context.command.get_help(context)
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
