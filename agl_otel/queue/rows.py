"""The rows of each table in memory: named tuples whose fields are in the order of every query's columns.

`COLUMNS` expands `{rollout}`, `{attempt}` … in the .sql files, so that queries and rows cannot drift apart.
"""

from __future__ import annotations

import json
from typing import Final, NamedTuple, cast

from agl_otel.queue.lifecycle import Policy
from agl_otel.types import AttemptStatus, RolloutStatus, WorkerStatus


class RolloutRow(NamedTuple):
    """A rollout without its input."""

    ordinal: int
    rollout_id: str
    status: RolloutStatus
    mode: str | None
    priority: int
    position: int | None
    not_before: float | None
    start_time: float
    end_time: float | None
    resources_id: str | None
    resources_version: int | None
    timeout_seconds: float | None
    unresponsive_seconds: float | None
    max_attempts: int
    retry_condition: str
    attempt_count: int
    latest_attempt_id: str | None
    labels: str | None
    reason: str | None
    metadata: str | None
    run: str
    """See transitions.run_and_step; empty: none."""
    step: int | None

    @property
    def policy(self) -> Policy:
        """The rules by which it times out and is retried."""
        condition = () if self.retry_condition == "[]" else tuple(cast("list[str]", json.loads(self.retry_condition)))
        return Policy(self.timeout_seconds, self.unresponsive_seconds, self.max_attempts, condition)


class AttemptRow(NamedTuple):
    """An attempt."""

    attempt_id: str
    rollout_id: str
    sequence_id: int
    status: AttemptStatus
    start_time: float
    end_time: float | None
    worker_id: str | None
    last_heartbeat_time: float | None
    token: str
    seals: str | None
    error: str | None
    metadata: str | None
    ledger: str | None = None
    proxies: str | None = None


class WorkerRow(NamedTuple):
    """A worker."""

    worker_id: str
    status: WorkerStatus
    heartbeat_stats: str | None
    last_heartbeat_time: float | None
    last_dequeue_time: float | None
    last_busy_time: float | None
    last_idle_time: float | None
    current_rollout_id: str | None
    current_attempt_id: str | None


class ResourcesRow(NamedTuple):
    """One version of a set of resources."""

    resources_id: str
    version: int
    create_time: float
    update_time: float
    resources: str


class InputRow(NamedTuple):
    """The input of a rollout, as JSON text."""

    ordinal: int
    input: str


Row = RolloutRow | AttemptRow | ResourcesRow | InputRow
ROLLOUT_WIDTH: Final = len(RolloutRow._fields)
ATTEMPT_WIDTH: Final = len(AttemptRow._fields)
COLUMNS: Final[dict[str, str]] = {
    "{rollout}": ", ".join(f"r.{name}" for name in RolloutRow._fields),
    "{attempt}": ", ".join(f"a.{name}" for name in AttemptRow._fields),
    "{worker}": ", ".join(f"w.{name}" for name in WorkerRow._fields),
    "{resources}": ", ".join(f"s.{name}" for name in ResourcesRow._fields),
}
