"""Rollouts, attempts and workers: what is intended, and its outcome.

The state machine does not belong here: see queue/lifecycle.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Literal, NamedTuple

from pydantic import Field, model_validator

from agl_otel.errors import UsageError
from agl_otel.types.model import Model

UNRESPONSIVE_SECONDS: Final = 60.0  # twelve heartbeats of a runner
"""Silence after which jobs and `rollouts enqueue` consider a runner dead. RolloutConfig itself sets no bound, as in Agent Lightning 0.3."""

TaskInput = Any
"""An agent's task: any JSON value."""
RolloutStatus = Literal["queuing", "preparing", "running", "failed", "succeeded", "cancelled", "requeuing"]
AttemptStatus = Literal["preparing", "running", "failed", "succeeded", "unresponsive", "timeout"]
RolloutMode = Literal["train", "val", "test", "production"]
ADOPTED: Final = "production"
NOT_RUN: Final = (
    f"the mode {ADOPTED} is of rollouts made from traces of a running product (AGL_UNIDENTIFIED=adopt), which no runner runs: "
    "use train, val or test"
)
"""The error for callers that try to queue or run rollouts of mode ADOPTED."""
WorkerStatus = Literal["idle", "busy", "unknown"]
VerdictKind = Literal["complete", "incomplete", "unproven", "empty"]
TAKEN_VERDICTS: Final[tuple[VerdictKind, ...]] = ("complete", "unproven")
"""Verdicts of the attempts that training takes, unless it is told otherwise."""
LedgerReach = Literal["hooked", "unhooked", "elsewhere"]
"""Whether the processes of an attempt keep a ledger: they do; they do not (not a Python program started by the runner); they run out of
its reach."""

TERMINAL_STATUSES: frozenset[RolloutStatus] = frozenset({"failed", "succeeded", "cancelled"})
RUN_LABEL: Final = "agl.run"
"""The label with the id of the training run that enqueued a rollout. A claim with this label also takes rollouts without it."""
TRIAL: Final = "agl.trial"
"""The key in the metadata of a trial: the command that made it (`run`, `doctor`)."""
TRIALS: Final = "trials"
"""The run that all trials are of."""


def parse_labels(texts: Iterable[str]) -> dict[str, str]:
    """Parse labels given as NAME=VALUE. Raises UsageError."""
    texts = [*texts]
    if wrong := [text for text in texts if "=" not in text]:
        raise UsageError(f"a label is NAME=VALUE, not {wrong[0]!r}")
    return dict(text.split("=", 1) for text in texts)


class RolloutConfig(Model):
    """How one rollout is run and retried."""

    timeout_seconds: float | None = Field(default=None, gt=0)
    """From the start of each attempt."""
    unresponsive_seconds: float | None = Field(default=None, gt=0)
    """Longest silence (no span, no heartbeat) before the attempt counts as unresponsive."""
    max_attempts: int = Field(default=1, ge=1, lt=1 << 31)
    """Including the first."""
    retry_condition: list[AttemptStatus] = Field(default_factory=list[AttemptStatus])


class Rollout(Model):
    """One task to be run by an agent, and its outcome."""

    rollout_id: str
    input: TaskInput
    start_time: float
    """When it was queued (the name is Agent Lightning 0.3's); that of its attempt is when a runner began it."""
    end_time: float | None = None
    mode: RolloutMode | None = None
    resources_id: str | None = None
    resources_version: int | None = None
    """The version of the resources that was current at enqueue; later versions do not affect this rollout."""
    status: RolloutStatus = "queuing"
    config: RolloutConfig = Field(default_factory=RolloutConfig)
    metadata: dict[str, Any] | None = None
    priority: int = 0
    """Higher ones are claimed first, equal ones in the order of their enqueue."""
    not_before: float | None = None
    """Unix seconds before which it is not claimed."""
    labels: dict[str, str] | None = None
    """Labels by which claims may filter ({"gpu": "a100"}); None: no labels."""
    reason: str | None = None
    """Message why it finally failed."""


