"""The main job as a user runs it, shorter and smaller, and its errors when something that it needs fails.

`.ci/run` runs it at full size.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.system.stack_process import DEMO, Command, naming, run, run_here, small_demo, until
from tests.system.test_model_server import serving

pytest.importorskip("torch", reason="needs the [train] extra")
pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]


def running(data: Path, module: str) -> list[int]:
    """Return the processes on this data directory that run one of our modules."""
    found: list[int] = []
    for pid in naming(data):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                found.append(pid)
    return found


@pytest.mark.smoke
def test_training_uses_the_sampled_and_stored_tokens(tmp_path: Path, tiny_policy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data"
    small_demo(tmp_path, val=12)
    shutil.copytree(tiny_policy, data / "run" / "policy")
    done = run_here(capsys, "demo", "--json", "--max-steps", "2", "--data-dir", str(data), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["steps"] == 2
    assert result["trajectories"] == result["trajectories_in_clickhouse"] == 2 * 16
    assert result["calls_not_equal"] == 0
    assert result["calls_equal_to_model_server"] == result["rollouts"] == 2 * 16 + 2 * result["tasks_scored"] + 2 * 4
    assert result["verdicts"] == {"complete": result["rollouts"]}
    assert result["max_ratio_error"] < 1e-4
    assert result["tasks_scored"] == 12 and result["score_before"] <= 0.45
    assert Path(result["plot"]).read_bytes().startswith(b"\x89PNG")
    assert "openai.chat" in done.stderr and "primary = " in done.stderr, "the command's trace is shown as a tree"
    assert naming(data) == []

    # inspect the data with the commands that the demo names, with no service running
    shown = run("traces", "show", result["rollout_shown"], "--json", "--data-dir", str(data), cwd=tmp_path)
    names = [span["name"] for span in json.loads(shown.stdout)["spans"]]
    assert {"agentlightning.attempt", "agentlightning.llm", "agentlightning.annotation", "agentlightning.seal"} <= set(names)
    listed = run("rollouts", "--mode", "train", "--limit", "40", "--json", "--data-dir", str(data), cwd=tmp_path)
    assert json.loads(listed.stdout)["total"] == 2 * 16

    # the policy that the first step was sampled with would have earned what it did: its replies have the weight one
    first = [each["rollout_id"] for each in json.loads(listed.stdout)["items"] if each["metadata"]["step"] == 1]
    named = [argument for rollout_id in first for argument in ("--rollout", rollout_id)]
    tested = run("backtest", "--policy", str(data / "run" / "policy"), *named, "--json", "--data-dir", str(data), cwd=tmp_path)
    assert tested.returncode == 4, "sixteen attempts are too few to tell anything"
    found = json.loads(tested.stdout)
    assert (found["attempts"], found["left_out"], found["verdict"]) == (16, {}, "cannot_tell")
    assert found["mass"] == pytest.approx(1.0, abs=1e-4) and found["effective"] == pytest.approx(16, abs=1e-3)
    assert found["score"]["value"] == pytest.approx(found["logged"], abs=1e-4)
    with serving(tmp_path, data / "run" / "policy") as server:
        of_server = ("--server", f"{server.url}/v1", "--model", "policy")
        scored = run("backtest", *of_server, *named, "--json", "--data-dir", str(data), cwd=tmp_path)
        asked = server.client().completions.create(model="policy", prompt=[1, 2, 3], echo=True, max_tokens=0, logprobs=1, temperature=1)
    assert scored.returncode == 4, scored.stderr
    theirs = json.loads(scored.stdout)
    assert (theirs["attempts"], theirs["left_out"], theirs["doubts"]) == (16, {}, found["doubts"])
    figures = ("mass", "effective", "logged", "tail")
    assert [theirs[name] for name in figures] == pytest.approx([found[name] for name in figures], abs=1e-3)
    assert theirs["gain"] == pytest.approx(found["gain"], abs=1e-4)
    assert asked.choices[0].logprobs is not None and len(asked.choices[0].logprobs.token_logprobs or ()) == 3


def test_a_model_server_that_dies_ends_the_training_with_an_error_that_names_it(
    tmp_path: Path, tiny_policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, job = tmp_path / "data", small_demo(tmp_path, val=1) / DEMO / "job.toml"
    shutil.copytree(tiny_policy, data / "run" / "policy")
    metrics = data / "run" / "metrics.jsonl"

    def kill(over: threading.Event) -> None:
        until(lambda: over.is_set() or (metrics.exists() and metrics.read_text() != ""), "the training is under way")
        (server,) = running(data, "agl_otel.algorithms.grpo.server")
        os.kill(server, signal.SIGKILL)

    ended = run_here(capsys, "train", str(job), "--data-dir", str(data), "--run-dir", str(data / "run"), cwd=tmp_path, beside=kill)
    assert ended.returncode == 1
    assert "the model server ended with exit code" in ended.stderr
    assert naming(data) == []


def test_ctrl_c_during_the_demo_leaves_no_process_behind(tmp_path: Path) -> None:
    """The only demo here that creates its own model."""
    data = tmp_path / "data"
    with Command("demo", "--data-dir", str(data), log=tmp_path / "demo.log", cwd=small_demo(tmp_path, val=1)) as demo:
        until(lambda: "3." in demo.output, "the commands run")
        demo.process.send_signal(signal.SIGINT)
        assert demo.wait(300) == 130
    assert naming(data) == []


def test_the_demo_keeps_its_stack_and_names_the_dashboard_if_asked_to_stay(tmp_path: Path, tiny_policy: Path) -> None:
    data, folder = tmp_path / "data", small_demo(tmp_path, val=1)
    shutil.copytree(tiny_policy, data / "run" / "policy")
    arguments = ("demo", "--stay", "--max-steps", "1", "--data-dir", str(data))
    with Command(*arguments, log=tmp_path / "demo.log", cwd=folder) as demo:
        until(lambda: "Ctrl+C" in demo.output, "the demo has ended and stays")
        address = re.search(r"dashboard +(http://\S+)/runs", demo.output)
        assert address is not None, demo.output
        with urllib.request.urlopen(f"{address[1]}/v1/agl/runs", timeout=60) as answer:
            (run_,) = json.load(answer)
        assert run_["by_mode"]["train"] == 16
        demo.process.send_signal(signal.SIGINT)
        assert demo.wait(300) == 130
    assert naming(data) == []


def test_a_wrong_job_file_is_a_usage_error_and_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("[agnet]\n")
    refused = run("train", "job.toml", "--data-dir", "data", cwd=tmp_path)
    assert refused.returncode == 2 and "agnet" in refused.stderr and "Traceback" not in refused.stderr
    assert not (tmp_path / "data").exists()


def test_a_grader_that_raises_ends_the_training_with_its_message(
    tmp_path: Path, tiny_policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.py").write_text("def grade(task, answer):\n    raise KeyError('no such field: score')\n")
    job = small_demo(tmp_path, val=8) / DEMO / "job.toml"
    job.write_text(job.read_text().replace("grade.py:", f"{tmp_path}/bad.py:"))
    data = tmp_path / "data"
    shutil.copytree(tiny_policy, data / "run" / "policy")
    ended = run_here(capsys, "train", str(job), "--data-dir", str(data), "--run-dir", str(data / "run"), cwd=tmp_path)
    told = ended.stderr
    assert ended.returncode == 1
    assert "no such field: score" in told and "grade" in told
    listed = run("rollouts", "--json", "--data-dir", str(data), cwd=tmp_path)
    assert json.loads(listed.stdout)["total"] == 8, "what happened is still there"
