"""Two commands at once on one data directory, as real processes: each run has its own agent, and may lose the other's stack."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.system.stack_process import Command, run, until

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
TASKS = 24
AGENT = """
import pathlib, time

def answer(task):
    with open("seen", "a") as seen:
        seen.write(task + "\\n")
    while not pathlib.Path("go").exists():
        time.sleep(0.05)
    return 1.0
"""
JOB = """
[agent]
function = "agent.py:answer"
runners = 2
concurrency = 2
timeout_seconds = 600
[data]
train = "tasks.jsonl"
[algorithm]
name = "baseline"
polling_interval = 0.2
"""


def a_job(folder: Path) -> Path:
    """Write a job whose agent notes its tasks in `seen`, and waits for a file `go`; return the folder."""
    folder.mkdir()
    (folder / "agent.py").write_text(AGENT)
    (folder / "job.toml").write_text(JOB)
    (folder / "tasks.jsonl").write_text("".join(json.dumps(f"{folder.name} {number}") + "\n" for number in range(TASKS)))
    return folder


def seen(folder: Path) -> list[str]:
    path = folder / "seen"
    return path.read_text().splitlines() if path.exists() else []


def training(folder: Path) -> list[str]:
    """The command of the job's run; both runs have one data directory."""
    return ["train", str(folder / "job.toml"), "--data-dir", str(folder.parent / "data"), "--run-dir", str(folder / "run")]


def test_runs_that_share_a_stack_have_agents_of_their_own_and_outlive_its_kill(tmp_path: Path) -> None:
    one, two = a_job(tmp_path / "one"), a_job(tmp_path / "two")
    with Command(*training(one), log=tmp_path / "one.log") as first:
        until(lambda: bool(seen(one)) or first.process.poll() is not None, "the first run has begun")
        with Command(*training(two), log=tmp_path / "two.log") as second:
            until(lambda: bool(seen(two)) or second.process.poll() is not None, "the second run has begun")
            first.process.send_signal(signal.SIGKILL)
            first.process.wait()
            assert second.wait(120) == 1, second.output
            told = " ".join(second.output.split())
            assert f"the command that had started it (process {first.process.pid}), with which this one shared it" in told, told
            assert "to resume this run: " in told and f"--run-dir {two / 'run'}" in told, told
    for folder in (one, two):
        (folder / "go").touch()
    with Command(*training(one), log=tmp_path / "one.log") as first, Command(*training(two), log=tmp_path / "two.log") as second:
        assert first.wait(600) == 0, first.output
        assert second.wait(600) == 0, second.output
    for folder in (one, two):
        assert {task.split()[0] for task in seen(folder)} == {folder.name}
        assert set(seen(folder)) == {f"{folder.name} {number}" for number in range(TASKS)}
    listed = json.loads(run("rollouts", "ls", "--data-dir", str(tmp_path / "data"), "--json", "--limit", "100", cwd=tmp_path).stdout)
    assert {each["status"] for each in listed["items"]} == {"succeeded"} and listed["total"] == 2 * TASKS
