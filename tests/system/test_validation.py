"""Scores of a training job: the console, `agl-otel runs show`, the dashboard, TensorBoard and what the grader wrote into a file of its own
agree."""

from __future__ import annotations

import json
import shutil
import urllib.parse
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agl_otel.algorithms.validation import best_weights
from agl_otel.cli import main
from agl_otel.jobs.job import Job
from tests.system.stack_process import DEMO, Command, small_demo, until
from tests.unit.algorithms.test_metrics import scalars

pytest.importorskip("torch", reason="needs the [train] extra")
pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
VAL = 15
GRADE = """
import json
def grade(task, answer):
    number = int(task["question"].split()[-1])
    fails = number % 10 == 7
    value = None if number % 3 == 0 or fails else float(number % 3 == 1)
    with open({path!r}, "a") as file:
        file.write(json.dumps([task["question"], value]) + "\\n")
    if fails:
        raise RuntimeError("the grader fails")
    return value
"""
"""Some answers get no reward, and for some the grader fails."""
ALGORITHM = """
[algorithm]
name = "grpo"
prompts_per_step = 4
group_size = 2
max_steps = 3
val_every = 1
keep_checkpoints = 1
"""


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[Any, str]:
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--json"])
    captured = capsys.readouterr()
    assert ended.value.code == 0, captured
    return json.loads(captured.out), captured.err


def rest(web: str, path: str, **params: str) -> Any:
    address = web if "://" in web else f"http://{web}"
    with urllib.request.urlopen(f"{address}/v1/agl/{path}?{urllib.parse.urlencode(params)}") as answer:
        return json.load(answer)


def test_all_ways_to_read_a_score_agree_with_the_grader(tmp_path: Path, tiny_policy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = small_demo(tmp_path, val=VAL) / DEMO / "job.toml"
    graded = tmp_path / "graded.jsonl"
    (job.parent / "grade.py").write_text(GRADE.format(path=str(graded)))
    job.write_text(job.read_text().split("[algorithm]")[0] + ALGORITHM)
    questions = {task["question"] for task in Job.load(job).tasks("val")}
    run_dir, data = tmp_path / "run", tmp_path / "data"
    shutil.copytree(tiny_policy, run_dir / "policy")
    ports = {f"AGL_{name}_PORT": "0" for name in ("QUEUE", "OTLP_GRPC", "OTLP_HTTP", "CLICKHOUSE", "PROXY", "WEB")}
    with Command("up", "--data-dir", str(data), log=tmp_path / "up.log", cwd=tmp_path, env=ports):
        until((data / "stack.json").exists, "the stack is up")
        on = ["--store", json.loads((data / "stack.json").read_text())["queue"]["address"]]
        result, console = command(capsys, "train", str(job), "--run-dir", str(run_dir), *on)
        shown, _ = command(capsys, "runs", "show", str(run_dir), *on)
        by_id, _ = command(capsys, "runs", "show", shown["run_id"], *on)
        web = json.loads((data / "stack.json").read_text())["web"]["address"]
        curve, lost = (rest(web, path, run=shown["run_id"]) for path in ("runs/curve", "runs/steps"))
    written = [json.loads(line) for line in graded.read_text().splitlines()]
    validated = Counter((question, value) for question, value in written if question in questions)
    assert set(validated.values()) == {4} and len(validated) == VAL, "each once before and once after each of three steps"
    values = [value for _, value in validated]
    missing, score = values.count(None), sum(value or 0.0 for value in values) / VAL
    assert missing > 0 and 0 < score * VAL < VAL - missing, "there is something to be counted"
    words = f"{score:.3f} on {VAL} tasks ({missing} without a reward count as 0)"
    assert console.count(words) == 5, "before, after each of three steps, and after"
    assert (result["score_before"], result["score_after"]) == (pytest.approx(score), pytest.approx(score))
    assert shown["metrics"]["val_reward"] == {str(step): pytest.approx(score) for step in range(4)}
    shown_in_tensorboard = {step: value for tag, step, value in scalars(run_dir / "tensorboard") if tag == "val_reward"}
    assert shown_in_tensorboard == {step: pytest.approx(score) for step in range(4)}
    assert (shown["totals"]["validated"], shown["totals"]["validated_without_reward"]) == (4 * VAL, 4 * missing)
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert {str(step["step"]): pytest.approx(step["reward_mean"]) for step in steps} == shown["metrics"]["reward"]
    assert all(f"step {step['step']}  reward" in console for step in steps)
    assert [point["reward_mean"] for point in curve["points"] if point["mode"] == "val"] == [pytest.approx(score)] * 4
    assert [(each["step"], each["lost"]) for each in lost if each["lost"]] == [
        (int(step), words) for step, words in shown["losses"].items()
    ]
    assert {each["step"]: each["refused"] for each in lost} == {step["step"]: step["refused"] for step in steps}
    assert all(f"lost {words}" in console for words in shown["losses"].values())
    best = {"step": 1, "score": pytest.approx(score), "weights": "checkpoints/step-000001"}
    assert shown["best_validation"] == best and by_id["best_validation"] == {**best, "weights": None}
    assert f"best score: {score:.3f} after step 1 (checkpoints/step-000001)" in console
    found = {
        "path": str(run_dir / "checkpoints" / "step-000001"),
        "which": "best",
        "step": 1,
        "export": f"agl-otel runs export {run_dir} DIR",
    }
    assert result["result"] == shown["result"] == found and by_id["result"] is None
    assert f"best weights, after step 1: {found['path']}" in console and f"vLLM or transformers: {found['export']}" in console
    assert best_weights(run_dir) == run_dir / "checkpoints" / "step-000001"
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["step-000001", "step-000003"]
