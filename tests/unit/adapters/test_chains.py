from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from agl_otel.adapters import trajectories
from agl_otel.adapters.chains import chains
from agl_otel.types.columns import Ragged, Traces
from tests.unit.adapters.conftest import CallRow, TracesBuilder

TOKENS = st.lists(st.integers(1, 5), min_size=1, max_size=3)


@st.composite
def rows(draw: st.DrawFn) -> list[CallRow]:
    """Some attempts, most of them chains, with the defects that break one."""
    made: list[CallRow] = []
    for number in range(draw(st.integers(1, 4))):
        for call in range(1, draw(st.integers(1, 4)) + 1):
            last = call > 1 and draw(st.integers(0, 5)) > 0
            response = draw(TOKENS)
            made.append(
                CallRow(
                    rollout=f"ro-{number}",
                    call=call,
                    prompt=draw(st.lists(st.integers(1, 5), max_size=2)) if last else draw(TOKENS),
                    response=response,
                    logprobs=draw(st.sampled_from([None, None, None, None, None, []])),
                    prefix=(call - 1, 0) if last else (0, 0),
                    agent=draw(st.sampled_from("aaaaab")),
                    version=draw(st.sampled_from("111112")),
                    process=draw(st.sampled_from(["m1"] * 8 + ["m2"])),
                )
            )
    return made


@given(rows())
@settings(max_examples=300, deadline=None)
def test_chains_equal_the_result_of_merge(made: list[CallRow]) -> None:
    traces = TracesBuilder().build(*made)
    fast = trajectories.to_trajectories(traces)
    slow = _by_merging(traces)
    for name in fast.COLUMNS:
        ours, theirs = getattr(fast, name), getattr(slow, name)
        if isinstance(ours, Ragged):
            assert [row.tolist() for row in ours] == [row.tolist() for row in theirs], name
            assert ours.values.dtype == theirs.values.dtype
        else:
            assert list(ours) == list(theirs), name
    assert fast.refused == slow.refused
    assert fast.breaks == slow.breaks


def _by_merging(traces: Traces) -> trajectories.TrajectoryBatch:
    def none(calls: Any, attempt: Any, fit: Any) -> Any:
        return np.zeros(len(calls), np.bool_), np.zeros(len(calls), np.bool_)

    kept = trajectories.chains
    trajectories.chains = none
    try:
        return trajectories.to_trajectories(traces)
    finally:
        trajectories.chains = kept


def test_a_chain_needs_every_call_of_its_attempt(traces: Any, row: Any) -> None:
    built: Traces = traces.build(
        row(rollout="ro-1"),
        row(rollout="ro-1", call=2, prefix=(1, 0)),
        row(rollout="ro-2"),
        row(rollout="ro-2", call=3, prefix=(2, 0)),
        row(rollout="ro-3"),
        row(rollout="ro-4", prefix=(1, 0)),
    )
    attempt = np.array([0, 0, 1, 1, -1, 2])
    begins, chained = chains(built.calls, attempt, np.ones(6, np.bool_))
    assert chained.tolist() == [True, True, False, False, False, False]
    assert begins.tolist() == [True, False, False, False, False, False]