class ProcessRecord(Model):
    """One process's counts of spans for an attempt, from its ledger file."""

    pid: int
    command: str = ""
    marker: str = ""
    """Empty: the hook was loaded, but the process made no span."""
    begun: int = 0
    ended: int = 0
    """Begun spans that were passed to the exporter."""
    abandoned: int = 0
    """Begun spans that will never be exported: still open at the end, or not sampled."""
    dropped: int = 0
    """Ended spans that the exporter dropped."""
    closed: bool = False
    """Whether the process ended normally, not by a kill."""
    runner: bool = False
    """Whether it is the attempt's runner, which counts its own spans: rewards, and those of function agents."""
    no_record: str = ""
    """Message why a process with spans could not keep a ledger; then only its seals count them."""
    fork_without_record: str = ""
    """Message why a fork of it could not; nothing else may be known of the fork."""


class Answered(Model):
    """A process's counts for an attempt when it answered the runner's HTTP request."""

    begun: int
    """How many spans it had begun."""
    streamed: bool = False
    """Whether the answer was streamed, so that more spans may have begun before its end."""


class AttemptLedger(Model):
    """A runner's summary of the processes of an attempt after its agent has ended."""

    reach: LedgerReach
    command: str = ""
    """The command that was started; empty for other agents."""
    processes: list[ProcessRecord] = Field(default_factory=list[ProcessRecord])
    answered: dict[str, Answered] = Field(default_factory=dict[str, Answered])
    """{process marker: counts} of processes without a ledger file here that answered the runner by HTTP."""
    over: float | None = None
    """When the agent ended or answered, by the runner's clock in Unix seconds; None if the runner died before."""
    problem: str | None = None
    """Message why the ledger could not be read."""


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
    """{process marker: spans ended} of the runner and the proxies, as the runner reported at the end of the attempt; None before."""
    ledger: AttemptLedger | None = None
    """The runner's summary of its processes after the agent ended; None before, and if no runner reported it."""
    proxies: dict[str, str] | None = None
    """{process marker: address} of the proxy processes that forwarded its calls."""
    error: str | None = None
    """Message why it did not succeed."""


def is_trial(rollout: Rollout) -> bool:
    """Whether a rollout only tries an agent out. Trials are not data: exports and trainings take none that they are not given by id."""
    return TRIAL in (rollout.metadata or {})


class AttemptedRollout(Rollout):
    """A rollout with one of its attempts: the claimed one, or the latest."""

    attempt: Attempt
    token: str | None = Field(default=None, repr=False)
    """Fencing token of the claim, given only to the claimer."""

    @model_validator(mode="after")
    def _same_rollout(self) -> AttemptedRollout:
        if self.attempt.rollout_id != self.rollout_id:
            raise ValueError(f"attempt {self.attempt.attempt_id} belongs to rollout {self.attempt.rollout_id}, not to {self.rollout_id}")
        return self


class EnqueueRolloutRequest(Model):
    """One rollout to enqueue; all fields but `input` are optional."""

    input: TaskInput
    mode: RolloutMode | None = None
    resources_id: str | None = None
    config: RolloutConfig | None = None
    metadata: dict[str, Any] | None = None
    rollout_id: str | None = None
    """The caller's own id; enqueueing a known id returns the existing rollout."""
    priority: int = Field(default=0, ge=-(1 << 31), lt=1 << 31)
    not_before: float | None = None
    labels: dict[str, str] | None = None


class Worker(Model):
    """A worker of a runner, which claims rollouts."""

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
    """Whether the observations of one attempt are fit for training (docs/traces.md)."""

    rollout_id: str
    attempt_id: str
    kind: VerdictKind
    missing: int = 0
    """Number of spans and calls known to exist but not stored."""
    reasons: list[str] = Field(default_factory=list[str])
    notes: list[str] = Field(default_factory=list[str])
    """Remarks for a person that do not speak against training."""
    alarm: bool = False
    """Whether it is unproven although the agent ran under the hook: something prevents the counting of its spans."""


class Run(Model):
    """Rollouts with the same `run` in their metadata, or else with the same resources_id."""

    run_id: str
    """Empty: the rollouts with neither."""
    rollouts: int
    by_status: dict[RolloutStatus, int]
    by_mode: dict[str, int]
    """Rollouts without a mode count under the empty name."""
    attempts: int
    start_time: float
    """The start of the first rollout."""
    end_time: float | None = None
    """The end of the rollout that ended last."""
    last_step: int | None = None
    """The highest step in its rollouts' metadata."""


class RunMembers(NamedTuple):
    """The rollouts of a run as columns, in the order of their creation."""

    rollout_ids: list[str]
    steps: list[int]
    """The `step` of the rollout's metadata, else the version of its resources, else -1."""
    statuses: list[str]
    modes: list[str]
    """Empty: none."""
