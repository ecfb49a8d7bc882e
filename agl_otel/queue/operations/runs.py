"""Runs: which one a rollout belongs to, and how many rollouts each has, as counters, so that no question has to group rollouts.

A counter's times and highest step are those of all the
rollouts that it ever counted, also of those that were deleted since: a run began when it began.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any, Final, NamedTuple, TypeGuard

from agl_otel.queue.engine import Transaction
from agl_otel.queue.proto import queue_pb2 as pb

LONGEST_NAME: Final = 256
"""Characters of a run's name in metadata; what is longer names none. (It is part of an index entry, which PostgreSQL bounds.)"""


def run_and_step(metadata: str | None, resources_id: str | None) -> tuple[str, int | None]:
    """(the run that metadata's `run` names, else the set of resources, else empty; the step that its `step` names)."""
    named: Any = None
    if metadata and any(word in metadata for word in ('"run"', '"step"', "\\u")):
        with contextlib.suppress(ValueError, RecursionError):  # what is no JSON names no run
            named = json.loads(metadata)
    run, step = (named.get("run"), named.get("step")) if isinstance(named, dict) else (None, None)
    is_number = isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 1 << 53
    return run if _is_name(run) else resources_id or "", step if is_number else None


def _is_name(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and 0 < len(value) <= LONGEST_NAME and not any("\ud800" <= each <= "\udfff" for each in value)


def query_runs(tx: Transaction, request: pb.QueryRunsRequest) -> pb.Runs:
    """How many rollouts each run has, by status and mode; of one run where it is named. Runs without any are left out."""
    of_run: dict[str, list[_Part]] = {}
    for row in tx.rows("runs_parts", {"run": _asked(request)}):
        part = _Part._make(row)
        of_run.setdefault(part.run, []).append(part)
    answer = pb.Runs()
    for parts in of_run.values():
        present = [part for part in parts if part.rollouts]
        first_start = min(part.first_start for part in parts)
        last_end = max((part.last_end for part in parts if part.last_end is not None), default=None)
        last_step = max((part.last_step for part in parts if part.last_step is not None), default=None)
        for part in present:
            answer.parts.add(**part._replace(first_start=first_start, last_end=last_end, last_step=last_step)._asdict())
    return answer


def query_run_members(tx: Transaction, request: pb.QueryRunsRequest) -> pb.RunMembers:
    """The rollouts of one run, as columns."""
    rows = tx.rows("run_members", {"run": _asked(request)})
    ids, steps, statuses, modes = zip(*rows, strict=True) if rows else ((), (), (), ())
    return pb.RunMembers(rollout_ids=ids, steps=steps, statuses=statuses, modes=modes)


class _Part(NamedTuple):
    """A row of `runs_parts`, which is a RunPart on the wire."""

    run: str
    status: str
    mode: str
    rollouts: int
    attempts: int
    first_start: float
    last_end: float | None
    last_step: int | None


def _asked(request: pb.QueryRunsRequest) -> str | None:
    return request.run if request.HasField("run") else None
