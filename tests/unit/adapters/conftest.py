from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from agl_otel.types import Attempt, AttemptedRollout, Rollout, RolloutStatus, Verdict, VerdictKind
from agl_otel.types.columns import AttemptKey, CallColumns, Ragged, Reward, Traces
from agl_otel.types.sampling import NEUTRAL, Contract


@dataclass
class CallRow:
    """One stored (call, choice), with a response and log-probs by default."""

    rollout: str = "ro-1"
    attempt: str = "at-1"
    process: str = "m1"
    call: int = 1
    choice: int = 0
    prompt: Sequence[int] = (1, 2, 3)
    response: Sequence[int] = (7, 8)
    logprobs: Sequence[float] | None = None
    prefix: tuple[int, int] = (0, 0)
    version: str = "1"
    agent: str = ""
    incomplete: str = ""
    truncated: bool = False
    temperature: float = 1.0
    """NaN: its span does not say."""
    top_p: float = 1.0
    constrained: bool = False
    """By a tool choice of the agent's."""
    unrecorded: bool = False


def contract_of(row: CallRow) -> str:
    """The contract of a call whose agent set these parameters; the resource sent the neutral ones."""
    if row.unrecorded:
        return ""
    given = {"temperature": row.temperature, "top_p": row.top_p} | ({"tool_choice": "required"} if row.constrained else {})
    asked = {name: value for name, value in given.items() if value == value}
    return Contract.of(asked, NEUTRAL, logprobs="processed").dumps()


def call_columns(rows: Sequence[CallRow]) -> CallColumns:
    rows = sorted(rows, key=lambda r: (r.rollout, r.attempt, r.process, r.call, r.choice))
    logprobs: list[Any] = [[-0.5] * len(r.response) if r.logprobs is None else r.logprobs for r in rows]
    return CallColumns(
        rollout_id=[r.rollout for r in rows],
        attempt_id=[r.attempt for r in rows],
        process=[r.process for r in rows],
        span_id=[f"s{i}" for i in range(len(rows))],
        parent_span_id=["" for _ in rows],
        call=np.array([r.call for r in rows], np.int64),
        choice=np.array([r.choice for r in rows], np.int64),
        sequence=np.arange(1, len(rows) + 1, dtype=np.uint64),
        prefix_call=np.array([r.prefix[0] for r in rows], np.int64),
        prefix_choice=np.array([r.prefix[1] for r in rows], np.int64),
        prompt=Ragged.from_rows([r.prompt for r in rows], np.int32),
        response=Ragged.from_rows([r.response for r in rows], np.int32),
        logprobs=Ragged.from_rows(logprobs, np.float32),
        model_version=[r.version for r in rows],
        agent=[r.agent for r in rows],
        incomplete=[r.incomplete for r in rows],
        truncated=np.array([r.truncated for r in rows], np.bool_),
        temperature=np.array([r.temperature for r in rows], np.float64),
        contract=[contract_of(r) for r in rows],
        top_p=np.array([r.top_p for r in rows], np.float64),
    )


@dataclass
class TracesBuilder:
    """Builds traces of calls: one succeeded rollout per rollout id, by default with reward 1 and verdict complete."""

    status: dict[str, RolloutStatus] = field(default_factory=dict[str, RolloutStatus])
    verdict: dict[AttemptKey, VerdictKind] = field(default_factory=dict[AttemptKey, VerdictKind])
    rewards: dict[AttemptKey, list[Reward]] = field(default_factory=dict[AttemptKey, list[Reward]])
    latest: dict[str, str] = field(default_factory=dict[str, str])
    extra: list[Rollout] = field(default_factory=list[Rollout])

    def build(self, *rows: CallRow) -> Traces:
        keys = list(dict.fromkeys([*((r.rollout, r.attempt) for r in rows), *self.verdict]))
        latest = dict(keys) | self.latest
        rollouts = [
            AttemptedRollout(
                rollout_id=rollout,
                input={},
                start_time=1.0,
                status=self.status.get(rollout, "succeeded"),
                attempt=Attempt(rollout_id=rollout, attempt_id=attempt, sequence_id=1, start_time=1.0, status="succeeded"),
            )
            for rollout, attempt in latest.items()
        ]
        return Traces(
            rollouts=[*rollouts, *self.extra],
            calls=call_columns(rows),
            rewards={key: self.rewards.get(key, [reward(1.0)]) for key in keys},
            verdicts={key: Verdict(rollout_id=key[0], attempt_id=key[1], kind=self.verdict.get(key, "complete")) for key in keys},
            spans=len(rows),
        )


def reward(value: float, *, sequence: int = 100, index: int = 0) -> Reward:
    return Reward(sequence=sequence, span_id="r", index=index, name="primary" if index == 0 else "other", value=value)


@pytest.fixture
def traces() -> TracesBuilder:
    return TracesBuilder()


@pytest.fixture
def row() -> type[CallRow]:
    return CallRow


@pytest.fixture
def make_reward() -> Any:
    return reward
