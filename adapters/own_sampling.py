"""Finds calls that were not sampled as training requires, since an agent's own parameters override the resource's. Pure.

The tokens of such a call come from another distribution than the one that training assumes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from agl_otel.types.columns import CallColumns, Ragged
from agl_otel_hook import conventions

REQUESTED: Final = {"temperature": "gen_ai.request.temperature", "top_p": "gen_ai.request.top_p"}
"""{parameter: attribute of a call}."""
TOLERANCE: Final = 1e-6
"""Allowed difference between a requested number and the same number stored as text."""

LEAST_TEMPERATURE: Final = 0.01
"""Below it replies are greedy: at 0 by definition, and vLLM samples at 0.01 for anything less."""
GREEDY_REMEDY: Final = (
    f". own_temperature: the agent asks for a temperature below {LEAST_TEMPERATURE:g} (greedy), which is no sample of the policy; let it"
    " set none, so that the run's temperature holds"
)


def sampled_otherwise(calls: CallColumns, *, temperature: float, top_p: float | None = 1.0) -> NDArray[np.bool_]:
    """Return for each call whether its temperature or top_p is known to differ from these, or it has another constraint of the agent's.

    `top_p` None: its temperature alone counts.
    """
    other = np.zeros(len(calls), np.bool_)
    for column, asked in ((calls.temperature, temperature), (calls.top_p, top_p)):
        if column is not None and asked is not None:
            other |= np.abs(column - asked) > TOLERANCE  # false for NaN (unknown)
    if calls.constrained is not None and top_p is not None:
        other |= calls.constrained
    return other


def sampled_greedily(calls: CallColumns) -> NDArray[np.bool_]:
    """Return for each call whether it is known to have been sampled at a temperature below LEAST_TEMPERATURE.

    Its tokens are no samples of a distribution: their ratios, of which the policy gradient is made, have no meaning.
    """
    return np.zeros(len(calls), np.bool_) if calls.temperature is None else calls.temperature < LEAST_TEMPERATURE  # false for NaN (unknown)


def token_temperatures(calls: CallColumns, rows: Ragged, *, default: float) -> Ragged:
    """Return the sampling temperature of each token that the model wrote: float32, a row for each trajectory.

    `rows`: TrajectoryBatch.rows of trajectories that no length limit has cut; `default`: of calls whose temperature is unknown.
    """
    of_calls = np.full(len(rows.values), default, np.float32)
    row: Any = rows.values
    if calls.temperature is not None:
        known = ~np.isnan(calls.temperature[row])
        of_calls[known] = calls.temperature[row][known]
    lengths = calls.response.lengths[row]
    offsets = np.concatenate([[0], np.cumsum(lengths)])[rows.offsets]
    return Ragged(np.repeat(of_calls, lengths), offsets)


def own_parameters(attributes: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, float]:
    """Return {parameter: value} of a call that differ from its resource's sampling_parameters (`asked`)."""
    given = {name: attributes.get(key) for name, key in REQUESTED.items()}
    return {name: value for name, value in given.items() if isinstance(value, int | float) and value != asked.get(name)}


def own_sampling_of(attributes: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """Return in words what of a call's sampling was its agent's own: `own_parameters`, and the fields that constrained it."""
    own = [f"{name} {value:g}" for name, value in own_parameters(attributes, asked).items()]
    return [*own, *(name for name in attributes.get(conventions.LLM_CONSTRAINED) or () if isinstance(name, str))]


def several_choices_warning(several: int, calls: int, *, told: bool = False) -> str:
    """Return a warning if requests of training calls asked for several choices: `several` of the `calls` read are such choices.

    `told`: return the count alone, because the user has read the advice.
    """
    counted = f"{several} of {calls} sampled replies ({100 * several / calls:.0f} %) are choices beside others of the same request (n > 1)"
    if told:
        return counted
    return (
        f"{counted}: which of them the agent used is not known, so each has the attempt's reward. "
        "Let the agent ask for one choice while it is trained"
    )
