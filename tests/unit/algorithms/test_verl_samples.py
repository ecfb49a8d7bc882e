from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest

from agl_otel.adapters.remedies import REFUSED
from agl_otel.adapters.sampling import several_choices_warning
from agl_otel.adapters.trajectories import CALL_REFUSALS
from agl_otel.algorithms.report import choices_warning, differing_warning, without_samples
from agl_otel.algorithms.utils import failures_in
from agl_otel.algorithms.verl.samples import NO_VERSION, Counts, Rules, all_refused, to_samples
from tests.unit.adapters.conftest import CallRow, TracesBuilder, call_columns, reward

LEFT, RIGHT = CallRow(call=1, prompt=[1, 2], response=[3]), CallRow(call=2, prompt=[9], response=[4, 5])


def test_separate_calls_are_samples_with_the_rollouts_reward() -> None:
    found, counts = to_samples(TracesBuilder().build(LEFT, RIGHT), Rules())
    first, second = found["ro-1"]
    assert (first.prompt_ids, first.response_ids, first.response_mask, first.calls) == ([1, 2], [3], [1], 1)
    assert (second.prompt_ids, second.response_ids, second.response_mask) == ([9], [4, 5], [1, 1])
    assert {first.reward, second.reward} == {1.0}
    assert (counts.rollouts, counts.sampled, counts.samples, counts.calls) == (1, 1, 2, 2)
    assert counts.score == (1.0, 1, 0)
    assert sum(counts.breaks.values()) == 1


def test_a_conversation_is_one_sample_with_a_mask_on_the_models_tokens() -> None:
    rows = CallRow(call=1, prompt=[1, 2], response=[3], logprobs=[-0.25]), CallRow(call=2, prompt=[1, 2, 3, 8, 8], response=[4, 5])
    (sample,) = to_samples(TracesBuilder().build(*rows), Rules())[0]["ro-1"]
    assert sample.response_ids == [3, 8, 8, 4, 5]
    assert sample.response_mask == [1, 0, 0, 1, 1]
    assert sample.logprobs == [-0.25, 0.0, 0.0, -0.5, -0.5]
    assert len(to_samples(TracesBuilder().build(*rows), Rules(by_call=True))[0]["ro-1"]) == 2


def test_a_rollout_with_a_refused_attempt_has_no_sample_and_is_counted() -> None:
    rows = [CallRow(rollout=f"ro-{n}", logprobs=[math.nan, -1.0] if n == 2 else None) for n in range(4)]
    built = TracesBuilder(status={"ro-1": "failed"}, rewards={("ro-3", "at-1"): []}).build(*rows)
    found, counts = to_samples(built, Rules())
    assert [len(found[f"ro-{n}"]) for n in range(4)] == [1, 0, 0, 0]
    assert counts.refused == {"not_succeeded": 1, "logprobs_not_finite": 1, "no_reward": 1}
    assert (counts.rollouts, counts.sampled) == (4, 1)
    assert counts.score == (2.0, 4, 2), "ro-2 has a reward, though no sample; a missing reward counts as 0"


def test_fill_reward_replaces_a_missing_reward_only_if_set() -> None:
    built = TracesBuilder(rewards={("ro-1", "at-1"): []}).build(LEFT)
    assert to_samples(built, Rules(fill_reward=-1.0))[0]["ro-1"][0].reward == -1.0


def test_long_prompts_are_refused_and_long_responses_cut() -> None:
    rows = CallRow(call=1, prompt=[1] * 9, response=[3]), CallRow(call=2, prompt=[2], response=[4, 5, 6], logprobs=[-0.1, -0.2, -0.3])
    found, counts = to_samples(TracesBuilder().build(*rows), Rules(max_prompt_tokens=8, max_response_tokens=2))
    (sample,) = found["ro-1"]
    assert sample.response_ids == [4, 5]
    assert sample.logprobs == pytest.approx([-0.1, -0.2])
    assert (counts.refused, counts.cut) == ({"prompt_too_long": 1}, 1)


def test_a_cut_response_ends_with_a_token_of_the_model() -> None:
    rows = CallRow(call=1, prompt=[1], response=[3]), CallRow(call=2, prompt=[1, 3, 8, 8], response=[4])
    (sample,) = to_samples(TracesBuilder().build(*rows), Rules(max_response_tokens=2))[0]["ro-1"]
    assert (sample.response_ids, sample.response_mask, sample.logprobs) == ([3], [1], [-0.5])


