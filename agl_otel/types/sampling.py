"""How tokens are drawn, as model servers take it. What a request leaves out, a server fills in from the model's generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from agl_otel.text import without_secrets

EXTRA_HEADERS: Final = "extra_headers"
EXTRA_BODY: Final = "extra_body"
"""Arguments of OpenAI's client beside the parameters: headers of the request, and more of its body."""
NEUTRAL: Final[Mapping[str, float]] = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}
"""{parameter: the value that leaves the model's distribution as it is}, as vLLM, SGLang and our own server take them; -1 is all tokens."""
_NOT_OPENAIS: Final = frozenset({"top_k", "min_p", "repetition_penalty"})


def all_parameters(temperature: float, max_tokens: int, **others: float) -> dict[str, Any]:
    """Every sampling parameter, so that none is left to a server's defaults; `others` over the neutral ones."""
    return {"temperature": float(temperature), "max_tokens": int(max_tokens), **NEUTRAL, **others}


def for_agents(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Those that an agent behind the proxy is told, which adds the rest.

    Without neutral ones that OpenAI's client has no argument for, without headers, and without what holds a secret.
    """
    return {
        name: value
        for name, value in sampling.items()
        if (name not in _NOT_OPENAIS or value != NEUTRAL[name])
        and name != EXTRA_HEADERS
        and without_secrets({name: value}) == {name: value}
    }
