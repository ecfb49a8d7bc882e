"""What `agl-otel demo` prints of its scores."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agl_otel.cli.demo import _closing, _Demo  # pyright: ignore[reportPrivateUsage]  # the whole demo takes minutes: tests/system
from agl_otel.jobs.run import TaskResults


class NoTraining:
    """A job with four tasks to score."""

    def __init__(self) -> None:
        self.job = self

    def tasks(self, kind: str) -> list[int]:
        return [1, 2, 3, 4]


def test_a_score_is_printed_with_the_number_of_missing_rewards() -> None:
    console = Console(width=200)
    demo = _Demo(None, None, NoTraining(), console)
    with console.capture() as printed:
        demo._scored("before", TaskResults(["ro"] * 4, [1.0, 0.0, None, None], Counter(), 0, 0.0))  # pyright: ignore[reportPrivateUsage]
    assert "score before training: 0.250 on 4 tasks (2 without a reward count as 0)" in printed.get()


@pytest.mark.parametrize(("before", "after", "told"), [(0, 0, False), (2, 0, True), (0, 1, True)])
def test_the_closing_score_says_how_many_rewards_were_missing(before: int, after: int, told: bool) -> None:
    names = ("trajectories", "trajectories_in_clickhouse", "steps", "calls_equal_to_model_server", "calls_not_equal", "rollouts", "spans")
    result: dict[str, Any] = {**dict.fromkeys(names, 1), "max_ratio_error": 0.0, "verdicts": {}, "plot": "p", "seconds": 1.0}
    result |= {"data_dir": "data", "score_before": 0.25, "score_after": 0.75, "tasks_scored": 4, "rollout_shown": "ro-1"}
    console = Console(width=200)
    with console.capture() as printed:
        _closing({**result, "without_reward_before": before, "without_reward_after": after}, Path("data"), console)
    assert "0.25 → 0.75 on 4 held-out tasks" in printed.get()
    assert "agl-otel up --data-dir data" in printed.get() and "127.0.0.1:4748" in printed.get()
    assert (f"without a reward, which count as 0: {before} before, {after} after" in printed.get()) == told
