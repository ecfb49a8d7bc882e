"""Which attempts can be weighed under another policy, and their columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from agl_otel.adapters.logged import logged_of, weighable
from agl_otel.types.columns import Reward, SpanColumns
from tests.unit.adapters.conftest import CallRow, TracesBuilder, reward


@pytest.mark.parametrize(
    ("calls", "why"),
    [
        ([CallRow(incomplete="upstream_error")], "unknown_call"),
        ([CallRow(), CallRow(call=2, prompt=(9,), logprobs=())], "unknown_call"),
        ([CallRow(), CallRow(call=2, prompt=(9,), top_p=0.9)], "unknown_call"),
        ([CallRow(), CallRow(call=2, prompt=(9,), temperature=0.0)], "unknown_call"),
        ([CallRow(unrecorded=True)], "unknown_call"),
        ([CallRow(), CallRow(choice=1)], "several_choices"),
        ([CallRow(agent="judge")], "no_calls"),
    ],
)
def test_an_attempt_with_a_reply_of_unknown_distribution_does_not_count(calls: Sequence[CallRow], why: str) -> None:
    traces = TracesBuilder().build(*calls, CallRow(rollout="ro-2"))
    found = weighable(traces, agent_match="^$")
    assert (found.batch.rollout_id, dict(found.left_out)) == (["ro-2"], {why: 1})


def test_where_only_temperature_one_can_be_scored_an_attempt_with_another_one_does_not_count() -> None:
    rows = [CallRow(), CallRow(call=2, prompt=(9,), temperature=0.7), CallRow(rollout="ro-2"), CallRow(rollout="ro-3", temperature=0.7)]
    traces = TracesBuilder().build(*rows)
    found = weighable(traces, at_one=True)
    assert (found.batch.rollout_id, dict(found.left_out)) == (["ro-2"], {"other_temperature": 2})
    assert len(set(weighable(traces).batch.rollout_id)) == 3


def test_attempts_without_a_score_or_a_verdict_are_left_out_by_their_own_reason() -> None:
    builder = TracesBuilder(verdict={("ro-1", "at-1"): "incomplete"}, rewards={("ro-2", "at-1"): []}, status={"ro-3": "failed"})
    found = weighable(builder.build(*(CallRow(rollout=f"ro-{number}") for number in range(1, 5))))
    assert found.batch.rollout_id == ["ro-4"]
    assert dict(found.left_out) == {"verdict_incomplete": 1, "no_reward": 1, "not_succeeded": 1}


def test_calls_of_other_agents_are_part_of_what_happens() -> None:
    rows = [CallRow(agent="mine"), CallRow(agent="judge", call=2, prompt=(9,), temperature=0.0)]
    found = weighable(TracesBuilder().build(*rows), agent_match="mine")
    assert found.batch.rows.lengths.tolist() == [1] and not found.left_out


def test_a_call_has_the_sum_over_its_tokens_and_the_last_one_the_score() -> None:
    rows = [
        CallRow(logprobs=[-1.0, -2.0]),
        CallRow(call=2, prompt=(5,), prefix=(1, 0), response=(6,), logprobs=[-0.5]),
        CallRow(call=3, prompt=(77, 78), response=(4, 4, 4), logprobs=[-1.0, -1.0, -1.0]),  # a trajectory of its own
        CallRow(rollout="ro-2", logprobs=[-3.0, -3.0]),
    ]
    traces = TracesBuilder(rewards={("ro-2", "at-1"): [reward(0.25)]}).build(*rows)
    batch = weighable(traces).batch
    assert len(batch) == 3
    new = np.array([-0.5, -1.0, -0.25, -2.0, -2.0, -2.0, -3.5, -3.5], np.float32)
    found = logged_of(traces, batch, new, by_step=False, reward_name=None)
    assert [row.tolist() for row in found.log_ratios] == [[1.5, 0.25, -3.0], [-1.0]]
    assert [row.tolist() for row in found.rewards] == [[0.0, 0.0, 1.0], [0.25]]
    assert found.task.tolist() == [0, 0], "both have the same input"


def test_by_step_a_reward_is_at_the_last_call_that_earned_it() -> None:
    rows = [CallRow(agent="mine"), CallRow(agent="judge", call=2, prompt=(9,)), CallRow(agent="mine", call=3, prompt=(8,))]
    rewards = [Reward(20, "note1", 0, "primary", 0.5), Reward(21, "note2", 0, "primary", 0.25), Reward(30, "", 0, "primary", 2.0)]
    traces = TracesBuilder(rewards={("ro-1", "at-1"): rewards}).build(*rows)
    tree = SpanColumns(
        rollout_id=["ro-1"] * 5,
        attempt_id=["at-1"] * 5,
        span_id=["s0", "s1", "s2", "note1", "note2"],
        parent_span_id=["", "", "", "s0", "s1"],
        name=["llm", "llm", "llm", "agentlightning.annotation", "agentlightning.annotation"],
        sequence=np.array([1, 2, 3, 20, 21], np.uint64),
    )
    traces = replace(traces, tree=tree)
    batch = weighable(traces, agent_match="mine").batch
    found = logged_of(traces, batch, np.zeros(4, np.float32), by_step=True, reward_name=None)
    assert [row.tolist() for row in found.rewards] == [[0.75, 2.0]], "what the judge earned is known after the call before it"
