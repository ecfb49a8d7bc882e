"""The history checker: compares the responses that clients got with the state of the queue at the end. Pure: lists in, complaints out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agl_otel.queue import lifecycle
from agl_otel.types import Attempt, AttemptStatus, Rollout

GIVEN_UP = ("timeout", "unresponsive")


def complaints(
    enqueued: Iterable[str],
    events: Iterable[Mapping[str, Any]],
    rollouts: Sequence[Rollout],
    attempts: Sequence[Attempt],
    reported: Mapping[str, str],
) -> list[str]:
    """Return the errors of a history, in words; an empty list if there are none.

    `enqueued`: ids that the queue acknowledged; `events`: the journals of the workers (queue_load.py; agents, which do not know their
    attempt's number, omit it); `reported`: {id: status} as returned by `wait`; `rollouts`, `attempts`: all, after every rollout has
    ended.
    """
    found = {rollout.rollout_id: rollout for rollout in rollouts}
    by_rollout: defaultdict[str, list[Attempt]] = defaultdict(list)
    for attempt in sorted(attempts, key=lambda attempt: attempt.sequence_id):
        by_rollout[attempt.rollout_id].append(attempt)
    events = [*events]
    wrong = [f"rollout {name} was acknowledged and is lost" for name in enqueued if name not in found]
    for name, ended_as in reported.items():  # a late success of the last attempt counts, as in 0.3
        if found[name].status != ended_as and (ended_as, found[name].status) != ("failed", "succeeded"):
            wrong.append(f"{name} was reported as {ended_as} and is {found[name].status}")
    for rollout in rollouts:
        wrong += _status_follows_attempts(rollout, by_rollout[rollout.rollout_id])
    return wrong + _no_attempt_claimed_twice(events, attempts) + _accepted_reports_are_stored(events, attempts)


def _status_follows_attempts(rollout: Rollout, attempts: Sequence[Attempt]) -> list[str]:
    """Check that attempts are numbered without gaps and within limits, that all but the last were retryable, and the last decides."""
    name, config = rollout.rollout_id, rollout.config
    numbers = [attempt.sequence_id for attempt in attempts]
    wrong: list[str] = []
    if numbers != [*range(1, len(numbers) + 1)]:
        return [f"{name}: attempts are numbered {numbers}"]
    if not attempts:
        return [f"{name}: {rollout.status} without any attempt"]
    if len(attempts) > config.max_attempts:
        wrong.append(f"{name}: {len(attempts)} attempts, {config.max_attempts} are allowed")
    outcomes: list[AttemptStatus] = [_outcome(attempt) for attempt in attempts]
    for number, outcome in enumerate(outcomes[:-1], 1):
        if outcome not in config.retry_condition:
            wrong.append(f"{name}: attempt {number} was retried although it is {outcome}")
    policy = lifecycle.Policy(config.timeout_seconds, config.unresponsive_seconds, config.max_attempts, tuple(config.retry_condition))
    expected = lifecycle.propagate(outcomes[-1], sequence_id=len(attempts), policy=policy)
    if rollout.status != expected:
        wrong.append(f"{name}: {rollout.status}, and its last attempt of {len(attempts)} {outcomes[-1]}: that makes {expected}")
    return wrong


def _outcome(attempt: Attempt) -> AttemptStatus:
    """Return an attempt's outcome in a finished rollout: a late span sets an unresponsive one to running, without other effects."""
    silent = attempt.status == "running" and attempt.error is not None and "was silent" in attempt.error
    return "unresponsive" if silent else attempt.status


def _no_attempt_claimed_twice(events: Sequence[Mapping[str, Any]], attempts: Sequence[Attempt]) -> list[str]:
    known = {attempt.attempt_id: attempt for attempt in attempts}
    holders: dict[str, str] = {}
    wrong: list[str] = []
    for event in events:
        if event["event"] != "claim":
            continue
        attempt, worker = event["attempt"], event["worker"]
        if attempt in holders:
            wrong.append(f"attempt {attempt} was given to {holders[attempt]} and to {worker}")
        holders[attempt] = worker
        if attempt not in known:
            wrong.append(f"attempt {attempt} was given to {worker} and is lost")
        elif (known[attempt].rollout_id, known[attempt].sequence_id) != (event["rollout"], event.get("number", known[attempt].sequence_id)):
            wrong.append(f"attempt {attempt} is another one than {worker} was given")
    return wrong


def _accepted_reports_are_stored(events: Sequence[Mapping[str, Any]], attempts: Sequence[Attempt]) -> list[str]:
    known = {attempt.attempt_id: attempt for attempt in attempts}
    wrong: list[str] = []
    for event in events:
        if event["event"] != "report" or event["attempt"] not in known:
            continue
        status = _outcome(known[event["attempt"]])
        if event["refused"] is None and status != event["status"]:
            wrong.append(f"attempt {event['attempt']} was accepted as {event['status']} and is {status}")
        if event["refused"] is not None and status not in GIVEN_UP:
            wrong.append(f"attempt {event['attempt']} was refused ({event['refused']}) and is {status}")
    return wrong
