"""`agl-otel run` that is interrupted or killed: what becomes of its rollout, its agent and its worker."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.stack_process import ENVIRONMENT, Command, naming, run, until
from tests.system.test_run import environment, stack, store  # noqa: F401  # pyright: ignore[reportUnusedImport]  # fixtures

pytestmark = pytest.mark.full


@pytest.fixture(autouse=True, scope="module")
def own_ledgers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the ledgers from other runners of this machine, which would hand them in."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(ENVIRONMENT, "TMPDIR", str(tmp_path_factory.mktemp("ledgers")))
        yield


WAITS = """
import pathlib, signal, time
from opentelemetry import trace
with trace.get_tracer("agent").start_as_current_span("work"):
    pass
pathlib.Path("begun").touch()
{}
time.sleep(600)
"""
IGNORES_SIGTERM = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


def started(place: list[str], folder: Path, code: str = "") -> Command:
    """Start `agl-otel run` and wait until its agent has made a span."""
    agent = [sys.executable, "-c", WAITS.format(code)]
    command = Command("run", *place, "--", *agent, log=folder / "run.log", cwd=folder, env=environment())
    until((folder / "begun").exists, "the agent works")
    return command


def newest(place: list[str], folder: Path) -> dict[str, Any]:
    """What `rollouts show` has of the latest rollout."""
    (latest,) = json.loads(run("rollouts", "--limit", "1", "--json", *place, cwd=folder).stdout)["items"]
    return json.loads(run("rollouts", "show", latest["rollout_id"], "--json", *place, cwd=folder).stdout)


def workers(place: list[str], folder: Path) -> dict[str, str]:
    """The status of each worker."""
    listed = json.loads(run("workers", "ls", "--json", *place, cwd=folder).stdout)["items"]
    return {worker["worker_id"]: worker["status"] for worker in listed}


@pytest.mark.parametrize("group", [True, False], ids=["terminal", "kill -INT"])
@pytest.mark.parametrize("joins", [False, True], ids=["own stack", "running stack"])
def test_an_interrupted_run_ends_its_agent_and_cancels_its_rollout(
    tmp_path: Path, request: pytest.FixtureRequest, joins: bool, group: bool
) -> None:
    place = request.getfixturevalue("store") if joins else ["--data-dir", str(tmp_path / "data")]
    with started(place, tmp_path) as command:
        (os.killpg if group else os.kill)(command.process.pid, signal.SIGINT)
        assert command.wait(300) == 130, command.output
    assert naming(tmp_path) == [], "neither the agent nor a service is left"
    shown = newest(place, tmp_path)
    rollout, (attempt,) = shown["rollout"], shown["attempts"]
    assert command.output.splitlines()[-1] == f"interrupted: rollout {rollout['rollout_id']} is cancelled"
    assert (rollout["status"], attempt["status"], attempt["error"]) == (
        "cancelled",
        "failed",
        "the runner was stopped before the agent had ended",
    )
    assert attempt["end_time"] is not None and [process["begun"] for process in attempt["ledger"]["processes"]] == [1]
    assert shown["verdicts"][attempt["attempt_id"]]["kind"] == "complete"
    assert workers(place, tmp_path)[attempt["worker_id"]] == "idle"


def test_a_second_interrupt_ends_a_run_at_once(tmp_path: Path, store: list[str]) -> None:  # noqa: F811 - the fixture
    with started(store, tmp_path, IGNORES_SIGTERM) as command:
        command.process.send_signal(signal.SIGINT)
        until(lambda: "once more to stop at once" in command.output, "it stops")
        command.process.send_signal(signal.SIGINT)
        assert command.wait(300) == 130
    until(lambda: naming(tmp_path) == [], "an agent that ignores SIGTERM has ended, too")
    shown = newest(store, tmp_path)
    run("rollouts", "cancel", shown["rollout"]["rollout_id"], *store, cwd=tmp_path)


def test_a_run_that_is_interrupted_before_its_agent_starts_leaves_nothing_open(tmp_path: Path) -> None:
    place = ["--data-dir", str(tmp_path / "data")]
    agent = [sys.executable, "-c", "pass"]
    with Command("run", *place, "--", *agent, log=tmp_path / "run.log", cwd=tmp_path, env=environment()) as command:
        until(lambda: (tmp_path / "data" / "stack.json").exists(), "its stack is up")
        command.process.send_signal(signal.SIGINT)
        assert command.wait(300) == 130, command.output
    assert re.search(r"^interrupted(: rollout ro-\S+ (is cancelled|had succeeded))?$", command.output, re.MULTILINE)
    for item in json.loads(run("rollouts", "--json", *place, cwd=tmp_path).stdout)["items"]:
        assert item["status"] in ("cancelled", "succeeded"), item


def test_the_next_run_hands_in_the_ledger_of_a_killed_one(tmp_path: Path) -> None:
    place = ["--data-dir", str(tmp_path / "data")]
    with started(place, tmp_path) as command:
        command.process.kill()
        command.wait(300)
    assert run("run", *place, "--", sys.executable, "-c", "pass", cwd=tmp_path, env=environment()).returncode == 0
    items = json.loads(run("rollouts", "--json", *place, cwd=tmp_path).stdout)["items"]
    [killed] = [item for item in items if item["status"] != "succeeded"]
    run("rollouts", "cancel", killed["rollout_id"], *place, cwd=tmp_path)  # instead of waiting for the queue to end it
    shown = json.loads(run("rollouts", "show", killed["rollout_id"], "--json", *place, cwd=tmp_path).stdout)
    [attempt] = shown["attempts"]
    assert shown["rollout"]["config"]["unresponsive_seconds"] == 60, "the queue ends it after this"
    assert [process["begun"] for process in attempt["ledger"]["processes"]] == [1]
    spans = json.loads(run("traces", "show", killed["rollout_id"], "--json", *place, cwd=tmp_path).stdout)["spans"]
    kept = "work" in [span["name"] for span in spans]  # the agent exports at its end: the collector of the killed run may be gone first
    assert shown["verdicts"][attempt["attempt_id"]]["kind"] == ("complete" if kept else "incomplete")


def test_the_next_runner_hands_in_the_ledger_of_a_killed_one(tmp_path: Path, store: list[str]) -> None:  # noqa: F811 - the fixture
    (tmp_path / "tasks.jsonl").write_text('{"runner": "killed"}\n')
    labelled = ["--file", "tasks.jsonl", "--mode", "test", "--label", "for=killed"]
    enqueued = run("rollouts", "enqueue", *labelled, "--json", *store, cwd=tmp_path)
    [rollout_id] = json.loads(enqueued.stdout)["rollout_ids"]
    claims = ["runner", *store, "--label", "for=killed", "--", sys.executable, "-c"]
    with Command(*claims, WAITS.format(""), log=tmp_path / "killed.log", cwd=tmp_path) as command:
        until((tmp_path / "begun").exists, "the agent works")
        command.process.kill()
        command.wait(300)

    def ledger() -> dict[str, Any] | None:
        shown = json.loads(run("rollouts", "show", rollout_id, "--json", *store, cwd=tmp_path).stdout)
        return shown["attempts"][0]["ledger"]

    assert ledger() is None
    with Command(*claims, "pass", log=tmp_path / "next.log", cwd=tmp_path):
        until(lambda: ledger() is not None, "the next runner hands it in")
    assert [process["begun"] for process in (ledger() or {})["processes"]] == [1]


JOB = """
[agent]
command = ["{python}", "agent.py"]
[data]
train = "tasks.jsonl"
[algorithm]
name = "baseline"
"""


def job(folder: Path, agent: str) -> list[str]:
    """Write a job of the baseline; return how to run it."""
    (folder / "agent.py").write_text(agent)
    (folder / "tasks.jsonl").write_text("1\n2\n")
    (folder / "job.toml").write_text(JOB.format(python=sys.executable))
    return ["train", "job.toml", "--run-dir", "a run", "--data-dir", "data"]


def test_a_second_interrupt_of_training_still_says_how_to_resume_it(tmp_path: Path) -> None:
    command = job(tmp_path, WAITS.format(IGNORES_SIGTERM))
    with Command(*command, log=tmp_path / "train.log", cwd=tmp_path, env=environment()) as training:
        until((tmp_path / "begun").exists, "the agent works")
        training.process.send_signal(signal.SIGINT)
        until(lambda: "once more to stop at once" in training.output, "it stops")
        training.process.send_signal(signal.SIGINT)
        assert training.wait(300) == 130
    assert training.output.splitlines()[-1].endswith(f"train job.toml --run-dir '{tmp_path / 'a run'}' --data-dir data")
    until(lambda: naming(tmp_path) == [], "everything has ended")


def test_a_baseline_without_a_success_says_where_the_reason_is(tmp_path: Path) -> None:
    done = run(*job(tmp_path, "raise SystemExit('no key was given')"), cwd=tmp_path, env=environment())
    (said,) = re.findall(r"none of 2 rollouts succeeded: `\S+ rollouts show (ro-\S+)`", done.stdout)
    shown = json.loads(run("rollouts", "show", said, "--json", "--data-dir", "data", cwd=tmp_path).stdout)
    assert "no key was given" in json.dumps(shown["attempts"][-1])


def test_a_job_hands_the_switches_of_the_hook_on_to_its_agents(tmp_path: Path) -> None:
    command = job(tmp_path, "import os\nopen('seen', 'w').write(os.environ['AGL_HOOK'] + ' ' + os.environ['AGL_HOOK_SKIP'])")
    run(*command, cwd=tmp_path, env=environment() | {"AGL_HOOK": "inject", "AGL_HOOK_SKIP": "mine"})
    assert (tmp_path / "seen").read_text() == "inject mine"
