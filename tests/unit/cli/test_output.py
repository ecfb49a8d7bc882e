"""What becomes of a command's output where it cannot go."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = [sys.executable, "-m", "agl_otel"]
HELP = [*PROGRAM, "up", "--help"]
END_SECONDS = 120.0


def test_what_the_encoding_does_not_have_is_escaped() -> None:
    env = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(HELP, env=env, capture_output=True, timeout=END_SECONDS, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"clickhouse://\\u2026" in done.stdout


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("arguments", [["doctor", "--help"], ["rollouts", "ls"]])
def test_streams_that_are_closed_go_nowhere(tmp_path: Path, closed: str, arguments: list[str]) -> None:
    program = [*PROGRAM, *arguments]
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh"]
    done = subprocess.run([*shell, *program], cwd=tmp_path, capture_output=True, text=True, timeout=END_SECONDS, check=False)
    assert done.returncode == (0 if "--help" in arguments else 2)
    assert "Traceback" not in done.stderr and [line.partition(":")[0] for line in done.stderr.splitlines()] == (
        [] if "--help" in arguments or "2>" in closed else ["error"]
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("arguments", [["up", "--help"], ["--version"]])
def test_a_full_device_is_one_line(arguments: list[str]) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([*PROGRAM, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=END_SECONDS, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line == "error: the output cannot be written: No space left on device"


def test_a_reader_that_has_gone_is_no_error_to_be_told() -> None:
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


def test_a_reader_that_goes_while_a_table_is_shown_is_none_either() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run([sys.executable, "-c", SHOW], stdout=writing, stderr=subprocess.PIPE, timeout=END_SECONDS, check=False)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")
