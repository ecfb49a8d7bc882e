"""Sampling parameters of model servers. A server fills in what a request leaves out from the model's generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from agl_otel.text import without_secrets

EXTRA_HEADERS: Final = "extra_headers"
EXTRA_BODY: Final = "extra_body"
"""Arguments of OpenAI's client beside the parameters: extra headers, and extra fields of the body."""
NEUTRAL: Final[Mapping[str, float]] = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}
"""{parameter: the value that leaves the distribution unchanged} for vLLM, SGLang and this package's server; top_k -1 is all tokens."""
_NO_CONSTRAINT: Final[Mapping[str, Sequence[Any]]] = {
    **{name: (value,) for name, value in NEUTRAL.items() if name != "top_p"},
    "top_k": (0, -1),
    "logit_bias": ({},),
    "bad_words": ([],),
    "min_tokens": (0,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none", {"type": "auto"}, {"type": "none"}),
    **dict.fromkeys(("allowed_token_ids", "structured_outputs", "regex", "ebnf"), ()),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), ()),
}
"""{field of a request after which some tokens are more or less likely than the model has them: its values without effect}."""
_NOT_OPENAIS: Final = frozenset({"top_k", "min_p", "repetition_penalty"})


def all_parameters(temperature: float, max_tokens: int, **others: float) -> dict[str, Any]:
    """Return every sampling parameter, so that no server's default applies; `others` override the neutral ones."""
    return {"temperature": float(temperature), "max_tokens": int(max_tokens), **NEUTRAL, **others}


def for_agents(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters to show an agent behind the proxy, which adds the rest itself.

    Left out are neutral ones for which OpenAI's client has no argument, headers, and anything that holds a secret.
    """
    return {
        name: value
        for name, value in sampling.items()
        if (name not in _NOT_OPENAIS or value != NEUTRAL[name])
        and name != EXTRA_HEADERS
        and without_secrets({name: value}) == {name: value}
    }


def own_constraints(asked: Mapping[str, Any], told: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the fields of an agent's request that change the distribution from which its reply is sampled: a grammar
    (`response_format`), a forced tool call, `top_k` and others.

    Left out are `temperature` and `top_p`, which a call's span has, and values that the resource (`told`) sets itself.
    """
    text: Any = asked.get("text")  # of the Responses API
    fields = {**asked, "response_format": text["format"]} if isinstance(text, dict) and "format" in text else asked
    if _NO_CONSTRAINT.keys().isdisjoint(fields):
        return ()
    given = {name: fields[name] for name in _NO_CONSTRAINT if fields.get(name) is not None}
    return tuple(name for name, value in given.items() if value not in _NO_CONSTRAINT[name] and value != told.get(name))
