"""What is wrong with a job, for people: `agl-otel train JOB.toml --check`, and `improve` likewise."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console

from agl_otel.cli.common import print_json, run_async
from agl_otel.settings import Settings
from agl_otel.text import printable_lines


def tell_check(job_file: Path, settings: Settings, console: Console, *, as_json: bool, improves: bool = False) -> None:
    """Print all problems of a job, also as JSON on stdout. Raises SystemExit with code 2 if there are any.

    `improves`: it is for `agl-otel improve`, and needs its table.
    """
    from agl_otel.jobs.check import check_job
    from agl_otel.jobs.memory import lines_of
    from agl_otel.stack.supervisor import running_address

    address = running_address(settings)
    click.echo(f"checking {job_file}: its agent, tasks and model …", err=True)
    found = run_async(lambda: check_job(job_file, store=address, token=settings.token.get_secret_value(), improves=improves))
    for problem in found.problems:
        console.print(f"wrong: {printable_lines(problem)}", soft_wrap=True, markup=False)
    for warning in found.warnings:
        console.print(f"warning: {printable_lines(warning)}", soft_wrap=True, markup=False)
    for line in lines_of(found.memory) if found.memory is not None else ():
        console.print(line, soft_wrap=True, markup=False)
    for note in found.notes:
        console.print(f"note: {printable_lines(note)}", soft_wrap=True, markup=False)
    if not found.problems:
        sizes = f"{found.train} tasks to train on, {found.val} to score on"
        console.print(f"{job_file}: nothing is wrong. {found.algorithm}, {sizes}", soft_wrap=True, markup=False)
    if as_json:
        print_json({"ok": not found.problems, **asdict(found)})
    if found.problems:
        raise SystemExit(2)
