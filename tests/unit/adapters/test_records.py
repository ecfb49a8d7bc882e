from __future__ import annotations

import hashlib
import math
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest

from agl_otel.adapters.exported import Exported
from agl_otel.adapters.formats import as_written
from agl_otel.adapters.masking import MaskRule, masked
from agl_otel.adapters.pins import Differences, Pin, Read, line_of
from agl_otel.adapters.records import FORMS, IGNORED, Reading, Rows, rows_of, to_transitions
from agl_otel.errors import DataError, UsageError
from agl_otel.types.columns import Reward
from tests.unit.adapters.spans import call, reward
from tests.unit.adapters.test_texts import text, texts


@pytest.fixture
def conversation(traces: Any, row: Any, make_reward: Any) -> Any:
    """ro-1 in two turns with reward 1, ro-2 and ro-3 in one, from the same prompt, with 0.25 and 0.5."""
    traces.rewards = {
        ("ro-2", "at-1"): [make_reward(0.25), make_reward(9.0, sequence=101, index=1)],
        ("ro-3", "at-1"): [make_reward(0.5)],
    }
    built = traces.build(
        row(rollout="ro-1", prompt=[1, 2], response=[3], agent="solver"),
        row(rollout="ro-1", call=2, prefix=(1, 0), prompt=[4], response=[5, 6], agent="solver"),
        row(rollout="ro-2", prompt=[1, 2], response=[9], agent="solver"),
        row(rollout="ro-3", prompt=[7], response=[8], agent="judge"),
    )
    asked = [text("user", "hello")]
    more = [*asked, text("assistant", "hi"), text("user", "secret 42")]
    return replace(built, texts=texts((asked, "hi"), (more, "yes"), (asked, "no"), (asked, "well")))


def made(traces: Any, **reading: Any) -> list[dict[str, Any]]:
    return rows_of(Reading(**reading), traces).rows


def test_trajectories_and_transitions_carry_ids_and_messages(conversation: Any) -> None:
    first, *_ = made(conversation)
    assert (first["prompt_ids"], first["response_ids"], first["response_mask"]) == ([1, 2], [3, 4, 5, 6], [1, 0, 1, 1])
    assert [message["content"] for message in first["messages"]] == ["hello", "hi", "secret 42", "yes"]
    calls = made(conversation, form="transitions")
    assert [(row["rollout_id"], row["prompt_ids"], row["response_ids"]) for row in calls[:2]] == [
        ("ro-1", [1, 2], [3]),
        ("ro-1", [1, 2, 3, 4], [5, 6]),
    ]
    batch = to_transitions(conversation, agent_match="solver")
    assert (len(batch), batch.calls.tolist(), dict(batch.breaks), dict(batch.refused)) == (3, [1, 1, 1], {}, {"other_agent": 1})


def test_rows_share_their_token_ids_and_are_serialised_one_at_a_time(traces: Any, row: Any) -> None:
    """Each row holds its call's whole prompt: an id takes 8 bytes of a list there, and its text is not kept."""
    ids = list(range(1000, 21_000))
    built = traces.build(*(row(rollout=f"ro-{number}", prompt=ids, response=[1]) for number in range(20)))
    made(built)  # what is made once
    tracemalloc.start()
    rows = made(built)
    held = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    Exported(Reading(), []).add(built, Rows(rows))
    text_bytes = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert len(rows) == 20
    assert held < 20 * len(ids) * 20
    assert text_bytes < 20 * len(line_of(rows[0]))


def test_a_row_has_the_sampling_parameters_of_each_call(traces: Any, row: Any) -> None:
    built = traces.build(row(temperature=0.5), row(call=2, prefix=(1, 0), prompt=[4], temperature=math.nan, top_p=0.9))
    for form in ("trajectories", "sft"):
        (found,) = made(built, form=form)
        assert (found["temperature"], found["top_p"]) == ([0.5, None], [1.0, 0.9])
    assert [found["temperature"] for found in made(built, form="transitions")] == [[0.5], [None]]


