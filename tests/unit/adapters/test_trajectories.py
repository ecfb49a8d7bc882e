from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agl_otel.adapters.sampling import Assumed
from agl_otel.adapters.trajectories import ATTEMPT_REFUSALS, CALL_REFUSALS, to_trajectories
from agl_otel.proxy.attempts import Attempts
from agl_otel.types import Rollout
from tests.unit.adapters.conftest import CallRow, TracesBuilder


def test_single_calls_become_one_trajectory_each_in_order(traces: Any, row: Any, make_reward: Any) -> None:
    traces.rewards = {("ro-2", "at-1"): [make_reward(0.25)]}
    batch = to_trajectories(
        traces.build(row(rollout="ro-1"), row(rollout="ro-2", prompt=[4], response=[5, 6, 7], version="3", agent="solver"))
    )
    assert len(batch) == 2
    assert batch.rollout_id == ["ro-1", "ro-2"]
    assert batch.prompt[1].tolist() == [4]
    assert batch.response[1].tolist() == [5, 6, 7]
    assert batch.response_mask[1].tolist() == [1, 1, 1]
    assert batch.logprobs[1].tolist() == [-0.5] * 3
    assert batch.reward.tolist() == [1.0, 0.25]
    assert (batch.model_version, batch.agent, batch.verdict) == (["1", "3"], ["", "solver"], ["complete", "complete"])
    assert batch.calls.tolist() == [1, 1]
    assert not batch.refused
    assert not batch.breaks
    dtypes = [r.values.dtype for r in (batch.prompt, batch.response, batch.response_mask, batch.logprobs)]
    assert dtypes == [np.int32, np.int32, np.int8, np.float32]


def test_a_prefix_form_conversation_among_single_calls_is_expanded_and_merged(traces: Any, row: Any) -> None:
    batch = to_trajectories(
        traces.build(
            row(rollout="ro-1"),
            row(rollout="ro-2", call=1, prompt=[1, 2], response=[3], logprobs=[-0.25]),
            row(rollout="ro-2", call=2, prefix=(1, 0), prompt=[4], response=[5, 6]),
            row(rollout="ro-2", call=3, prefix=(2, 0), prompt=[], response=[7]),
            row(rollout="ro-3"),
        )
    )
    assert batch.rollout_id == ["ro-1", "ro-2", "ro-3"]
    assert batch.prompt[1].tolist() == [1, 2]
    assert batch.response[1].tolist() == [3, 4, 5, 6, 7]
    assert batch.response_mask[1].tolist() == [1, 0, 1, 1, 1]
    assert batch.logprobs[1].tolist() == [-0.25, 0.0, -0.5, -0.5, -0.5]
    assert batch.calls.tolist() == [1, 3, 1]


def test_breaks_are_counted_by_reason_also_between_processes(traces: Any, row: Any) -> None:
    batch = to_trajectories(
        traces.build(row(call=1), row(call=2, prompt=[1, 2, 3, 9]), row(process="m2", call=1, prompt=[1, 2, 3, 7, 8]), row(rollout="ro-2"))
    )
    assert batch.breaks == {"response_changed": 1, "process": 1}
    assert len(batch) == 4


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"incomplete": "client_gone"}, "incomplete_reply"),
        ({"incomplete": "masked"}, "masked_ids"),
        ({"prompt": []}, "no_token_ids"),
        ({"response": []}, "empty_response"),
        ({"logprobs": []}, "no_logprobs"),
        ({"logprobs": [-1.0]}, "logprobs_length"),
        ({"logprobs": [-1.0, math.nan]}, "logprobs_not_finite"),
        ({"logprobs": [-math.inf, -1.0]}, "logprobs_not_finite"),
        ({"prefix": (7, 0)}, "dangling_prefix"),
        ({"agent": "judge"}, "other_agent"),
        ({"temperature": 0.0}, "greedy"),
        ({"temperature": 0.5}, "sampling_differs"),
        ({"temperature": math.nan}, "sampling_differs"),
        ({"top_p": 0.9}, "sampling_differs"),
        ({"constrained": True}, "sampling_differs"),
        ({"unrecorded": True}, "sampling_differs"),
    ],
)
def test_call_that_cannot_be_trained_on_is_refused_and_counted(traces: Any, row: Any, changes: dict[str, Any], reason: str) -> None:
    agent = {"agent": "solver"}
    built = traces.build(row(rollout="ro-1", **agent), row(rollout="ro-2", **(agent | changes)), row(rollout="ro-3", **agent))
    batch = to_trajectories(built, agent_match="^solver$", sampling=Assumed(1.0))
    assert batch.rollout_id == ["ro-1", "ro-3"]
    assert batch.refused == {reason: 1}
    assert reason in CALL_REFUSALS


