"""`agl-otel rubrics`: what reviewers and judges go by."""

from __future__ import annotations

from pathlib import Path
from typing import IO

import click

from agl_otel.cli.common import data_dir_option, json_option, print_json, run_async, settings_for, setup_logging, store_option
from agl_otel.cli.output import counted, open_console, table_of
from agl_otel.errors import UsageError
from agl_otel.stack.sharing import open_store
from agl_otel.text import printable
from agl_otel.types.reviews import Rubric


@click.group()
def rubrics() -> None:
    """List, show and write rubrics: what reviewers and judges go by."""
    setup_logging()


@rubrics.command("ls")
@data_dir_option
@store_option
@json_option
def list_rubrics(data_dir: Path | None, store: str | None, as_json: bool) -> None:
    """List the current version of each rubric."""

    async def main() -> list[Rubric]:
        async with open_store(settings_for(data_dir, store)) as opened:
            return await opened.rubrics()

    found = run_async(main)
    if as_json:
        print_json([each.model_dump(mode="json") for each in found])
        return
    rows = [(each.rubric, _labels(each), next((line for line in each.text.splitlines() if line.strip()), "")) for each in found]
    open_console().print(table_of(counted(len(found), "rubric"), ("rubric", "labels", "begins"), rows))


@rubrics.command()
@click.argument("named", metavar="NAME[@VERSION]")
@data_dir_option
@store_option
@json_option
def show(named: str, data_dir: Path | None, store: str | None, as_json: bool) -> None:
    """Show the text of a rubric, the current version or an earlier one. It is what `put` takes."""

    async def main() -> Rubric:
        async with open_store(settings_for(data_dir, store)) as opened:
            return await opened.rubric(named, earlier=True)

    found = run_async(main)
    print_json(found.model_dump(mode="json")) if as_json else click.echo("\n".join(map(printable, found.text.splitlines())))


@rubrics.command()
@click.argument("name")
@click.argument("file", type=click.File("rb"), metavar="FILE")
@data_dir_option
@store_option
@json_option
def put(name: str, file: IO[bytes], data_dir: Path | None, store: str | None, as_json: bool) -> None:
    """Store the text in FILE (-: stdin) as the rubric NAME, or as its next version if it is another text.

    A line `label = reward` is a label, `label =` one without a reward; there are 1 to 9. Under the next version all attempts are to be
    reviewed and judged again.
    """
    try:
        text = file.read().decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{file.name} is no text in UTF-8: {error}") from None

    async def main() -> tuple[Rubric, bool]:
        async with open_store(settings_for(data_dir, store)) as opened:
            before = [each.rubric for each in await opened.rubrics()]
            stored = await opened.put_rubric(name, text)
            return stored, stored.rubric not in before

    stored, is_new = run_async(main)
    if as_json:
        print_json({**stored.model_dump(mode="json"), "is_new": is_new})
    else:
        said = "is stored" if is_new else "has this text already"
        click.echo(f"{stored.rubric} {said}, with {counted(len(stored.labels), 'label')}: {printable(_labels(stored))}")


def _labels(rubric: Rubric) -> str:
    return ", ".join(each.label if each.value is None else f"{each.label} = {each.value:g}" for each in rubric.labels)
