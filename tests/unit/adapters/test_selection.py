from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agl_otel.adapters.chats import conversations, split_pair
from agl_otel.adapters.formats import WRITTEN, as_written
from agl_otel.adapters.masking import MaskRule, masked
from agl_otel.adapters.records import FORMS, TOKEN_FORMS, Reading, rows_of
from agl_otel.adapters.selection import left_out, task_key
from agl_otel.errors import UsageError
from agl_otel.types import Rollout
from agl_otel.types.columns import Reward
from tests.unit.adapters.spans import proxy_call
from tests.unit.adapters.test_texts import text, texts

REWARDS = {("r1", "a"): 0.5, ("r2", "a"): 1.0, ("r3", "a"): 1.0, ("r4", "a"): 0.0, ("r5", "a"): 0.75}
TASKS = {"r1": "x", "r2": "x", "r3": "x", "r4": "y", "r5": "y"}


def kept(**options: Any) -> list[str]:
    out = left_out(REWARDS, TASKS, **options)
    return [key[0] for key in REWARDS if key not in out]


def test_attempts_are_selected_by_threshold_then_group_then_fraction() -> None:
    assert kept() == ["r1", "r2", "r3", "r4", "r5"]
    assert kept(min_reward=0.75) == ["r2", "r3", "r5"]
    assert kept(best_of_group=1) == ["r2", "r5"]
    assert kept(top_fraction=0.4) == ["r2", "r3"]
    assert kept(top_fraction=0.5) == ["r2", "r3", "r5"]
    assert kept(top_fraction=0.001) == ["r2"]
    assert kept(top_fraction=1e-12) == ["r2"], "at least one"
    assert kept(min_reward=0.1, best_of_group=2, top_fraction=0.67) == ["r2", "r3", "r5"]
    assert Counter(left_out(REWARDS, TASKS, min_reward=0.1, best_of_group=2, top_fraction=0.3).values()) == {
        "low_reward": 1,
        "not_best_of_group": 1,
        "not_in_top": 2,
    }
    assert left_out({}, {}, top_fraction=0.5) == {}


def test_a_fraction_is_not_affected_by_rounding() -> None:
    rewards = {(f"r{n:03}", "a"): float(n) for n in range(300)}
    for percent in range(1, 101):
        assert 300 - len(left_out(rewards, {}, top_fraction=percent / 100)) == 3 * percent


@pytest.mark.parametrize("options", [{"top_fraction": 0.0}, {"top_fraction": 1.5}, {"best_of_group": 0}])
def test_invalid_options_are_named(options: dict[str, Any]) -> None:
    for use in (lambda: left_out({}, {}, **options), lambda: Reading(**options)):
        with pytest.raises(UsageError, match=next(iter(options))):
            use()


def test_the_task_of_a_rollout_is_its_whole_input() -> None:
    one, same, other = (
        Rollout(rollout_id="r", input=given, start_time=1.0, status="succeeded")
        for given in ({"q": "a" * 80, "n": 1}, {"n": 1, "q": "a" * 80}, {"q": "a" * 80, "n": 2})
    )
    assert task_key(one) == task_key(same) != task_key(other)


@pytest.fixture
def turns(traces: Any, row: Any, make_reward: Any) -> Any:
    """ro-1 in three calls, two of which are one conversation, with reward 1; ro-2 in one with 0.5."""
    traces.rewards = {("ro-2", "at-1"): [make_reward(0.5)]}
    built = traces.build(
        row(rollout="ro-1", prompt=[1, 2], response=[3]),
        row(rollout="ro-1", call=2, prefix=(1, 0), prompt=[4], response=[5]),
        row(rollout="ro-1", call=3, prompt=[9], response=[8]),
        row(rollout="ro-2", prompt=[1, 2], response=[6]),
    )
    asked = [text("user", "hello")]
    more = [*asked, text("assistant", "hi"), text("user", "again")]
    return replace(built, texts=texts((asked, "hi"), (more, "yes"), ([text("user", "other")], "o"), (asked, "no")))