@pytest.mark.parametrize(("temperature", "trained"), [(0.0, False), (0.001, False), (0.01, True), (0.5, True)])
def test_greedy_calls_are_refused_where_samples_are_needed(traces: Any, row: Any, temperature: float, trained: bool) -> None:
    built = traces.build(row(rollout="ro-1", temperature=1.0), row(rollout="ro-2", temperature=temperature))
    batch = to_trajectories(built, sampling=Assumed(1.0, temperatures="any"))
    assert (batch.rollout_id, batch.refused["greedy"]) == (["ro-1", *["ro-2"] * trained], not trained)
    assert len(to_trajectories(built)) == 2, "exports take them"


def test_refused_call_leaves_the_rest_of_its_attempt(traces: Any, row: Any) -> None:
    batch = to_trajectories(
        traces.build(
            row(call=1, response=[7, 8], logprobs=[]), row(call=2, prefix=(1, 0), prompt=[5], response=[6]), row(call=3, response=[])
        )
    )
    assert batch.refused == {"no_logprobs": 1, "empty_response": 1}
    assert [batch.prompt[0].tolist(), batch.response[0].tolist()] == [[1, 2, 3, 7, 8, 5], [6]]


def test_attempts_are_refused_and_counted_by_the_first_reason(traces: Any, row: Any, make_reward: Any) -> None:
    traces.status = {"ro-failed": "failed"}
    traces.verdict = {("ro-holes", "at-1"): "incomplete", ("ro-empty", "at-1"): "empty", ("ro-silent", "at-1"): "complete"}
    traces.rewards = {("ro-bare", "at-1"): [make_reward(1.0, index=1)], ("ro-nan", "at-1"): [make_reward(math.nan)]}
    traces.latest = {"ro-again": "at-2"}
    traces.extra = [Rollout(rollout_id="ro-never", input={}, start_time=1.0)]
    names = ["ro-failed", "ro-holes", "ro-bare", "ro-nan", "ro-good"]
    built = traces.build(*(row(rollout=name) for name in names), row(rollout="ro-again"), row(rollout="ro-again", attempt="at-2"))
    batch = to_trajectories(built)
    assert list(zip(batch.rollout_id, batch.attempt_id, strict=True)) == [("ro-again", "at-2"), ("ro-good", "at-1")]
    assert batch.refused == {
        "not_succeeded": 1,
        "verdict_incomplete": 1,
        "verdict_empty": 1,
        "no_reward": 2,
        "no_attempt": 1,
        "not_latest_attempt": 1,
        "no_calls": 1,
    }
    assert set(batch.refused) <= set(ATTEMPT_REFUSALS)


def test_unproven_attempts_are_taken_unless_told_otherwise(traces: Any, row: Any) -> None:
    traces.verdict = {("ro-1", "at-1"): "unproven"}
    assert to_trajectories(traces.build(row())).verdict == ["unproven"]
    assert to_trajectories(traces.build(row()), take=("complete",)).refused == {"verdict_unproven": 1}


def test_reward_is_the_last_primary_one_by_sequence_and_a_fill_value_only_on_request(traces: Any, row: Any, make_reward: Any) -> None:
    key = ("ro-1", "at-1")
    traces.rewards = {key: [make_reward(0.75, sequence=3), make_reward(0.5, sequence=9), make_reward(8.0, sequence=9, index=1)]}
    assert to_trajectories(traces.build(row())).reward.tolist() == [0.5]
    traces.rewards = {key: []}
    assert to_trajectories(traces.build(row())).refused == {"no_reward": 1}
    assert to_trajectories(traces.build(row()), fill_reward=-1.0).reward.tolist() == [-1.0]


def test_no_observations_give_an_empty_batch(traces: Any) -> None:
    batch = to_trajectories(traces.build())
    assert len(batch) == 0
    assert len(batch.response) == 0


def test_ten_thousand_single_calls_are_ten_thousand_trajectories(traces: Any, row: Any) -> None:
    batch = to_trajectories(traces.build(*(row(rollout=f"ro-{i:05}", prompt=range(20), response=range(10)) for i in range(10_000))))
    assert len(batch) == 10_000 and not batch.refused


