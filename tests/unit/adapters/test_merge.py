from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from agl_otel.adapters.merge import SPLIT_REASONS, Call, lay_out, merge
from agl_otel.spans.history import StoredCall, full_prompts


def ids(*tokens: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(tokens, np.int32)


def call(number: int, prompt: Sequence[int], response: Sequence[int], agent: str = "", version: str = "") -> Call:
    return Call(row=number, call=number, prompt=ids(*prompt), response=ids(*response), agent=agent, model_version=version)


def reasons(calls: Sequence[Call]) -> list[str]:
    return [m.reason for m in merge(calls)]


def test_conversation_becomes_one_trajectory_whose_mask_marks_what_the_model_wrote() -> None:
    merged = merge([call(1, [1, 2], [3]), call(2, [1, 2, 3, 4, 5], [6, 7])])
    assert [[c.call for c in m.calls] for m in merged] == [[1, 2]]
    prompt, response, mask, logprobs = lay_out(merged[0], [np.array([-1.0], np.float32), np.array([-2.0, -3.0], np.float32)])
    assert prompt.tolist() == [1, 2]
    assert response.tolist() == [3, 4, 5, 6, 7]
    assert mask.tolist() == [1, 0, 0, 1, 1]
    assert logprobs.tolist() == [-1.0, 0.0, 0.0, -2.0, -3.0]


def test_call_whose_prompt_adds_nothing_continues_without_a_gap() -> None:
    merged = merge([call(1, [1, 2], [3]), call(2, [1, 2, 3], [4])])
    prompt, response, mask, _ = lay_out(merged[0], [np.zeros(1, np.float32), np.zeros(1, np.float32)])
    assert (prompt.tolist(), response.tolist(), mask.tolist()) == ([1, 2], [3, 4], [1, 1])


def test_every_break_has_its_reason() -> None:
    assert reasons([call(1, [1, 2], [3]), call(2, [1, 2, 9], [4])]) == ["", "response_changed"]
    assert reasons([call(1, [1, 2], [3]), call(2, [5, 2, 3], [4])]) == ["", "prompt_changed"]
    assert reasons([call(1, [1], [2]), call(2, [1, 2, 3], [4]), call(3, [1, 2, 5], [6])]) == ["", "branch"]
    assert reasons([call(1, [1], [2], agent="a"), call(2, [1, 2], [3], agent="b")]) == ["", "sub_agent"]
    assert reasons([call(1, [1], [2], agent="a"), call(2, [5], [3], agent="b")]) == ["", "sub_agent"]
    assert reasons([call(1, [1, 2], [3]), call(2, [1, 2], [4])]) == ["", "branch"]
    assert reasons([call(1, [1, 2, 5], [3]), call(2, [1, 5, 3, 6], [4])]) == ["", "truncated"]
    assert reasons([call(1, [1], [2], version="1"), call(2, [1, 2], [3], version="2")]) == ["", "model_version"]
    assert reasons([call(1, [1], [2]), call(1, [1], [3])]) == ["", "choice"]


def test_further_choices_are_branches_and_a_later_call_joins_the_one_it_continues() -> None:
    merged = merge([call(1, [1], [2]), call(1, [1], [3]), call(2, [1, 3, 9], [4])])
    assert [[c.response.tolist() for c in m.calls] for m in merged] == [[[2]], [[3], [4]]]


def test_interleaved_conversations_each_stay_whole() -> None:
    merged = merge([call(1, [1], [2]), call(2, [5], [6]), call(3, [1, 2, 1], [3]), call(4, [5, 6, 5], [7])])
    assert [[c.call for c in m.calls] for m in merged] == [[1, 3], [2, 4]]


def test_a_prefix_of_a_missing_or_later_call_dangles_and_so_do_its_dependents() -> None:
    stored = [
        StoredCall(1, 0, 0, 0, ids(1), ids(2)),
        StoredCall(2, 0, 9, 0, ids(3), ids(4)),
        StoredCall(3, 0, 2, 0, ids(5), ids(6)),
        StoredCall(4, 0, 4, 0, ids(5), ids(6)),
        StoredCall(5, 0, 1, 1, ids(5), ids(6)),
        StoredCall(6, 0, 1, 0, ids(5), ids(6)),
    ]
    assert [None if p is None else p.tolist() for p in full_prompts(stored)] == [[1], None, None, None, None, [1, 2, 5]]


# --- against the definition -------------------------------------------------------------------------------------

TOKENS = st.lists(st.integers(1, 2), min_size=1, max_size=2)


@st.composite
def attempts(draw: st.DrawFn) -> list[tuple[int, int, list[int], list[int], str, str]]:
    """(call, choice, full prompt, response, agent, version): prompts often go on from earlier calls, from two tokens only."""
    rows: list[tuple[int, int, list[int], list[int], str, str]] = []
    for number in range(1, draw(st.integers(1, 6)) + 1):
        prompt = draw(TOKENS)
        if rows and draw(st.integers(0, 3)):
            base = draw(st.sampled_from(rows))
            prompt = base[2] + base[3] + draw(st.lists(st.integers(1, 2), max_size=2))
        choices = draw(st.sampled_from([1, 1, 1, 2]))
        rows += [(number, i, prompt, draw(TOKENS), draw(st.sampled_from("aab")), draw(st.sampled_from("112"))) for i in range(choices)]
    return rows


def naive_merge(rows: Sequence[tuple[int, int, list[int], list[int], str, str]]) -> list[list[int]]:
    """Merge by definition: a call joins the longest (then earliest) trajectory of its agent and weights that is a prefix of its prompt."""
    trajectories: list[list[int]] = []
    for place, (number, _, prompt, _, agent, version) in enumerate(rows):
        fitting: list[tuple[int, list[int]]] = []
        for trajectory in trajectories:
            last = rows[trajectory[-1]]
            so_far = last[2] + last[3]
            if last[0] != number and last[4:] == (agent, version) and prompt[: len(so_far)] == so_far:
                fitting.append((len(so_far), trajectory))
        if fitting:
            longest = max(length for length, _ in fitting)
            next(trajectory for length, trajectory in fitting if length == longest).append(place)
        else:
            trajectories.append([place])
    return trajectories


@given(attempts())
@settings(max_examples=300, deadline=None)
def test_merge_equals_its_definition(rows: list[tuple[int, int, list[int], list[int], str, str]]) -> None:
    calls = [Call(place, r[0], ids(*r[2]), ids(*r[3]), r[4], r[5]) for place, r in enumerate(rows)]
    merged = merge(calls)
    assert [[c.row for c in m.calls] for m in merged] == naive_merge(rows)
    assert merged[0].reason == ""
    assert all(m.reason in SPLIT_REASONS for m in merged[1:])
    for m in merged:
        prompt, response, mask, logprobs = lay_out(m, [np.full(len(c.response), -float(c.row) - 1, np.float32) for c in m.calls])
        last = m.calls[-1]
        assert [*prompt, *response] == [*last.prompt, *last.response]
        assert len(response) == len(mask) == len(logprobs)
        assert response[mask == 1].tolist() == [t for c in m.calls for t in c.response.tolist()]
        assert logprobs[mask == 1].tolist() == [-c.row - 1 for c in m.calls for _ in c.response]
        assert not logprobs[mask == 0].any()


@given(attempts(), st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_prefix_form_is_the_same_as_the_full_prompt(rows: list[tuple[int, int, list[int], list[int], str, str]], source: object) -> None:
    choose = source.choice  # type: ignore[attr-defined]  # hypothesis gives a random.Random
    stored: list[StoredCall] = []
    for number, choice, prompt, response, _, _ in rows:
        bases = [r for r in rows if r[0] < number and prompt[: len(r[2] + r[3])] == r[2] + r[3]]
        base = choose([None, *bases])
        if base is None:
            stored.append(StoredCall(number, choice, 0, 0, ids(*prompt), ids(*response)))
        else:
            stored.append(StoredCall(number, choice, base[0], base[1], ids(*prompt[len(base[2] + base[3]) :]), ids(*response)))
    assert [p.tolist() if p is not None else None for p in full_prompts(stored)] == [r[2] for r in rows]
