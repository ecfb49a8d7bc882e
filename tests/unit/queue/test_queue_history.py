"""The history checker of the fault tests finds every kind of fault."""

from __future__ import annotations

from typing import Any

import pytest

from agl_otel.types import Attempt, Rollout, RolloutConfig
from tests.system.queue_history import complaints

CONFIG = RolloutConfig(max_attempts=2, retry_condition=["failed", "unresponsive"])


def rollout(status: Any = "succeeded") -> Rollout:
    return Rollout(rollout_id="ro-1", input=1, start_time=0.0, status=status, config=CONFIG)


def attempt(number: int, status: Any, **more: Any) -> Attempt:
    return Attempt(rollout_id="ro-1", attempt_id=f"at-{number}", sequence_id=number, start_time=0.0, status=status, **more)


def claim(number: int, worker: str = "w") -> dict[str, Any]:
    return {"event": "claim", "worker": worker, "rollout": "ro-1", "attempt": f"at-{number}", "number": number}


def report(number: int, status: str, refused: str | None = None) -> dict[str, Any]:
    return {"event": "report", "attempt": f"at-{number}", "status": status, "refused": refused}


GOOD = ([claim(1), report(1, "failed"), claim(2), report(2, "succeeded")], [attempt(1, "failed"), attempt(2, "succeeded")])


def test_a_good_history_has_no_complaints() -> None:
    events, attempts = GOOD
    assert complaints(["ro-1"], events, [rollout()], attempts, {"ro-1": "succeeded"}) == []
    silent = attempt(2, "running", error="attempt at-2 (2 of 2) was silent for more than 2 s")
    assert complaints(["ro-1"], [claim(2)], [rollout("failed")], [attempt(1, "failed"), silent], {"ro-1": "failed"}) == []


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"enqueued": ["ro-1", "ro-2"]}, "ro-2 was acknowledged and is lost"),
        ({"reported": {"ro-1": "failed-not"}}, "was reported as failed-not"),
        ({"attempts": [attempt(2, "succeeded")]}, "numbered [2]"),
        ({"attempts": []}, "without any attempt"),
        ({"attempts": [*GOOD[1], attempt(3, "succeeded")]}, "3 attempts, 2 are allowed"),
        ({"attempts": [attempt(1, "timeout"), attempt(2, "succeeded")]}, "attempt 1 was retried although it is timeout"),
        ({"attempts": [attempt(1, "failed"), attempt(2, "failed")]}, "that makes failed"),
        ({"events": [claim(1), claim(1, "other")]}, "was given to w and to other"),
        ({"events": [claim(9)]}, "at-9 was given to w and is lost"),
        ({"events": [report(2, "failed")]}, "accepted as failed and is succeeded"),
        ({"events": [report(2, "failed", "FencedError")]}, "was refused (FencedError) and is succeeded"),
    ],
)
def test_each_kind_of_fault_is_found(change: dict[str, Any], complaint: str) -> None:
    events, attempts = GOOD
    asked: dict[str, Any] = {"enqueued": ["ro-1"], "events": events, "attempts": attempts, "reported": {"ro-1": "succeeded"}, **change}
    found = complaints(asked["enqueued"], asked["events"], [rollout()], asked["attempts"], asked["reported"])
    assert any(complaint in text for text in found), found