@pytest.mark.parametrize("shape", ["one chain", "two chains", "unrelated", "retries"])
def test_ten_thousand_calls_of_one_attempt_are_merged(traces: Any, row: Any, shape: str) -> None:
    """Quickly and in little memory: comparing all pairs took minutes (the test's time limit is the bound)."""

    def call(number: int) -> Any:
        if shape == "unrelated":
            return row(call=number, prompt=[number % 97] * 20)
        base = 1 if shape == "retries" else 4_000 if shape == "two chains" and number == 5_000 else number - 1
        return row(call=number, prompt=[number], prefix=(base, 0) if number > 1 else (0, 0))

    batch = to_trajectories(traces.build(*map(call, range(1, 10_001))))
    assert (len(batch), batch.breaks.total()) == {
        "one chain": (1, 0), "two chains": (2, 1), "unrelated": (10_000, 9_999), "retries": (9_999, 9_998),
    }[shape]  # fmt: skip
    assert int(batch.response_mask.values.sum()) == 20_000, "each sampled token is trained on once"


def test_part_of_a_reply_after_another_prefix_does_not_count_as_sampled(traces: Any, row: Any) -> None:
    """A template that strips reasoning: of the reply [2, 3] the next prompt keeps [3]."""
    rows = [row(call=1, prompt=[1], response=[2, 3]), row(call=2, prompt=[1, 3, 4], response=[5])]
    batch = to_trajectories(traces.build(*rows))
    trained = [(p.tolist(), r.tolist(), m.tolist()) for p, r, m in zip(batch.prompt, batch.response, batch.response_mask, strict=True)]
    assert trained == [([1], [2, 3], [1, 1]), ([1, 3, 4], [5], [1])], "each reply after what it was sampled after, and no token of it twice"
    assert batch.breaks == {"response_changed": 1}
    attempt, number = (attempts := Attempts(lambda _: None)).begin(("ro", "at"))
    assert attempts.continued(attempt, number, [1], {0: [2, 3]}) is None
    assert attempts.continued(attempt, attempts.begin(("ro", "at"))[1], [1, 3, 4], {0: [5]}) is None, (
        "so the proxy stores that prompt in full"
    )


@dataclass
class Sampled:
    """A call as stored, with its true prompt and response."""

    row: CallRow
    prompt: list[int]
    response: list[int]


IDS = st.lists(st.integers(1, 2), min_size=1, max_size=2)


@st.composite
def attempts(draw: st.DrawFn) -> list[Sampled]:
    """Some go on from earlier calls, whole or without the end of the reply, in prefix form or not; of some, ids are masked."""
    calls: list[Sampled] = []
    for number in range(1, draw(st.integers(1, 6)) + 1):
        prompt, prefix, response = draw(IDS), (0, 0), draw(IDS)
        stored = prompt
        if calls and draw(st.booleans()):
            base, cut = draw(st.sampled_from(calls)), draw(st.sampled_from([0, 0, 0, 1]))
            more, whole = draw(st.lists(st.integers(1, 2), max_size=2)), base.prompt + base.response
            stored = prompt = whole[: len(whole) - cut] + more
            if not cut and draw(st.booleans()):
                stored, prefix = more, (base.row.call, 0)
        hidden = draw(st.sampled_from(["", "", "", "prompt", "reply"]))
        row = CallRow(
            call=number,
            prompt=[0] * len(stored) if hidden == "prompt" else stored,
            response=[0] * len(response) if hidden == "reply" else response,
            prefix=prefix,
            incomplete="masked" if hidden else "",
        )
        calls.append(Sampled(row, prompt, response))
    return calls


@given(attempts(), st.booleans())
@settings(max_examples=500, deadline=None)
def test_every_token_is_trained_on_after_exactly_its_sampling_context(calls: list[Sampled], by_call: bool) -> None:
    built = TracesBuilder().build(*(each.row for each in calls))
    batch = to_trajectories(built, by_call=by_call)
    taken = 0
    for place, rows in enumerate(batch.rows):
        tokens = [*batch.prompt[place].tolist(), *batch.response[place].tolist()]
        written = [0] * len(batch.prompt[place]) + batch.response_mask[place].tolist()
        for row in rows.tolist():
            call = calls[int(built.calls.call[row]) - 1]
            start, end = len(call.prompt), len(call.prompt) + len(call.response)
            assert (tokens[:start], tokens[start:end]) == (call.prompt, call.response)
            assert all(written[start:end])
            written[start:end] = [0] * len(call.response)
            taken += 1
        assert not any(written), "and nothing else is"
    assert taken + batch.refused.total() == len(calls) + batch.refused["no_calls"]
