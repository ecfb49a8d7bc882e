"""The state machine as a truth table: every rule for every status."""

from __future__ import annotations

from typing import get_args

import pytest

from agl_otel.queue.lifecycle import (
    ACTIVE,
    FINISHED,
    OPEN,
    QUEUED,
    Policy,
    ends_attempt,
    must_end,
    observed,
    overdue,
    propagate,
    refusal,
    replaced,
    worker_status,
)
from agl_otel.types import AttemptStatus, RolloutStatus, WorkerStatus

ATTEMPT: tuple[AttemptStatus, ...] = get_args(AttemptStatus)
ROLLOUT: tuple[RolloutStatus, ...] = get_args(RolloutStatus)
FAILURES: tuple[AttemptStatus, ...] = ("failed", "timeout", "unresponsive")


def test_every_rollout_status_is_queued_active_or_finished() -> None:
    assert sorted([*QUEUED, *ACTIVE, *FINISHED]) == sorted(ROLLOUT)


@pytest.mark.parametrize("status", ["preparing", "running", "succeeded"])
def test_progress_and_success_are_copied_to_the_rollout(status: AttemptStatus) -> None:
    assert propagate(status, sequence_id=1, policy=Policy()) == status


@pytest.mark.parametrize("status", FAILURES)
@pytest.mark.parametrize(("number", "expected"), [(1, "requeuing"), (2, "requeuing"), (3, "failed"), (4, "failed")])
def test_a_failure_in_the_retry_condition_requeues_until_max_attempts(status: AttemptStatus, number: int, expected: str) -> None:
    assert propagate(status, sequence_id=number, policy=Policy(max_attempts=3, retry_condition=FAILURES)) == expected


@pytest.mark.parametrize("status", FAILURES)
def test_a_failure_outside_the_retry_condition_fails_the_rollout(status: AttemptStatus) -> None:
    others = tuple(other for other in FAILURES if other != status)
    assert propagate(status, sequence_id=1, policy=Policy(max_attempts=9, retry_condition=others)) == "failed"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("preparing", "running"),
        ("unresponsive", "running"),
        ("running", "running"),
        ("failed", "failed"),
        ("succeeded", "succeeded"),
        ("timeout", "timeout"),
    ],
)
def test_a_span_starts_or_revives_an_attempt_but_never_reopens_one(before: AttemptStatus, after: AttemptStatus) -> None:
    assert observed(before, "running", latest=True) == (after, "running")


@pytest.mark.parametrize("rollout", ROLLOUT)
def test_a_span_of_the_latest_attempt_moves_only_preparing_and_requeuing_rollouts(rollout: RolloutStatus) -> None:
    expected = "running" if rollout in ("preparing", "requeuing") else rollout
    assert observed("preparing", rollout, latest=True) == ("running", expected)


@pytest.mark.parametrize("rollout", sorted(QUEUED))
@pytest.mark.parametrize("attempt", ["failed", "succeeded", "timeout", "running"])
def test_a_span_that_starts_no_attempt_leaves_rollouts_in_the_queue(attempt: AttemptStatus, rollout: RolloutStatus) -> None:
    assert observed(attempt, rollout, latest=True) == (attempt, rollout)


@pytest.mark.parametrize("rollout", ROLLOUT)
def test_a_span_of_an_older_attempt_never_moves_the_rollout(rollout: RolloutStatus) -> None:
    for attempt in ATTEMPT:
        assert observed(attempt, rollout, latest=False) == (attempt, rollout)


@pytest.mark.parametrize("attempt", ATTEMPT)
def test_a_replaced_attempt_is_closed(attempt: AttemptStatus) -> None:
    assert replaced(attempt) == ("failed" if attempt in ("preparing", "running") else attempt)
    assert observed(replaced(attempt), "running", latest=False)[0] not in OPEN


@pytest.mark.parametrize(
    ("policy", "heartbeat", "expected"),
    [
        (Policy(), None, None),
        (Policy(timeout_seconds=10), 110.0, None),
        (Policy(timeout_seconds=9), 110.0, "timeout"),
        (Policy(unresponsive_seconds=10), None, None),
        (Policy(unresponsive_seconds=9), None, "unresponsive"),
        (Policy(unresponsive_seconds=9), 101.0, None),
        (Policy(unresponsive_seconds=9), 100.9, "unresponsive"),
        (Policy(timeout_seconds=9, unresponsive_seconds=5), None, "timeout"),
        (Policy(timeout_seconds=11, unresponsive_seconds=5), None, "unresponsive"),
    ],
)
def test_the_watchdog_checks_the_timeout_before_the_silence(
    policy: Policy, heartbeat: float | None, expected: AttemptStatus | None
) -> None:
    assert overdue(policy, started=100.0, last_heartbeat=heartbeat, now=110.0) == expected


@pytest.mark.parametrize(
    ("attempt", "worker"),
    [
        ("preparing", "busy"),
        ("running", "busy"),
        ("succeeded", "idle"),
        ("failed", "idle"),
        ("timeout", "unknown"),
        ("unresponsive", "unknown"),
    ],
)
def test_a_workers_status_follows_its_attempt(attempt: AttemptStatus, worker: WorkerStatus) -> None:
    assert worker_status(attempt) == worker


@pytest.mark.parametrize("status", ATTEMPT)
def test_only_success_and_failure_set_an_attempts_end_time(status: AttemptStatus) -> None:
    assert ends_attempt(status) == (status in ("succeeded", "failed"))


@pytest.mark.parametrize("rollout", ROLLOUT)
def test_a_token_is_refused_after_a_newer_attempt_or_a_cancellation_only(rollout: RolloutStatus) -> None:
    assert (refusal(latest=True, rollout=rollout) is None) == (rollout != "cancelled")
    assert refusal(latest=False, rollout=rollout) is not None


@pytest.mark.parametrize("attempt", ATTEMPT)
@pytest.mark.parametrize("rollout", ROLLOUT)
@pytest.mark.parametrize("latest", [True, False])
def test_a_worker_must_end_cancelled_timed_out_and_replaced_attempts(attempt: AttemptStatus, rollout: RolloutStatus, latest: bool) -> None:
    assert must_end(attempt, rollout, latest=latest) == (not latest or rollout == "cancelled" or attempt == "timeout")
