"""Holds the sampling contract of each call against the distribution that a trainer assumes. Pure.

A call's tokens were drawn from the distribution that its agent, its resource and its model server made together (types/sampling.py).
A policy gradient of tokens that were drawn from another one than the trainer evaluates is biased, and nothing else shows it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from agl_otel.adapters.token_columns import spread
from agl_otel.types.columns import CallColumns, Ragged
from agl_otel.types.sampling import LEAST_TEMPERATURE, NEUTRAL, Contract, in_words
from agl_otel_hook import conventions

TOLERANCE: Final = 1e-6
"""Allowed difference between two temperatures."""
_REQUESTED: Final = {"temperature": "gen_ai.request.temperature", "top_p": "gen_ai.request.top_p"}
UNRECORDED: Final = "unrecorded"
"""Stands for the fields of a call without a contract: one that no proxy of ours forwarded."""
UNSENT: Final = "unsent"
"""Stands for the fields of a call that nobody sent, and that its model server may have filled in."""
Temperatures = Literal["run", "one", "any"]


@dataclass(frozen=True)
class Assumed:
    """The distribution that a trainer assumes: softmax(logits / temperature), with the other parameters."""

    temperature: float
    """Of the run."""
    others: Mapping[str, Any] | None = field(default_factory=lambda: dict(NEUTRAL))
    """None: whatever they are, only greedy replies are refused."""
    temperatures: Temperatures = "run"
    """The calls that the trainer can score: those at the run's temperature; at any, if all of a batch have one; or at any."""
    agent_alone: bool = False
    """Whether only what the agent sets counts: a trial has no training resource, which would send all other parameters."""


IN_A_JOB: Final = Assumed(1.0, temperatures="one", agent_alone=True)
"""What GRPO assumes by its default options of an agent that it runs itself."""


@dataclass(frozen=True)
class Unlike:
    """What of the calls was sampled otherwise than assumed: one entry for each call."""

    greedy: NDArray[np.bool_]
    """Sampled below LEAST_TEMPERATURE: such tokens are no samples of a distribution, and have no gradient."""
    fields: list[tuple[str, ...]]
    """By which fields its distribution differs from the assumed one, or is unknown."""

    @property
    def differs(self) -> NDArray[np.bool_]:
        """Whether any field does."""
        return np.array([bool(each) for each in self.fields], np.bool_)

    def counted(self, rows: NDArray[np.bool_]) -> Counter[str]:
        """Count the fields of the calls in `rows` that differ."""
        return Counter(name for row in np.flatnonzero(rows).tolist() for name in self.fields[row])


def unlike(calls: CallColumns, assumed: Assumed) -> Unlike:
    """Compare each call's contract with the assumed distribution."""
    return unlike_of(calls.temperature, calls.contract, assumed)


def unlike_of(temperature: NDArray[np.float64], contracts: Sequence[str], assumed: Assumed) -> Unlike:
    """Compare calls as `unlike` does, by their temperatures (NaN: unknown) and contracts as JSON (empty: none)."""
    if assumed.others is None:
        return Unlike(temperature < LEAST_TEMPERATURE, [()] * len(contracts))
    others = {text: _differing(text, assumed) for text in set(contracts)}
    fields = [others[text] for text in contracts]
    unsent = np.array([UNSENT in each for each in fields], np.bool_)
    off = np.isnan(temperature) & ~unsent & (not assumed.agent_alone)
    if assumed.temperatures == "run":
        off |= np.abs(temperature - assumed.temperature) > TOLERANCE
    for row in np.flatnonzero(off).tolist():
        fields[row] = fields[row] if fields[row] == (UNRECORDED,) else ("temperature", *fields[row])
    return Unlike(temperature < LEAST_TEMPERATURE, fields)


def at_one_temperature(calls: CallColumns, fit: NDArray[np.bool_], preferred: float) -> NDArray[np.bool_]:
    """Return those of the `fit` calls that have one temperature: the preferred one if any has it, else the most frequent one.

    An unknown one is taken for the preferred one.
    """
    temperature = np.where(np.isnan(calls.temperature), preferred, calls.temperature)
    values, counts = np.unique(temperature[fit], return_counts=True)
    if len(values) < 2:
        return fit
    near = np.abs(values - preferred) <= TOLERANCE
    chosen = values[near][0] if near.any() else values[np.argmax(counts)]
    return fit & (np.abs(temperature - chosen) <= TOLERANCE)


def token_temperatures(calls: CallColumns, rows: Ragged, *, default: float) -> Ragged:
    """Return the sampling temperature of each token that the model wrote: float32, a row for each trajectory.

    `rows`: TrajectoryBatch.rows of trajectories that no length limit has cut; `default`: of calls whose temperature is unknown.
    """
    row: Any = rows.values
    of_calls = np.where(np.isnan(calls.temperature[row]), default, calls.temperature[row]).astype(np.float32)
    return spread(calls, rows, of_calls)


def sampling_notes(attributes: Mapping[str, Any], told: Mapping[str, Any]) -> list[str]:
    """Describe how a call was sampled otherwise than its resource's parameters (`told`) say, and for what a job would refuse it."""
    contract = _contract_of(attributes)
    refused = {name: contract.agent.get(name) for name in _refused_for(attributes, contract)}
    others = {name: value for name, value in contract.agent.items() if name not in refused}
    notes = replace(contract, agent=others).notes(told)
    return [f"not trained on: {', '.join(in_words(refused))}", *notes] if refused else notes


def _refused_for(attributes: Mapping[str, Any], contract: Contract) -> Sequence[str]:
    recorded = attributes.get(conventions.LLM_SAMPLING)
    if recorded is None:
        return ()
    found = unlike_of(np.array([contract.temperature], np.float64), [str(recorded)], IN_A_JOB)
    return ("temperature",) if found.greedy[0] else found.fields[0]


def unsent_of(contract: str) -> Sequence[str]:
    """Return the fields that nobody sent, and that the model server may have filled in, by a contract as JSON (empty: none)."""
    known = Contract.loads(contract) if contract else None
    return known.server if known is not None else ()


def own_temperature_of(attributes: Mapping[str, Any]) -> float | None:
    """Return the temperature that the agent set itself; None if it set none."""
    value = _contract_of(attributes).own().get("temperature")
    return float(value) if isinstance(value, int | float) else None


def several_choices_warning(several: int, calls: int, *, told: bool = False) -> str:
    """Warn that `several` of the `calls` read are choices of requests that asked for more than one.

    `told`: return the count alone, because the user has read the advice.
    """
    counted = f"{several} of {calls} sampled replies ({100 * several / calls:.0f} %) are choices beside others of the same request (n > 1)"
    if told:
        return counted
    return (
        f"{counted}: which of them the agent used is not known, so each has the attempt's reward. "
        "Let the agent ask for one choice while it is trained"
    )


def _contract_of(attributes: Mapping[str, Any]) -> Contract:
    known = Contract.loads(attributes.get(conventions.LLM_SAMPLING, ""))
    if known is None:  # a span of the agent's own
        return Contract({name: attributes[key] for name, key in _REQUESTED.items() if key in attributes})
    return known


def _differing(text: str, assumed: Assumed) -> tuple[str, ...]:
    contract = Contract.loads(text) if text else None
    if assumed.agent_alone:
        raw = contract is not None and contract.logprobs == "raw"
        contract = Contract(contract.agent if contract is not None else {}, logprobs="raw" if raw else "processed")
    if contract is None:
        return (UNRECORDED,)
    sent = replace(contract, server=()).differing(assumed.others or {})
    return (UNSENT, *sent) if contract.server else sent
