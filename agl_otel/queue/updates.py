"""The client's arguments: changes of rollouts and attempts, and observations. Fields that are left out stay unchanged."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from agl_otel.queue.convert import config_to_pb, to_json
from agl_otel.queue.proto import queue_pb2 as pb
from agl_otel.types import AttemptLedger, AttemptStatus, RolloutConfig, RolloutMode, RolloutStatus
from agl_otel_hook.well_formed import mended


class _Keep:
    """The type of KEEP."""

    def __repr__(self) -> str:
        return "KEEP"


KEEP: Final = _Keep()
"""Leaves the input unchanged (None is a valid input)."""


@dataclass(frozen=True, kw_only=True)
class RolloutUpdate:
    """A change of one rollout; `clear` names fields that become null (mode, resources_id, config, metadata, not_before)."""

    rollout_id: str
    status: RolloutStatus | None = None
    input: Any = KEEP
    mode: RolloutMode | None = None
    resources_id: str | None = None
    config: RolloutConfig | None = None
    metadata: Mapping[str, Any] | None = None
    priority: int | None = None
    not_before: float | None = None
    clear: Collection[str] = ()

    def to_pb(self) -> pb.RolloutUpdate:
        """This change on the wire."""
        return pb.RolloutUpdate(
            rollout_id=self.rollout_id,
            input_json=None if self.input is KEEP else to_json(self.input, "a rollout's input"),
            mode=self.mode,
            resources_id=self.resources_id,
            status=self.status,
            config=None if self.config is None else config_to_pb(self.config),
            metadata_json=None if self.metadata is None else to_json(dict(self.metadata), "a rollout's metadata"),
            clear=self.clear,
            priority=self.priority,
            not_before=self.not_before,
        )


@dataclass(frozen=True, kw_only=True)
class AttemptUpdate:
    """A change of one attempt (`attempt_id` may be "latest"). With its claim's `token` it is fenced: refused once the claim is void.

    `seals` is {process marker: spans ended}; `ledger` is the runner's summary of the attempt's ledger files;
    `clear` names fields that become null (metadata, worker_id, error, seals, …).
    """

    rollout_id: str
    attempt_id: str
    status: AttemptStatus | None = None
    seals: Mapping[str, int] | None = None
    ledger: AttemptLedger | None = None
    error: str | None = None
    token: str | None = None
    worker_id: str | None = None
    metadata: Mapping[str, Any] | None = None
    last_heartbeat_time: float | None = None
    clear: Collection[str] = ()

    def to_pb(self) -> pb.AttemptUpdate:
        """This change on the wire."""
        return pb.AttemptUpdate(
            rollout_id=self.rollout_id,
            attempt_id=self.attempt_id,
            status=self.status,
            worker_id=self.worker_id,
            last_heartbeat_time=self.last_heartbeat_time,
            metadata_json=None if self.metadata is None else to_json(dict(self.metadata), "an attempt's metadata"),
            seals=None if self.seals is None else dict(self.seals),
            has_seals=self.seals is not None,
            ledger_json=None if self.ledger is None else self.ledger.model_dump_json(exclude_defaults=True),
            error=None if self.error is None else mended(self.error),  # it may quote agents and servers
            token=self.token,
            clear=self.clear,
        )


class Witness(NamedTuple):
    """Report that a proxy process, with this marker and address, is about to forward calls of an attempt."""

    rollout_id: str
    attempt_id: str
    marker: str
    address: str


@dataclass(frozen=True)
class Observation:
    """Report that spans of an attempt were received; 0 spans: only a heartbeat (attempt spans, seals). `received_at` is Unix seconds."""

    rollout_id: str
    attempt_id: str
    spans: int
    received_at: float

    def to_pb(self) -> pb.Observation:
        """This observation on the wire."""
        return pb.Observation(rollout_id=self.rollout_id, attempt_id=self.attempt_id, spans=self.spans, received_at=self.received_at)
