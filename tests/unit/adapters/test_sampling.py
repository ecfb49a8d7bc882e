"""Which calls were sampled from the distribution that a trainer assumes, and which of them a step may take together."""

from __future__ import annotations

import math

import numpy as np
import pytest

from agl_otel.adapters.sampling import UNRECORDED, UNSENT, Assumed, at_one_temperature, unlike
from agl_otel.types.sampling import NEUTRAL, Contract, LogProbs

from .conftest import CallRow, call_columns


def test_of_a_trial_only_what_the_agent_sets_counts_and_raw_log_probs() -> None:
    """Its resource is not that of a training, which sends all other parameters."""
    known: list[tuple[LogProbs, tuple[str, ...]]] = [("", ()), ("processed", ()), ("raw", ("logprobs",))]
    calls = call_columns([CallRow(temperature=0.2)])
    for logprobs, fields in known:
        calls.contract[:] = [Contract.of({"temperature": 0.2}, {}, logprobs=logprobs).dumps()]
        assert unlike(calls, Assumed(1.0, temperatures="any", agent_alone=True)).fields == [fields]
    calls.contract[:] = [""]
    assert unlike(calls, Assumed(1.0, temperatures="any", agent_alone=True)).fields == [()]
    assert unlike(calls, Assumed(1.0, temperatures="any")).fields == [(UNRECORDED,)]


@pytest.mark.parametrize(
    ("agent", "resource", "fields"),
    [
        ({"max_tokens": 8}, {}, (UNSENT,)),
        ({"max_tokens": 8}, {"temperature": 1.0, **NEUTRAL}, ()),
        ({"top_p": 0.9}, {"temperature": 1.0}, (UNSENT, "top_p", "logprobs")),
        ({"temperature": 0.5}, {}, (UNSENT, "logprobs")),
    ],
)
def test_what_nobody_sends_is_one_cause_beside_what_the_agent_sets(
    agent: dict[str, float], resource: dict[str, float], fields: tuple[str, ...]
) -> None:
    """A model server may have filled it in from generation_config.json."""
    contract = Contract.of(agent, resource)
    calls = call_columns([CallRow(temperature=contract.temperature)])
    calls.contract[:] = [contract.dumps()]
    assert unlike(calls, Assumed(1.0, temperatures="one")).fields == [fields]


@pytest.mark.parametrize(
    ("temperatures", "preferred", "kept"),
    [
        ([1.0, 0.5, 0.5], 1.0, [True, False, False]),
        ([0.7, 0.5, 0.5], 1.0, [False, True, True]),
        ([0.5, 0.5, 0.5], 1.0, [True, True, True]),
        ([0.5, 1.0 + 1e-9, 1.0], 1.0, [False, True, True]),
    ],
)
def test_a_step_has_the_runs_temperature_or_the_most_frequent_one(temperatures: list[float], preferred: float, kept: list[bool]) -> None:
    calls = call_columns([CallRow(rollout=f"ro-{number}", temperature=each) for number, each in enumerate(temperatures)])
    assert at_one_temperature(calls, np.ones(3, np.bool_), preferred).tolist() == kept


def test_an_unknown_temperature_differs() -> None:
    calls = call_columns([CallRow(temperature=math.nan)])
    calls.contract[:] = [Contract.of({}, {name: value for name, value in NEUTRAL.items() if name != "temperature"}).dumps()]
    assert unlike(calls, Assumed(1.0)).fields == [(UNSENT,)]
