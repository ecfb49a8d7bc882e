"""Rollouts, attempts, workers: what is intended, and how it went.

Rules (who may go from which state to which) do not belong here: they live in queue/lifecycle.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Literal, NamedTuple

from pydantic import Field, model_validator

from agl_otel.errors import UsageError
from agl_otel.types.model import Model

UNRESPONSIVE_SECONDS: Final = 60.0  # twelve heartbeats of a runner
"""Silence after which jobs and `rollouts enqueue` take a runner for dead. RolloutConfig itself sets no bound, as in Agent Lightning 0.3."""

TaskInput = Any
"""What an agent is given to do: anything that is JSON."""
RolloutStatus = Literal["queuing", "preparing", "running", "failed", "succeeded", "cancelled", "requeuing"]
AttemptStatus = Literal["preparing", "running", "failed", "succeeded", "unresponsive", "timeout"]
RolloutMode = Literal["train", "val", "test", "production"]
ADOPTED: Final = "production"
NOT_RUN: Final = (
    f"the mode {ADOPTED} is of rollouts made from traces of a running product (AGL_UNIDENTIFIED=adopt), which no runner runs: "
    "use train, val or test"
)
"""The answer to callers that would queue or run rollouts of mode ADOPTED."""
WorkerStatus = Literal["idle", "busy", "unknown"]
VerdictKind = Literal["complete", "incomplete", "unproven", "empty"]
LedgerReach = Literal["hooked", "unhooked", "elsewhere"]
"""Whether the processes of an attempt keep a ledger: they do; they do not (no Python program that we start); they run where none is."""

TERMINAL_STATUSES: frozenset[RolloutStatus] = frozenset({"failed", "succeeded", "cancelled"})


def parse_labels(texts: Iterable[str]) -> dict[str, str]:
    """Labels as people type them, each as NAME=VALUE. Raises UsageError."""
    texts = [*texts]
    if wrong := [text for text in texts if "=" not in text]:
        raise UsageError(f"a label is NAME=VALUE, not {wrong[0]!r}")
    return dict(text.split("=", 1) for text in texts)


class RolloutConfig(Model):
    """How one rollout is run and retried."""

    timeout_seconds: float | None = Field(default=None, gt=0)
    """Counted from the start of each attempt."""
    unresponsive_seconds: float | None = Field(default=None, gt=0)
    """Longest silence (no span, no heartbeat) before the attempt counts as unresponsive."""
    max_attempts: int = Field(default=1, ge=1, lt=1 << 31)
    """The first attempt counts."""
    retry_condition: list[AttemptStatus] = Field(default_factory=list[AttemptStatus])


class Rollout(Model):
    """One task to be run by an agent, and how that went."""

    rollout_id: str
    input: TaskInput
    start_time: float
    end_time: float | None = None
    mode: RolloutMode | None = None
    resources_id: str | None = None
    resources_version: int | None = None
    """The version of the resources that was current at enqueue: what this rollout runs with, whatever comes later."""
    status: RolloutStatus = "queuing"
    config: RolloutConfig = Field(default_factory=RolloutConfig)
    metadata: dict[str, Any] | None = None
    priority: int = 0
    """Higher is claimed first; equal ones in the order of their enqueue."""
    not_before: float | None = None
    """Unix seconds before which it is not claimed."""
    labels: dict[str, str] | None = None
    """What a claim may ask for ({"gpu": "a100"}); None where there are none."""
    reason: str | None = None
    """Why it failed for good, in words for a person."""


class ProcessRecord(Model):
    """What one process of an attempt did, from the file that it counts in. Counts are of spans."""

    pid: int
    command: str = ""
    marker: str = ""
    """Empty: the hook was loaded in it, and it made no span."""
    begun: int = 0
    ended: int = 0
    """Of those begun, the ones that were handed to the exporter."""
    abandoned: int = 0
    """Of those begun, the ones that it will never export: still open when it closed, or sampled out."""
    dropped: int = 0
    """Of those ended, the ones that its exporter gave up."""
    closed: bool = False
    """Whether it ended in order; a process that was killed did not."""
    runner: bool = False
    """Whether it is the attempt's runner itself, which counts what it does for the attempt: rewards, and agents that are functions."""
    no_record: str = ""
    """Why it could not keep counts, in words for a person: it began a span, and only its seals say how many."""
    fork_without_record: str = ""
    """The same of a fork of it, of which nothing else may be known."""


