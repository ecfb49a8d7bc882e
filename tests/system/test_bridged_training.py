"""GRPO on conversations whose template changes each answer: one sample each, by what the model server says it sampled."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from agl_otel.cli import main

pytest.importorskip("torch", reason="needs the [train] extra")
pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]


def test_each_split_of_a_conversation_names_the_bridge_that_was_refused(tmp_path: Path, tiny_policy: Path) -> None:
    from tests.bridged_job import make_job

    job = make_job(tmp_path, tiny_policy, "keep", prompts_per_step=1, group_size=2, max_steps=1)
    agent = tmp_path / "agent.py"
    agent.write_text(agent.read_text().replace('"content": said[-1]', '"content": said[-1], "reasoning_content": "its own"'))
    run = tmp_path / "run"
    with pytest.raises(SystemExit) as ended:
        main(["train", str(job), "--run-dir", str(run), "--data-dir", str(tmp_path / "data")])
    assert ended.value.code == 0
    (step,) = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    assert set(step["breaks"]) == {"unbridged_edited"}, step["breaks"]


def test_a_bridged_conversation_is_one_sample(tmp_path: Path, tiny_policy: Path) -> None:
    from tests.bridged_job import QUESTIONS, make_job

    job = make_job(tmp_path, tiny_policy, "keep", prompts_per_step=4, group_size=2, max_steps=1)
    run = tmp_path / "run"
    with pytest.raises(SystemExit) as ended:
        main(["train", str(job), "--run-dir", str(run), "--data-dir", str(tmp_path / "data")])
    assert ended.value.code == 0
    (step,) = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    assert (step["trajectories"], step["calls_trained"], step["breaks"]) == (8, 8 * QUESTIONS, {})
    assert step["max_ratio_error"] < 1e-4
    calls = [json.loads(line) for line in (run / "model_server.jsonl").read_text().splitlines()]
    begun = Counter(tuple(call["prompt_token_ids"]) for call in calls)
    ends = {(*call["prompt_token_ids"], *call["response_token_ids"]) for call in calls}
    continued = [prompt for prompt in begun if any(prompt[: len(end)] == end for end in ends)]
    assert sum(begun[prompt] for prompt in continued) == len(calls) * (QUESTIONS - 1) // QUESTIONS
