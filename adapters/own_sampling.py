"""Which calls were not sampled as training asked: an agent's own temperature or top_p on its requests wins over the resource's. Pure.

What such a call wrote came from another distribution than the one that training computes its probabilities under.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from agl_otel.types.columns import CallColumns

REQUESTED: Final = {"temperature": "gen_ai.request.temperature", "top_p": "gen_ai.request.top_p"}
"""{parameter: the attribute of a call that says it}."""
TOLERANCE: Final = 1e-6
"""Between a number that was asked for and the same one after it was stored as text."""


def sampled_otherwise(calls: CallColumns, *, temperature: float, top_p: float = 1.0) -> NDArray[np.bool_]:
    """Of each call: whether its temperature or top_p is known to be another one than these."""
    other = np.zeros(len(calls), np.bool_)
    for column, asked in ((calls.temperature, temperature), (calls.top_p, top_p)):
        if column is not None:
            other |= np.abs(column - asked) > TOLERANCE  # a comparison with NaN, not known, is false
    return other


def own_of(attributes: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, float]:
    """{parameter: value} of a call's span that are not those of the resource that its agent was given (`asked`: sampling_parameters)."""
    said = {name: attributes.get(key) for name, key in REQUESTED.items()}
    return {name: value for name, value in said.items() if isinstance(value, int | float) and value != asked.get(name)}


def several_choices_words(several: int, calls: int) -> str:
    """The warning where so many of the model calls read for training are choices beside others of the same call."""
    return (
        f"{several} of {calls} sampled replies ({100 * several / calls:.0f} %) are choices beside others of the same request (n > 1): "
        "which of them the agent used is not known, so each has the attempt's reward. Let the agent ask for one choice while it is trained"
    )