def test_rows_may_have_the_returns_of_their_calls(traces: Any, row: Any) -> None:
    traces.rewards = {("ro-1", "at-1"): [Reward(2, "a", 0, "primary", 1.0), Reward(9, "b", 0, "primary", 4.0)]}
    built = traces.build(row(call=1, prompt=[1], response=[2, 3]), row(call=2, prompt=[1, 2, 3, 5], response=[4]))
    (found,) = rows_of(Reading(returns=True, discount=0.5), built).rows
    assert (found["reward"], found["returns"], found["token_returns"]) == (4.0, [3.0, 4.0], [3.0, 3.0, 0.0, 4.0])
    (cut,) = rows_of(Reading(returns=True, max_response_tokens=1), built).rows
    assert (cut["returns"], cut["token_returns"]) == ([5.0, 4.0], [5.0])
    (sft,) = rows_of(Reading(form="sft", returns=True), built).rows
    assert sft["weights"] == [0.0, 5.0, 5.0, 0.0, 4.0] and "token_returns" not in sft
    (datum,) = rows_of(Reading(form="tinker", returns=True), built).rows
    assert as_written("tinker", datum)["weights"] == [5.0, 5.0, 0.0, 4.0]
    for wrong in ("messages", "dpo"):
        with pytest.raises(UsageError, match="returns are those of calls with token ids: use a form of sft, tinker"):
            Reading(form=wrong, returns=True)


def test_a_transition_may_have_its_calls_own_reward(traces: Any, row: Any) -> None:
    traces.rewards = {
        ("ro-1", "at-1"): [Reward(1, "a", 0, "primary", 9.0), Reward(3, "b", 0, "primary", 0.5), Reward(3, "b", 1, "other", 7.0),
                           Reward(4, "c", 0, "primary", math.nan), Reward(9, "d", 0, "primary", 1.0)],
    }  # fmt: skip
    built = traces.build(*(row(rollout="ro-1", call=number, prompt=[number], response=[9]) for number in range(1, 5)))
    built.calls.sequence[:] = [2, 3, 5, 8]  # before any reward; before 0.5; after NaN's; before 1.0
    found = rows_of(Reading(form="transitions", call_rewards=True), built)
    assert [(each["prompt_ids"], each["reward"]) for each in found.rows] == [([1], 0.5), ([4], 1.0)]
    assert found.refused == {"no_call_reward": 2}, "one had a reward that is no number, one had none"
    filled = rows_of(Reading(form="transitions", call_rewards=True, fill_reward=0.25), built)
    assert [each["reward"] for each in filled.rows] == [0.5, 0.25, 0.25, 1.0]
    by_name = rows_of(Reading(form="sft", by_call=True, call_rewards=True, reward="other"), built)
    assert [each["reward"] for each in by_name.rows] == [7.0]
    wrongs: list[dict[str, Any]] = [{}, {"form": "transitions", "discount": 0.5}, {"form": "messages", "by_call": True}]
    for wrong in wrongs:
        with pytest.raises(UsageError, match="rewards of calls are for transitions"):
            Reading(call_rewards=True, **wrong)


def test_sft_has_loss_only_on_what_the_model_wrote(conversation: Any) -> None:
    first = made(conversation, form="sft", min_reward=0.9)[0]
    assert first["input_ids"] == [1, 2, 3, 4, 5, 6]
    assert first["labels"] == [IGNORED, IGNORED, 3, IGNORED, 5, 6]
    assert rows_of(Reading(form="sft", min_reward=0.9), conversation).refused == {"low_reward": 2}


def test_dpo_pairs_the_best_and_the_worst_of_one_prompt(conversation: Any) -> None:
    found = rows_of(Reading(form="dpo"), conversation)
    (pair,) = found.rows
    assert (pair["rollout_id"], pair["rejected_rollout_id"]) == ("ro-1", "ro-2")
    assert (pair["prompt_ids"], pair["chosen_ids"], pair["rejected_ids"]) == ([1, 2], [3, 4, 5, 6], [9])
    assert (pair["chosen_mask"], pair["rejected_mask"]) == ([1, 0, 1, 1], [1])
    assert found.refused == {"no_other_attempt": 1}


def test_reward_may_be_another_dimension(conversation: Any) -> None:
    found = rows_of(Reading(reward="other"), conversation)
    assert [(row["rollout_id"], row["reward"]) for row in found.rows] == [("ro-2", 9.0)]
    assert found.refused == {"no_reward": 2}


def test_messages_and_triplets_come_from_spans(traces: Any, row: Any) -> None:
    spans = [call("a", 1, 2), reward("r", 3, 0.5)]
    built = traces.build(row())
    for form in ("messages", "triplets"):
        (found,) = rows_of(Reading(form=form), built, spans).rows
        assert (found["rollout_id"], found["reward"]) == ("ro-1", 1.0)
    assert rows_of(Reading(form="messages", min_reward=2.0), built, spans).refused == {"low_reward": 1}


def test_unknown_form_is_named() -> None:
    with pytest.raises(UsageError, match="no form 'parables': use one of trajectories"):
        Reading(form="parables")


