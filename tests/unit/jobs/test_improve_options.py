"""What does not go together in a job with [improve] is named, with its remedy, before anything is started."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from agl_otel.jobs.check import check_job
from agl_otel.jobs.job import Job
from tests.improve_world import EXAMPLE, PROMPTS, changed

LLM = '{ resource_type = "llm", endpoint = "http://127.0.0.1:1/v1", model = "m" }'


def job(folder: Path, example: Path, lines: dict[str, str]) -> Path:
    """Copy an example with other lines in its job file."""
    shutil.copytree(example, folder / "job", ignore=shutil.ignore_patterns("__pycache__", "*.jsonl"))
    path = folder / "job" / "job.toml"
    path.write_text(changed(path.read_text(), lines))
    return path


@pytest.mark.parametrize("example", [EXAMPLE, PROMPTS])
async def test_the_examples_are_accepted(tmp_path: Path, example: Path) -> None:
    found = await check_job(job(tmp_path, example, {}))
    assert (found.problems, found.warnings) == ([], [])


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ({"improve.backtest": '"better"'}, r'^\[improve\] backtest = "better": logged attempts say nothing .*give held_out = "better"$'),
        ({"improve.trusted_sources": '["ann"]'}, r"^\[improve\] trusted_sources: .*leave them out, and let \[data\] val"),
        ({"improve.max_drift": "0.5"}, r"^\[improve\] max_drift: .*leave it out$"),
        ({"resources.other": LLM}, r"^\[resources\] has 2 LLMs: with \[improve\] it must have one"),
        ({"resources.main_llm": '"no model"'}, r"^\[resources\] has 0 LLMs: .*give it, as NAME = \{"),
        ({"resources.promoted": '"text"'}, r"^\[resources\] promoted: .*choose others$"),
        ({"improve.reward_sources": '"users"'}, r"^\[improve\] reward_sources = \"users\": it must be a list"),
        (
            {"agent.function": '"agent.py:of_digit"'},
            r"^\[agent\] function: of_digit takes digit, wanted.*task's keys input, messages, expected",
        ),
    ],
)
async def test_a_job_with_prompts_that_cannot_be_improved_is_refused(tmp_path: Path, lines: dict[str, str], says: str) -> None:
    path = job(tmp_path, PROMPTS, lines)
    if "agent.function" in lines:
        (path.parent / "agent.py").write_text("def of_digit(digit, wanted): ...\n")
        (path.parent / "tasks.py").write_text('def val(): return [{"digit": 1, "wanted": "2"}]\n')
    (problem,) = (await check_job(path)).problems
    assert re.search(says, problem), problem


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (
            {"improve.reward_sources": '["users"]'},
            r"reward_sources are for searches for prompts: name them in reward_sources of \[algorithm\]",
        ),
        ({"improve.trusted_sources": '["users"]'}, r"both name \['users'\]: leave it out of one"),
    ],
)
async def test_a_job_with_weights_that_cannot_be_improved_is_refused(tmp_path: Path, lines: dict[str, str], says: str) -> None:
    (problem,) = (await check_job(job(tmp_path, EXAMPLE, lines))).problems
    assert re.search(says, problem), problem


def test_the_rewards_that_count_are_named_where_the_algorithm_has_no_option_for_them(tmp_path: Path) -> None:
    found = Job.load(job(tmp_path, PROMPTS, {"improve.reward_sources": '["users"]'}))
    assert found.improve is not None and found.improve.reward_sources == ["users"] and "reward_sources" not in found.options