class Answered(Model):
    """What a process had done for an attempt when it answered its runner by HTTP."""

    begun: int
    """How many spans it had begun."""
    streamed: bool = False
    """Whether it may have begun more before the end of its answer."""


class AttemptLedger(Model):
    """What a runner knows of the processes of an attempt when its agent has ended."""

    reach: LedgerReach
    command: str = ""
    """What was started; empty for agents that are no command."""
    processes: list[ProcessRecord] = Field(default_factory=list[ProcessRecord])
    answered: dict[str, Answered] = Field(default_factory=dict[str, Answered])
    """{process marker: what it said} of processes that keep no record here and that answered the runner by HTTP."""
    over: float | None = None
    """When the agent had ended or answered, by its runner's clock in Unix seconds; None where the runner died before."""
    problem: str | None = None
    """Why it could not be read, in words for a person."""


class Attempt(Model):
    """One try at a rollout."""

    rollout_id: str
    attempt_id: str
    sequence_id: int = Field(ge=1)
    start_time: float
    end_time: float | None = None
    status: AttemptStatus = "preparing"
    worker_id: str | None = None
    last_heartbeat_time: float | None = None
    metadata: dict[str, Any] | None = None
    seals: dict[str, int] | None = None
    """{process marker: spans ended} of its runner and the proxies, as the runner handed it over when the attempt ended; None before."""
    ledger: AttemptLedger | None = None
    """What its processes did, as its runner read it when the agent had ended; None before, and where nobody handed it in."""
    proxies: dict[str, str] | None = None
    """{process marker: address} of the proxy processes that forwarded calls of it."""
    error: str | None = None
    """Why it did not succeed, in words for a person."""


class AttemptedRollout(Rollout):
    """A rollout with one of its attempts: the claimed one, or the latest."""

    attempt: Attempt
    token: str | None = Field(default=None, repr=False)
    """Fencing token of the claim; only the claimer gets it."""

    @model_validator(mode="after")
    def _same_rollout(self) -> AttemptedRollout:
        if self.attempt.rollout_id != self.rollout_id:
            raise ValueError(f"attempt {self.attempt.attempt_id} belongs to rollout {self.attempt.rollout_id}, not to {self.rollout_id}")
        return self


class EnqueueRolloutRequest(Model):
    """What `enqueue` takes for one rollout; all but `input` is optional."""

    input: TaskInput
    mode: RolloutMode | None = None
    resources_id: str | None = None
    config: RolloutConfig | None = None
    metadata: dict[str, Any] | None = None
    rollout_id: str | None = None
    """The caller's own id; enqueueing an id that exists returns the rollout that is there."""
    priority: int = Field(default=0, ge=-(1 << 31), lt=1 << 31)
    not_before: float | None = None
    labels: dict[str, str] | None = None


class Worker(Model):
    """Somebody who claims rollouts."""

    worker_id: str
    status: WorkerStatus = "unknown"
    heartbeat_stats: dict[str, Any] | None = None
    last_heartbeat_time: float | None = None
    last_dequeue_time: float | None = None
    last_busy_time: float | None = None
    last_idle_time: float | None = None
    current_rollout_id: str | None = None
    current_attempt_id: str | None = None


class Verdict(Model):
    """Whether what was observed of one attempt is fit for training (contracts.md §6)."""

    rollout_id: str
    attempt_id: str
    kind: VerdictKind
    missing: int = 0
    """Spans and calls that are known to exist and are not stored."""
    reasons: list[str] = Field(default_factory=list[str])
    notes: list[str] = Field(default_factory=list[str])
    """What a person should know, and what is no reason against training on it."""
    alarm: bool = False
    """Unproven though the runner reported a hooked agent: something keeps its spans from being counted."""


class Run(Model):
    """Rollouts that belong together: those whose metadata names one `run`, or that share a set of resources."""

    run_id: str
    """Empty: those that have neither."""
    rollouts: int
    by_status: dict[RolloutStatus, int]
    by_mode: dict[str, int]
    """Under the empty name those without a mode."""
    attempts: int
    start_time: float
    """Of the first rollout."""
    end_time: float | None = None
    """Of the last one that ended."""
    last_step: int | None = None
    """The highest step that a rollout's metadata names."""


class RunMembers(NamedTuple):
    """The rollouts of a run as columns of one length, in the order of their creation."""

    rollout_ids: list[str]
    steps: list[int]
    """The step that made it; where nobody said, the version of its resources, and -1 where there are none."""
    statuses: list[str]
    modes: list[str]
    """Empty: none."""