@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("messages", "triplets")])
def test_masking_never_changes_a_length(conversation: Any, form: str) -> None:
    for row in made(conversation, form=form):
        for rule in (MaskRule("drop_ids"), MaskRule("drop_ids", role="user"), MaskRule("drop_text"), MaskRule("hash_text", salt="s")):
            out = masked(row, [rule])
            assert {name: len(value) for name, value in row.items() if isinstance(value, list)} == {
                name: len(value) for name, value in out.items() if isinstance(value, list)
            }


def test_rules_drop_or_hash_text_and_keep_ids_or_drop_ids_and_mask_the_loss(conversation: Any) -> None:
    first, second, *_ = made(conversation)
    hashed = masked(first, [MaskRule("hash_text", role="user", text=r"\d+", salt="x")])
    assert hashed["messages"][2]["content"].startswith("sha256:")
    assert hashed["messages"][0]["content"] == "hello"
    assert hashed["response_ids"] == first["response_ids"]
    assert masked(first, [MaskRule("drop_text")])["messages"][3] == {"role": "assistant", "content": None}
    dropped = masked(first, [MaskRule("drop_ids", role="user", text=r"\d+")])
    assert (dropped["prompt_ids"], dropped["response_ids"], dropped["response_mask"]) == ([0, 0], [3, 0, 5, 6], [0] * 4)
    assert dropped["logprobs"] == [0.0] * 4, "what was sampled after other tokens is nothing to learn"
    silent = masked(first, [MaskRule("drop_ids", role="assistant")])
    assert (silent["response_ids"], silent["response_mask"], silent["logprobs"]) == ([0, 4, 0, 0], [0] * 4, [0.0] * 4)
    assert masked(second, [MaskRule("drop_ids", text=r"\d+")]) == second
    assert masked(first, [MaskRule("drop_text", agent="judge")]) == first
    unknown = masked({**first, "messages": []}, [MaskRule("drop_ids", text="anything")])
    assert (set(unknown["response_ids"]), set(unknown["response_mask"]), set(unknown["prompt_ids"])) == ({0}, {0}, {0})
    with pytest.raises(UsageError, match="no regular expression"):
        MaskRule("drop_text", text="(")


def test_a_pin_reports_later_changes(conversation: Any) -> None:
    traces = replace(conversation, digest="abc-4", highest_sequence={"ro-1": 2, "ro-2": 3, "ro-3": 4})
    rows = made(traces)
    exported = Exported(Reading(), [MaskRule("drop_text", salt="secret")])
    exported.add(traces, Rows(rows))
    pin = Pin.loads(exported.pin(["ro-3", "ro-2", "ro-1"]).dumps(), "here")
    content = hashlib.sha256("".join(map(line_of, rows)).encode()).hexdigest()
    assert (pin.rows, pin.content, pin.rules[0].salt, [*pin.rollouts]) == (3, content, "", ["ro-3", "ro-2", "ro-1"])

    def changes(*pages: Any) -> list[str]:
        read = Read()
        for page in pages:
            read.add(page)
        return pin.changes(read)

    assert changes(traces) == []
    first, rest = (replace(traces, rollouts=some) for some in (traces.rollouts[:1], traces.rollouts[1:]))
    assert changes(replace(first, digest="a00-1"), replace(rest, digest="0bc-3")) == [], "the same in two pages"
    assert changes(replace(traces, digest="abd-5")) == ["spans came late with sequence numbers below the highest, or are gone"]
    later = replace(traces, rollouts=traces.rollouts[1:], highest_sequence={"ro-2": 9, "ro-3": 4})
    assert changes(later) == ["rollout ro-1 is gone", "rollout ro-2 was read up to sequence 3, and goes up to 9 now"]
    with pytest.raises(DataError, match="here is no pin"):
        Pin.loads("{}", "here")
    with pytest.raises(DataError, match="here"):
        Pin.loads(b'{"version": "\xe9"}', "here")


def test_difference_counts_missing_new_and_changed_rows(conversation: Any) -> None:
    old, new = made(conversation), made(conversation, form="trajectories", min_reward=0.4)
    new = [{**row, "reward": 7.0} if row["rollout_id"] == "ro-3" else row for row in new]
    pages = Differences()
    for some in (["ro-1"], ["ro-2", "ro-3"]):
        pages.add(*([row for row in rows if row["rollout_id"] in some] for rows in (old, new)))
    found = pages.report()
    assert [found[name] for name in ("old", "new", "only_old", "only_new", "same", "changed")] == [3, 2, 1, 0, 1, {"reward": 1}]
    assert found["examples"] == [{"rollout_id": "ro-3", "attempt_id": "at-1", "fields": ["reward"], "reward": [0.5, 7.0]}]
    assert math.isclose(found["reward_mean"][1], 4.0)
    assert line_of({"b": 1, "a": [2]}) == '{"a":[2],"b":1}\n'