def test_only_matching_agents_are_trained_on() -> None:
    rows = CallRow(call=1, prompt=[1], agent="writer"), CallRow(call=2, prompt=[2], agent="checker")
    found, counts = to_samples(TracesBuilder().build(*rows), Rules(agent_match="write"))
    assert [sample.prompt_ids for sample in found["ro-1"]] == [[1]]
    assert counts.refused == {"other_agent": 1}


def test_the_reward_may_be_a_named_dimension() -> None:
    built = TracesBuilder(rewards={("ro-1", "at-1"): [reward(0.0), reward(0.5)]}).build(LEFT)
    assert to_samples(built, Rules())[0]["ro-1"][0].reward == 0.5


def test_counts_add_up() -> None:
    total = Counts()
    for rollout in ("ro-1", "ro-2"):
        total.add(to_samples(TracesBuilder().build(CallRow(rollout=rollout)), Rules())[1])
    assert (total.rollouts, total.sampled, total.score.total, total.verdicts) == (2, 2, 2.0, {"complete": 2})
    assert total.rewards == {"ro-1": [1.0], "ro-2": [1.0]}
    total.add(Counts(rollouts=1, without_reward=1, rewards={"ro-1": [0.5], "ro-3": []}))
    assert total.rewards == {"ro-1": [1.0, 0.5], "ro-2": [1.0], "ro-3": []}
    assert (total.groups_gone, total.zero_variance_groups, total.without_effect, total.score.mean) == (1, 1, None, 2 / 3)
    assert Counts(rewards={"a": [0.5, 0.5], "b": [0.5], "c": []}).without_effect == "the rewards are all 0.5"


def test_rollouts_of_one_step_and_task_are_a_group() -> None:
    built = TracesBuilder(rewards={("ro-2", "at-1"): []}).build(LEFT, CallRow(rollout="ro-2"), CallRow(rollout="ro-3"))
    places = {"ro-1": (1, 7), "ro-2": (1, 7), "ro-3": (2, 7)}
    named = [
        each.model_copy(update={"metadata": dict(zip(("step", "group"), places[each.rollout_id], strict=True))}) for each in built.rollouts
    ]
    assert to_samples(replace(built, rollouts=named), Rules())[1].rewards == {"1-7": [1.0], "2-7": [1.0]}


def test_a_named_reward_is_the_score_and_the_fill_value_is_not() -> None:
    found = reward(0.25)
    named = replace(found, index=1, name="style")
    rewards = {("ro-1", "at-1"): [found, named], ("ro-2", "at-1"): [found]}
    built = TracesBuilder(rewards=rewards).build(LEFT, CallRow(rollout="ro-2"))
    samples, counts = to_samples(built, Rules(reward_name="style", fill_reward=-1.0))
    assert [samples[each][0].reward for each in ("ro-1", "ro-2")] == [0.25, -1.0]
    assert counts.score == (0.25, 2, 1)


def test_choices_of_one_call_are_counted_as_one_call() -> None:
    rows = [CallRow(call=1, prompt=[1], choice=choice, response=[choice + 2]) for choice in range(3)] + [CallRow(call=2, prompt=[9])]
    counts = to_samples(TracesBuilder().build(*rows), Rules())[1]
    assert (counts.calls, counts.sampled_calls, counts.several_choices, counts.breaks["choice"]) == (2, 4, 3, 2)
    counted = "3 of 4 sampled replies (75 %) are choices beside others of the same request (n > 1)"
    assert several_choices_warning(3, 4).startswith(f"{counted}: which of them")
    assert choices_warning(1, 3, 4).startswith(f"step 1: {counted}: ") and choices_warning(1, 3, 4).endswith("how many they are")
    assert choices_warning(2, 3, 4, told=True) == f"step 2: {counted}", "an earlier step of the run has explained it"


def test_calls_of_different_processes_or_attempts_are_not_choices() -> None:
    others = [CallRow(choice=1), CallRow(choice=2, process="m2"), CallRow(choice=3, attempt="at-2"), CallRow(choice=4, rollout="ro-2")]
    unnumbered = [CallRow(rollout="ro-3", call=0), CallRow(rollout="ro-3", call=0, choice=1)]
    calls = call_columns([*others, *unnumbered])
    assert (calls.count, calls.several_choices.any()) == (6, False)
    assert (call_columns([]).count, call_columns([]).several_choices.tolist()) == (0, [])