def test_a_reward_is_discounted_over_the_calls_of_its_rollout(turns: Any) -> None:
    rows = rows_of(Reading(form="sft", by_call=True, discount=0.5), turns).rows
    assert [(row["rollout_id"], row["reward"]) for row in rows] == [("ro-1", 0.25), ("ro-1", 0.5), ("ro-1", 1.0), ("ro-2", 0.5)]
    assert [row["input_ids"] for row in rows] == [[1, 2, 3], [1, 2, 3, 4, 5], [9, 8], [1, 2, 6]]
    assert [row["reward"] for row in rows_of(Reading(form="sft", by_call=True), turns).rows] == [1.0, 1.0, 1.0, 0.5]
    for wrong in (Reading, lambda **given: Reading(form="openai", by_call=True, **given)):
        with pytest.raises(UsageError, match="add by_call"):
            wrong(discount=0.5)


def test_a_discount_counts_calls_as_returns_do(traces: Any, row: Any) -> None:
    """Not rows: a call has several choices, or is refused for its length; nor in the order of processes."""
    traces.rewards = {("ro-1", "at-1"): [Reward(99, "", 0, "primary", 1.0)]}
    built = traces.build(
        row(call=1, process="m1", prompt=[1], response=[2]),
        row(call=1, choice=1, process="m1", prompt=[1], response=[3]),
        row(call=2, process="m1", prompt=[4], response=[5]),
        row(call=1, process="m2", prompt=[6], response=[7]),
        row(call=2, process="m2", prompt=[8, 8], response=[9]),
    )
    built.calls.sequence[:] = [1, 1, 3, 2, 4]
    found = rows_of(Reading(form="transitions", discount=0.5, max_prompt_tokens=1), built)
    assert {tuple(each["response_ids"]): each["reward"] for each in found.rows} == {(2,): 0.125, (3,): 0.125, (5,): 0.5, (7,): 0.25}
    returns = rows_of(Reading(form="transitions", discount=0.5, max_prompt_tokens=1, returns=True), built)
    assert [each["returns"] for each in returns.rows] == [[each["reward"]] for each in found.rows]
    assert {each["reward"] for each in returns.rows} == {1.0}


@pytest.mark.parametrize("given", [{"discount": -0.5}, {"discount": 1.5}, {"max_prompt_tokens": 0}, {"max_response_tokens": -1}])
def test_numbers_out_of_bounds_are_named(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(given))} is "):
        Reading(form="transitions", **given)


def test_an_attempt_is_chosen_whole_and_its_rows_are_counted(turns: Any) -> None:
    found = rows_of(Reading(form="sft", top_fraction=0.5), turns)
    assert ([row["rollout_id"] for row in found.rows], dict(found.refused)) == (["ro-1", "ro-1"], {"not_in_top": 1})
    found = rows_of(Reading(form="sft", by_call=True, best_of_group=1), turns)
    assert (len(found.rows), dict(found.refused)) == (3, {"not_best_of_group": 1})


def test_pairs_are_of_one_task(turns: Any) -> None:
    (pair,) = rows_of(Reading(form="dpo", by_call=True), turns).rows
    assert (pair["prompt_ids"], pair["chosen_ids"], pair["rejected_ids"]) == ([1, 2], [3], [6])
    written = as_written("dpo", pair)
    assert [[m["content"] for m in written[name]] for name in ("prompt", "chosen", "rejected")] == [["hello"], ["hi"], ["no"]]
    rollouts = [rollout.model_copy(update={"input": rollout.rollout_id}) for rollout in turns.rollouts]
    found = rows_of(Reading(form="dpo", by_call=True), replace(turns, rollouts=rollouts))
    assert (found.rows, dict(found.refused)) == ([], {"no_other_attempt": 4})


def test_all_token_rows_have_their_calls_sampling_parameters(turns: Any) -> None:
    count = len(turns.calls)
    temperatures = np.array([0.5 + place for place in range(count)])
    temperatures[-1] = np.nan
    sampled = replace(turns, calls=replace(turns.calls, temperature=temperatures, top_p=temperatures / 8))
    by_form = {
        form: [as_written(form, row) for row in rows_of(Reading(form=form, by_call=True), sampled).rows] for form in sorted(TOKEN_FORMS)
    }
    plain = {(row["temperature"][0], row["top_p"][0]) for row in by_form["trajectories"]}
    assert len(plain) > 2 and (None, None) in plain
    for form in ("transitions", "sft", "tinker"):
        assert {(row["temperature"][0], row["top_p"][0]) for row in by_form[form]} == plain
    for pair in by_form["dpo"]:
        sides = [(pair["temperature"][0], pair["top_p"][0]), (pair["rejected_temperature"][0], pair["rejected_top_p"][0])]
        assert {*sides} <= plain and sides[0] != sides[1]
    assert by_form["dpo"]


