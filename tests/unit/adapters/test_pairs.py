"""Which attempts of a task are paired by their rewards."""

from __future__ import annotations

from collections import Counter
from typing import Any

from agl_otel.adapters.pairs import best_and_worst


def row(attempt: str, reply: str, reward: float) -> dict[str, Any]:
    return {"rollout_id": "ro-1", "attempt_id": attempt, "reply": reply, "reward": reward}


def paired(*rows: dict[str, Any]) -> tuple[list[tuple[str, str]], dict[str, int]]:
    refused = Counter[str]()
    found = best_and_worst(rows, {"ro-1": "task"}, lambda _: "prompt", refused, reply_of=lambda row: row["reply"])
    return [(best["attempt_id"], worst["attempt_id"]) for best, worst in found], dict(refused)


def test_the_best_and_the_worst_of_a_task_are_a_pair() -> None:
    assert paired(row("at-1", "no", 0.0), row("at-2", "yes", 1.0), row("at-3", "perhaps", 0.5)) == ([("at-2", "at-1")], {})


def test_equal_rewards_and_single_attempts_are_counted() -> None:
    assert paired(row("at-1", "no", 1.0), row("at-2", "yes", 1.0)) == ([], {"no_pair": 2})
    assert paired(row("at-1", "no", 1.0)) == ([], {"no_other_attempt": 1})


def test_one_reply_that_was_rewarded_in_two_ways_is_no_pair() -> None:
    assert paired(row("at-1", "yes", 0.0), row("at-2", "yes", 1.0)) == ([], {"same_reply": 2})