def test_calls_that_were_sampled_otherwise_are_refused_in_training_only() -> None:
    rows = [
        CallRow(call=1, prompt=[1], response=[7], temperature=0.7),
        CallRow(call=2, prompt=[1, 7], response=[8], temperature=0.2),
        CallRow(call=3, prompt=[1, 7, 8], response=[9], temperature=0.7),
        CallRow(call=4, prompt=[4], temperature=0.7, top_p=0.9),
        CallRow(call=5, prompt=[5], temperature=0.7, constrained=True),
    ]
    built, rules = TracesBuilder().build(*rows), Rules(temperature=0.7)
    found, counts = to_samples(built, rules)
    assert [(each.prompt_ids, each.response_ids, each.response_mask) for each in found["ro-1"]] == [([1], [7, 8, 9], [1, 0, 1])]
    assert counts.refused == {"sampling_differs": 3}
    assert counts.differing == {"temperature": 1, "top_p": 1, "tool_choice": 1}
    assert "refused as sampling_differs: temperature 1, tool_choice 1, top_p 1" in differing_warning(3, 3, 5, counts.differing)
    validation = replace(built, rollouts=[each.model_copy(update={"mode": "val"}) for each in built.rollouts])
    assert to_samples(validation, rules)[1].refused == {}


def test_a_run_of_which_every_call_was_sampled_otherwise_says_what_to_do() -> None:
    counts = to_samples(TracesBuilder().build(CallRow(temperature=0.2)), Rules())[1]
    message = all_refused(counts, "step 1")
    assert message is not None
    assert "refused sampling_differs 1" in message
    assert "by temperature 1" in message


def test_counts_have_the_trained_attempts() -> None:
    built = TracesBuilder(status={"ro-3": "failed"}, rewards={("ro-2", "at-1"): [reward(0.25)]})
    counts = to_samples(built.build(LEFT, RIGHT, CallRow(rollout="ro-2"), CallRow(rollout="ro-3")), Rules())[1]
    assert counts.attempts == [("ro-1", "at-1"), ("ro-2", "at-1")]
    assert counts.without_effect is None
    total = Counts()
    total.add(counts)
    total.add(Counts(rollouts=1))
    assert total.attempts == counts.attempts
    assert all_refused(counts, "step 1") is None


def test_the_error_without_any_sample_names_the_reasons() -> None:
    built = TracesBuilder(status={"ro-1": "failed"}, rewards={("ro-2", "at-1"): []}).build(LEFT, CallRow(rollout="ro-2"))
    message = all_refused(to_samples(built, Rules())[1], "the validation after step 0")
    assert message is not None
    assert message.startswith("the validation after step 0 has no sample: of 2 rollouts, refused no_reward 1, not_succeeded 1\n")
    assert message.endswith("\nwhat failed: 1 × failed")
    assert all_refused(Counts(), "step 1") is None


def test_the_error_without_any_sample_has_each_remedy_and_what_model_servers_answered() -> None:
    refused, differing = Counter(incomplete_reply=1, sampling_differs=3, not_finished=2), Counter(top_p=3)
    built = replace(TracesBuilder().build(LEFT), call_errors=Counter({"HTTP 400: stop is not supported": 1}))
    assert without_samples("step 1 has nothing to train on", 4, refused, differing, failures_in(built)).split("\n") == [
        "step 1 has nothing to train on: of 4 rollouts, refused sampling_differs 3, not_finished 2, incomplete_reply 1",
        f"incomplete_reply: {CALL_REFUSALS['incomplete_reply']}. Remedy: {REFUSED['incomplete_reply']}",
        "sampling_differs: sampled from another distribution than the trainer evaluates, by top_p 3. Remedy: let the agent leave these "
        'fields out, or let GRPO replace them: sampling_policy = "enforce" (docs/training.md#sampling)',
        "what failed: 1 × model call: HTTP 400: stop is not supported",
    ]


def test_token_ids_beyond_the_vocabulary_are_refused() -> None:
    found, counts = to_samples(TracesBuilder().build(CallRow(prompt=[1, 2], response=[300])), Rules(vocabulary=300))
    assert (found["ro-1"], counts.refused) == ([], {"beyond_vocabulary": 1})


def test_samples_without_a_version_have_a_number() -> None:
    (sample,) = to_samples(TracesBuilder().build(LEFT), Rules())[0]["ro-1"]
    assert [replace(sample, model_version=text).version for text in ("12", "", "v3", "²")] == [12, NO_VERSION, NO_VERSION, NO_VERSION]


def test_a_reward_that_is_not_finite_is_refused_and_a_singleton_keeps_its_sample() -> None:
    """Singletons are dropped by the trainer, not here."""
    rows = [CallRow(rollout=f"ro-{n}") for n in range(2)]
    found, counts = to_samples(TracesBuilder(rewards={("ro-1", "at-1"): [reward(math.nan)]}).build(*rows), Rules())
    assert ([len(found[f"ro-{n}"]) for n in range(2)], counts.refused) == ([1, 0], {"no_reward": 1})
