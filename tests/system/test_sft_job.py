"""`agl-otel train` of a job with the algorithm sft: stack, runners, proxy, model server and training processes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from agl_otel.cli import main
from agl_otel.jobs.job import Job
from tests.system.stack_process import DEMO, small_demo

pytestmark = pytest.mark.full


def test_a_job_tunes_on_its_best_rollouts_and_keeps_the_training_data(
    tmp_path: Path, tiny_policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = small_demo(tmp_path, val=32) / DEMO / "job.toml"
    job = path.read_text().split("[algorithm]")[0]
    path.write_text(f'{job}[algorithm]\nname = "sft"\nprompts_per_step = 24\nmax_steps = 2\n')
    assert Job.load(path).algorithm["name"] == "sft"
    shutil.copytree(tiny_policy, tmp_path / "run" / "policy")
    with pytest.raises(SystemExit) as ended:
        main(["train", str(path), "--data-dir", str(tmp_path / "data"), "--run-dir", str(tmp_path / "run"), "--json"])
    captured = capsys.readouterr()
    assert ended.value.code == 0, captured
    found = json.loads(captured.out)
    assert (found["steps"], found["trajectories"]) == (2, 96)
    assert found["score_after"] > found["score_before"] + 0.2
    first, second = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert (first["kept"], first["off_policy"], second["off_policy"]) == (48, 0, 0)
    rows = [json.loads(line) for line in (tmp_path / "run" / "rounds" / "1" / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 48
    assert all(len(row["input_ids"]) == len(row["labels"]) for row in rows)
