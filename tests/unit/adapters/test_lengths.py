from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agl_otel.adapters.lengths import LENGTH_REFUSALS, limit_lengths, readable
from agl_otel.adapters.trajectories import to_trajectories
from agl_otel.errors import UsageError
from tests.unit.adapters.conftest import CallRow, TracesBuilder


def test_limits_cut_the_end_of_responses_and_refuse_long_prompts(traces: Any, row: Any) -> None:
    batch = to_trajectories(
        traces.build(
            row(rollout="ro-1", prompt=[1, 2], response=[3, 4, 5]),
            row(rollout="ro-2", prompt=[1, 2, 3], response=[4]),
            row(rollout="ro-3", prompt=[1], response=[2]),
            row(rollout="ro-3", call=2, prefix=(1, 0), prompt=[8, 8], response=[9]),
        )
    )
    limited = limit_lengths(batch, max_prompt_tokens=2, max_response_tokens=2)
    assert limited.rollout_id == ["ro-1", "ro-3"]
    assert [r.tolist() for r in limited.response] == [[3, 4], [2, 8]]
    assert [r.tolist() for r in limited.response_mask] == [[1, 1], [1, 0]]
    assert limited.refused == {"prompt_too_long": 1}
    assert limited.cut == 2
    with pytest.raises(UsageError, match="max_response_tokens is 0"):
        limit_lengths(batch, max_response_tokens=0)


def test_trajectories_beyond_the_models_limits_are_refused_and_counted(traces: Any, row: Any) -> None:
    batch = to_trajectories(
        traces.build(row(rollout="ro-1", prompt=[1, 2], response=[3]), row(rollout="ro-2", prompt=[1, 2], response=[3, 4])),
    )
    assert readable(batch, context_tokens=4) is batch
    fits = readable(batch, context_tokens=3)
    assert (fits.rollout_id, fits.refused) == (["ro-1"], {"beyond_context": 1})
    assert batch.refused == {}, "what was read stays as it is"


def test_ids_outside_the_vocabulary_are_refused_and_counted_once(traces: Any, row: Any) -> None:
    rows = [
        row(rollout="ro-1", prompt=[1, 9], response=[3]),
        row(rollout="ro-2", prompt=[1, 2], response=[10, 4]),
        row(rollout="ro-3", prompt=[10], response=[4, 10]),
        row(rollout="ro-4", prompt=[1, 2], response=[3], call=1),
        row(rollout="ro-4", call=2, prefix=(1, 0), prompt=[11], response=[9]),
    ]
    batch = to_trajectories(traces.build(*rows))
    assert readable(batch, vocabulary=12) is batch
    assert readable(batch) is batch
    known = readable(batch, vocabulary=10, context_tokens=2)
    assert known.rollout_id == []
    assert known.refused == {"beyond_vocabulary": 3, "beyond_context": 1}
    assert readable(batch, vocabulary=11).rollout_id == ["ro-1", "ro-2", "ro-3"]


@st.composite
def attempts(draw: st.DrawFn) -> list[CallRow]:
    tokens = st.lists(st.integers(1, 9), min_size=1, max_size=5)
    return [
        CallRow(rollout=f"ro-{number}", call=call, prefix=(call - 1, 0), prompt=draw(tokens), response=draw(tokens))
        for number in range(draw(st.integers(0, 4)))
        for call in range(1, draw(st.integers(1, 3)) + 1)
    ]


@given(attempts(), st.one_of(st.none(), st.integers(1, 6)), st.one_of(st.none(), st.integers(1, 12)))
@settings(max_examples=200, deadline=None)
def test_ids_masks_and_logprobs_never_differ_in_length(rows: list[CallRow], prompt: int | None, response: int | None) -> None:
    batch = to_trajectories(TracesBuilder().build(*rows))
    limited = limit_lengths(batch, max_prompt_tokens=prompt, max_response_tokens=response)
    assert limited.response.lengths.tolist() == limited.response_mask.lengths.tolist() == limited.logprobs.lengths.tolist()
    assert all(length <= (response or 99) for length in limited.response.lengths.tolist())
    assert all(length <= (prompt or 99) for length in limited.prompt.lengths.tolist())
    assert len(limited) + sum(limited.refused[reason] for reason in LENGTH_REFUSALS) == len(batch)
    whole = {name: rows.tolist() for name, rows in zip(batch.rollout_id, batch.response, strict=True)}
    for name, ids, mask in zip(limited.rollout_id, limited.response, limited.response_mask, strict=True):
        assert whole[name][: len(ids)] == ids.tolist()
        assert mask.any()
