"""Credit by calls in verl's samples: each token has the advantage that adapters/credit.py computes for its call."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agl_otel.adapters.credit import Rule, credit, group_advantages
from agl_otel.adapters.records import to_transitions
from agl_otel.algorithms.grpo.options import Advantages
from agl_otel.algorithms.verl.algorithm import VERL
from agl_otel.algorithms.verl.credit import ESTIMATOR
from agl_otel.algorithms.verl.estimator import ADVANTAGES, Carried
from agl_otel.algorithms.verl.figures import step_figures
from agl_otel.algorithms.verl.keys import get
from agl_otel.algorithms.verl.samples import Counts, Rules, Sample, to_samples
from agl_otel.errors import UsageError
from agl_otel.types.columns import Traces
from tests.unit.adapters.conftest import CallRow, TracesBuilder, reward
from tests.unit.algorithms.test_verl_figures import update

TO_GO = Rules(advantages=Advantages(credit="to_go", discount=0.5))


def stepwise(values: dict[str, list[float]], *, cut: bool = False) -> Traces:
    """Make rollouts of three calls, each of which has a reward of its own: the first two continue each other, the third does not.

    The rollouts `a…` and `b…` are of two tasks.
    """
    rows: list[CallRow] = []
    for number, rollout in enumerate(values):
        first = [10 + number, 20]
        rows += [
            CallRow(rollout, call=1, prompt=[1, 2], response=first),
            CallRow(rollout, call=2, prompt=[1, 2, *first, 3], response=[30 + number]),
            CallRow(rollout, call=3, prompt=[9], response=[40 + number] * 3),
        ]
    built = TracesBuilder().build(*rows)
    for number, own in enumerate(values.values()):
        key = (built.calls.rollout_id[3 * number], "at-1")
        spans = built.calls.span_id[3 * number : 3 * number + 3]
        built.rewards[key] = [replace(reward(value, sequence=100 + place), span_id=spans[place]) for place, value in enumerate(own)]
    rollouts = [each.model_copy(update={"metadata": {"step": 1, "group": each.rollout_id[0]}}) for each in built.rollouts]
    return replace(built, rollouts=rollouts)


VALUES = {"a1": [1.0, 0.0, 0.5], "a2": [0.0, 0.0, 0.5], "a3": [0.25, 2.0, -1.0], "b1": [0.0, 1.0, 0.0], "b2": [1.0, 1.0, 1.0]}


def of_calls(traces: Traces, rule: Rule) -> dict[str, list[float]]:
    """The advantage of each call by the adapter alone, without merging: {rollout: one for each of its calls}."""
    batch = to_transitions(traces)
    groups = np.unique([name[0] for name in batch.rollout_id], return_inverse=True)[1]
    found: dict[str, list[float]] = {}
    for name, value in zip(batch.rollout_id, credit(traces, batch, groups, rule).advantages.tolist(), strict=True):
        found.setdefault(name, []).append(value)
    return found


def tokens(samples: list[Sample]) -> list[list[float]]:
    assert all(sample.advantages is not None for sample in samples)
    return [sample.advantages or [] for sample in samples]


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize(
    ("advantages", "rule"),
    [
        (Advantages(credit="to_go", discount=0.5), Rule("to_go", 0.5)),
        (Advantages(credit="states", state_weight=2.0), Rule(states=True, state_weight=2.0)),
        (Advantages(agent_baselines=True), Rule("final", by_agent=True)),
    ],
    ids=["to_go", "states", "agents"],
)
def test_each_token_has_the_advantage_of_its_call(advantages: Advantages, rule: Rule, scaled: bool) -> None:
    traces = stepwise(VALUES)
    found, counts = to_samples(traces, Rules(advantages=advantages, scale_advantages=scaled))
    expected = of_calls(traces, replace(rule, compare=partial(group_advantages, scaled=scaled)))
    for rollout, (first, second, third) in expected.items():
        assert tokens(found[rollout]) == [[first, first, 0.0, second], [third] * 3], rollout
        assert [sample.response_mask for sample in found[rollout]] == [[1, 1, 0, 1], [1, 1, 1]]
    assert counts.credited == 10 and counts.learning == {"1-a": 6, "1-b": 4}
    assert (counts.zero_variance_groups, counts.without_effect) == (0, None)


def test_a_cut_sample_has_the_advantages_of_the_tokens_that_are_left_and_a_refused_one_is_in_no_comparison() -> None:
    traces = stepwise(VALUES)
    whole, cut = to_samples(traces, TO_GO)[0], to_samples(traces, replace(TO_GO, max_response_tokens=2))[0]
    assert tokens(cut["a1"]) == [own[:2] for own in tokens(whole["a1"])]
    without = to_samples(replace(traces, rollouts=[each for each in traces.rollouts if each.rollout_id != "a3"]), TO_GO)[0]
    refused = to_samples(replace(traces, rewards={**traces.rewards, ("a3", "at-1"): []}), TO_GO)[0]
    assert refused["a3"] == [] and refused["a1"] == without["a1"] != whole["a1"]


def test_shuffled_rewards_of_steps_give_other_advantages_and_equal_ones_give_none() -> None:
    plain = to_samples(stepwise(VALUES), TO_GO)[0]
    values = [value for own in VALUES.values() for value in own]
    random.Random(1).shuffle(values)
    drawn = iter(values)
    assert to_samples(stepwise({name: [next(drawn) for _ in own] for name, own in VALUES.items()}), TO_GO)[0] != plain
    found, counts = to_samples(stepwise({name: [1.0, 0.0, 0.5] for name in VALUES}), TO_GO)
    assert {value for samples in found.values() for own in tokens(samples) for value in own} == {0.0}
    assert (counts.zero_variance_groups, counts.without_effect) == (2, "the returns are equal wherever they are compared")


def test_a_validation_has_no_advantages_and_neither_has_a_run_without_credit() -> None:
    traces = stepwise(VALUES)
    val = replace(traces, rollouts=[each.model_copy(update={"mode": "val"}) for each in traces.rollouts])
    for found, counts in (to_samples(val, TO_GO), to_samples(traces, Rules())):
        assert all(sample.advantages is None for samples in found.values() for sample in samples)
        assert (counts.credited, counts.learning.total(), counts.states) == (0, 0, {})


def test_the_share_of_matched_states_is_a_figure_of_the_step() -> None:
    counts, states = Counts(), Rules(advantages=Advantages(credit="states"))
    for part in ("a", "b"):
        own = {name: values for name, values in VALUES.items() if name.startswith(part)}
        counts.add(to_samples(stepwise(own), states)[1])
    assert counts.states == {"later": 10, "matched": 5}, "the second call's prompt has the first reply, the third's is always the same"
    assert step_figures(counts, update())["matched_states"] == 0.5
    assert "matched_states" not in step_figures(Counts(), update())


def test_the_estimator_gives_each_row_what_it_carries_and_padding_nothing() -> None:
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]])
    estimator = Carried()
    rows: list[dict[str, Any]] = [{ADVANTAGES: np.array([0.5, 0.5, 0.0, -1.0], np.float32)}, {ADVANTAGES: np.array([2.0], np.float32)}, {}]
    estimator.rows = rows
    advantages, returns = estimator(token_level_rewards=torch.zeros(3, 4), response_mask=mask, index=[], config=None)
    assert advantages.tolist() == [[0.5, 0.5, 0.0, -1.0], [2.0, 0.0, 0.0, 0.0], [0.0] * 4]
    assert torch.equal(advantages, returns)
    mask[0, 0] = 0  # verl's rollout_correction leaves tokens out
    assert estimator(token_level_rewards=torch.zeros(3, 4), response_mask=mask)[0][0].tolist() == [0.0, 0.5, 0.0, -1.0]


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (
            {"algorithm.adv_estimator": "rloo"},
            {},
            r'algorithm\.adv_estimator = "rloo" excludes credit = "to_go", because .*leave one',
        ),
        ({"algorithm": {"use_kl_in_reward": True}}, {}, r"algorithm\.use_kl_in_reward = true excludes credit .*actor\.use_kl_loss"),
        ({"algorithm.gamma": 0.5}, {}, r"algorithm\.gamma = 0\.5 excludes .*discount of \[algorithm\]"),
        ({"actor_rollout_ref.actor.policy_loss.loss_mode": "gspo"}, {}, r'loss_mode = "gspo" excludes .*by_call = true'),
        ({"algorithm.adv_estimator": "grpo"}, {"credit": "final", "agent_baselines": True}, "excludes agent_baselines = true"),
        ({"algorithm.adv_estimator": ESTIMATOR}, {"credit": "final"}, r'"agl_credit" is of credit by calls: give credit = "to_go"'),
        ({}, {"credit": "final", "discount": 0.5}, r'discount = 0\.5 has no effect with credit = "final"'),
        ({}, {"credit": "togo"}, r'credit = "togo": it must be one of final, to_go, states, or a function'),
    ],
)
def test_what_credit_excludes_is_refused_by_name(config: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        VERL(config, **{"credit": "to_go", **options})


def test_credit_selects_its_estimator_beside_the_values_that_hold_anyway() -> None:
    verl = VERL({"algorithm.adv_estimator": ESTIMATOR, "algorithm.gamma": 1.0, "actor_rollout_ref.rollout.n": 2}, credit="to_go")
    assert get(verl.config, "algorithm.adv_estimator") == ESTIMATOR
    verl.check()
    gspo = {"actor_rollout_ref.actor.policy_loss.loss_mode": "gspo"}
    assert get(VERL(gspo, credit="to_go", by_call=True).config, "algorithm.adv_estimator") == ESTIMATOR
    with pytest.raises(UsageError, match=r"rollout\.n is 1, and algorithm\.adv_estimator = 'agl_credit' compares"):
        VERL({}, credit="to_go").check()


def test_verls_processes_find_a_function_that_lies_beside_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("def last(attempt):\n    return [0.0] * (len(attempt.calls) - 1) + [1.0]\n")
    monkeypatch.chdir(tmp_path)
    verl = VERL({"actor_rollout_ref.rollout.n": 2}, credit="mine.py:last")
    verl.check()
    spec = verl.spec(store="", run_id="r", start=1)
    monkeypatch.chdir("/")
    samples = to_samples(stepwise({"a1": [1.0], "a2": [1.0]}), spec.sample_rules)[0]
    assert {value for own in tokens(samples["a1"]) for value in own} == {0.0}, "both attempts have the same returns"
    assert spec.sample_rules.advantages.credit == f"{tmp_path}/mine.py:last"
    assert verl.run_fingerprint([], [])["rules"]["advantages"]["credit"] == "mine.py:last", "a run may move"
