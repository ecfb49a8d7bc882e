"""A command's output to closed pipes, full devices, narrow encodings and no terminal."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path

import pytest

PROGRAM = [sys.executable, "-m", "agl_otel"]
HELP = [*PROGRAM, "up", "--help"]
END_SECONDS = 120.0


def test_unencodable_characters_are_escaped() -> None:
    env = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(HELP, env=env, capture_output=True, timeout=END_SECONDS, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"clickhouse://\\u2026" in done.stdout


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("arguments", [["doctor", "--help"], ["rollouts", "ls"]])
def test_closed_standard_streams_are_replaced_by_dev_null(tmp_path: Path, closed: str, arguments: list[str]) -> None:
    program = [*PROGRAM, *arguments]
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh"]
    done = subprocess.run([*shell, *program], cwd=tmp_path, capture_output=True, text=True, timeout=END_SECONDS, check=False)
    assert done.returncode == (0 if "--help" in arguments else 2)
    assert "Traceback" not in done.stderr and [line.partition(":")[0] for line in done.stderr.splitlines()] == (
        [] if "--help" in arguments or "2>" in closed else ["error"]
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("arguments", [["up", "--help"], ["--version"]])
def test_a_full_device_is_reported_in_one_line(arguments: list[str]) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([*PROGRAM, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=END_SECONDS, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line == "error: the output cannot be written: No space left on device"


def test_a_closed_pipe_is_not_reported_as_an_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(HELP, stdout=writing, stderr=subprocess.PIPE, timeout=END_SECONDS, check=False)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


SHOW = """
from rich.console import Console
from agl_otel.cli.common import run_async

async def show():
    Console(highlight=False).print("a line of a table\\n" * 10_000)

run_async(show)
"""


def test_a_pipe_closed_during_a_table_is_not_reported_as_an_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run([sys.executable, "-c", SHOW], stdout=writing, stderr=subprocess.PIPE, timeout=END_SECONDS, check=False)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


TABLE = """
from agl_otel.cli.output import open_console, table_of

rows = [(f"ro-{'0' * 40}", "input " * 40, "status", None)]
open_console().print(table_of("one of one rollouts", ("rollout", "input", "status", "error"), rows))
open_console().print("word " * 40)
"""


@pytest.mark.parametrize("to", ["pipe", "file"])
def test_output_is_uncut_without_a_terminal(tmp_path: Path, to: str) -> None:
    env = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    with (tmp_path / "out").open("w+") as file:
        done = subprocess.run(
            [sys.executable, "-c", TABLE], env=env, stdout=subprocess.PIPE if to == "pipe" else file, timeout=END_SECONDS, check=True
        )
        file.seek(0)
        lines = (done.stdout.decode() if to == "pipe" else file.read()).splitlines()
    assert any("0" * 40 in line and ("input " * 40).strip() in line and "status" in line for line in lines) and "…" not in str(lines)
    assert lines[-1].strip() == ("word " * 40).strip()


@pytest.mark.parametrize("where", ["terminal", "COLUMNS"])
def test_a_terminal_and_columns_give_the_width(where: str) -> None:
    width = 70
    env = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | ({"COLUMNS": f"{width}"} if where == "COLUMNS" else {})
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, width))
    program = [sys.executable, "-c", TABLE]
    if where == "COLUMNS":
        out = subprocess.run(program, env=env, stdout=subprocess.PIPE, timeout=END_SECONDS, check=True).stdout
        os.close(theirs)
    else:
        subprocess.run(program, env=env, stdin=theirs, stdout=theirs, stderr=theirs, timeout=END_SECONDS, check=True)
        out = os.read(ours, 65536)
        os.close(theirs)
    os.close(ours)
    assert max(len(line.rstrip()) for line in re.sub(r"\x1b\[[0-9;]*m", "", out.decode()).splitlines()) <= width