def test_token_rows_are_written_in_trainers_formats(turns: Any) -> None:
    row = rows_of(Reading(form="sft"), turns).rows[0]
    sft, tinker = as_written("sft", row), as_written("tinker", row)
    assert (sft["input_ids"], sft["labels"], sft["attention_mask"]) == ([1, 2, 3, 4, 5], [-100, -100, 3, -100, 5], [1] * 5)
    assert "images" not in sft
    assert (tinker["model_input"], tinker["target_tokens"], tinker["weights"]) == ([1, 2, 3, 4], [2, 3, 4, 5], [0.0, 1.0, 0.0, 1.0])
    assert as_written("trajectories", row) == row
    assert WRITTEN.keys() <= FORMS.keys()


def row_of(*messages: tuple[str, str], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in messages], "tools": None, **more}


FIRST = (("system", "s"), ("assistant", "an example"), ("user", "hello"), ("assistant", "hi"))
SECOND = (*FIRST, ("user", "again"), ("assistant", "yes"))


def test_calls_of_one_conversation_are_one_row_with_weight_on_the_models_replies() -> None:
    refused: Counter[str] = Counter()
    calls = [row_of(*FIRST), row_of(*SECOND), row_of(("user", "other"), ("assistant", "o")), row_of(("user", "lost"))]
    whole, other = conversations(calls, refused)
    assert [message.get("weight") for message in whole["messages"]] == [None, 0, None, None, None, None]
    assert [message["content"] for message in other["messages"]] == ["other", "o"]
    assert refused == {"no_reply": 1}
    first, second, _ = conversations(calls, refused, by_call=True)
    assert [message.get("weight") for message in second["messages"]] == [None, 0, None, 0, None, None]
    assert len(first["messages"]) == 4


def test_a_conversation_whose_beginning_was_left_out_is_refused() -> None:
    refused: Counter[str] = Counter()
    assert conversations([row_of(("user", "3 messages of 1000 characters are left out"), ("assistant", "?"))], refused) == []
    assert refused == {"shortened": 1}


def test_tool_calls_are_compared_by_their_parsed_arguments() -> None:
    def asked(arguments: str) -> dict[str, Any]:
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}],
        }

    user, tool = {"role": "user", "content": "u"}, {"role": "tool", "tool_call_id": "c", "content": "3"}
    calls = [
        {"messages": [user, asked('{"a": 1}')], "tools": [{"type": "function"}]},
        {"messages": [user, asked('{"a":1}'), tool, {"role": "assistant", "content": "3"}], "tools": [{"type": "function"}]},
    ]
    (row,) = conversations(calls, Counter())
    assert all("weight" not in message for message in row["messages"])
    written = as_written("openai", {**row, "rollout_id": "r", "reward": 1.0})
    assert written.keys() == {"messages", "tools"}
    prompt, chosen, rejected = split_pair(row["messages"], [user, asked('{"a": 2}')])
    assert (prompt, len(chosen), len(rejected)) == ([user], 3, 1)


def test_openais_forms_come_from_spans_of_any_dialect(traces: Any, row: Any, make_reward: Any) -> None:
    traces.rewards = {("ro-2", "at-1"): [make_reward(0.5)]}
    built = traces.build(row(rollout="ro-1", prompt=[], logprobs=[]), row(rollout="ro-2"))
    first = proxy_call("a", 1, 2)
    second = proxy_call("b", 1, 2, **{"gen_ai.output.messages": '[{"role": "assistant", "parts": [{"type": "text", "content": "no"}]}]'})
    spans = [first, second.model_copy(update={"rollout_id": "ro-2"})]
    found = rows_of(Reading(form="openai"), built, spans)
    assert [[m["content"] for m in row["messages"]] for row in found.rows] == [["hello", "hi"], ["hello", "no"]]
    (pair,) = rows_of(Reading(form="openai_dpo"), built, spans).rows
    assert as_written("openai_dpo", pair) == {
        "input": {"messages": [{"role": "user", "content": "hello"}]},
        "preferred_output": [{"role": "assistant", "content": "hi"}],
        "non_preferred_output": [{"role": "assistant", "content": "no"}],
    }
    for rule in (MaskRule("drop_text", role="assistant"), MaskRule("hash_text", role="assistant")):
        assert as_written("openai", masked(found.rows[0], [rule]))["messages"][1]["weight"] == 0
