"""The fields added to each route's requests for capture, and their removal from the answers. Pure.

Each route is a row of DIALECTS.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from agl_otel.proxy.dialects.anthropic import MESSAGES
from agl_otel.proxy.dialects.dialect import Dialect
from agl_otel.proxy.dialects.openai import CHAT, COMPLETIONS, EMBEDDINGS, OUTPUT_IDS, TOKEN_IDS
from agl_otel.proxy.dialects.responses import INCLUDE, RAW_FIELDS, RAW_MESSAGES, RESPONSES, texts_of
from agl_otel.proxy.reply import Json, dicts

__all__ = ["CHAT", "DIALECTS", "Dialect", "Prepared", "as_sampled", "is_bare", "prepare", "take_out", "told_of"]

DIALECTS: Final = {dialect.path: dialect for dialect in (CHAT, COMPLETIONS, RESPONSES, MESSAGES, EMBEDDINGS)}
_ID_FIELDS: Final = ("prompt_token_ids", "token_ids", "response_token_ids", "weight_versions")


@dataclass(frozen=True, slots=True)
class Prepared:
    """The changes to a request before it is forwarded."""

    fields: Json
    """Fields to set in the agent's body; the rest of it stays unchanged."""
    added: frozenset[str]
    """Fields that the agent did not request; their results are removed from the answer."""


def prepare(
    dialect: Dialect, asked: Mapping[str, Any], *, model: str | None, sampling: Mapping[str, Any], extras: Mapping[str, Any]
) -> Prepared:
    """Return the fields to set in the agent's body: the model, defaults for unset sampling parameters, and the `extras` of capture."""
    defaults = told_of(dialect, sampling)
    fields = {name: value for name, value in defaults.items() if asked.get(name) is None}  # null counts as unset
    if model and asked.get("model") != model:
        fields["model"] = model
    added = {name: value for name, value in extras.items() if asked.get(name) is None or asked[name] is False}
    if INCLUDE not in extras:
        return Prepared(fields | added, frozenset(added))
    given: Any = asked.get(INCLUDE)
    if isinstance(given, list) and (more := [each for each in extras[INCLUDE] if each not in given]):
        added[INCLUDE] = [*cast("list[Any]", given), *more]
    return Prepared(fields | added, frozenset("logprobs" if name == INCLUDE else name for name in added))


def told_of(dialect: Dialect, sampling: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the sampling parameters that are sent to this route, by its own names."""
    names = dialect.sampling
    return sampling if names is None else {names[name]: value for name, value in sampling.items() if name in names}


def as_sampled(asked: Mapping[str, Any], sampling: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the request with `sampling` as defaults, under its own names."""
    return {**sampling, **{name: value for name, value in asked.items() if value is not None}} if sampling else asked


def is_bare(payload: Json) -> bool:
    """Return whether nothing is left of a chunk of SGLang's that had only token ids."""
    return "sglext" in payload and not any(payload.get(name) for name in ("sglext", "choices", "usage", "error"))


def take_out(payload: Json, added: frozenset[str]) -> bool:
    """Remove from an answer, or a chunk of one, what the agent did not request; return whether anything changed."""
    changed = False
    choices = dicts(payload.get("choices"))
    inner = [cast("Json", payload[name]) for name in ("response", "message") if isinstance(payload.get(name), dict)]
    if TOKEN_IDS in added:
        for part in (payload, *inner, *choices):
            for name in _ID_FIELDS:
                if name in part:
                    del part[name]
                    changed = True
    if RAW_MESSAGES in added:
        for part in (payload, *inner):
            for name in RAW_FIELDS:
                if part.get(name) is not None:
                    part[name] = None  # as vLLM answers without the request
                    changed = True
    if OUTPUT_IDS in added and isinstance(payload.get("sglext"), dict):
        extension: Json = payload["sglext"]
        payload["sglext"] = {name: value for name, value in extension.items() if name not in ("input_ids", "output_ids")}
        changed = True
    if "logprobs" in added:
        for part in choices or texts_of(payload):
            if part.get("logprobs") is not None:
                part["logprobs"] = [] if str(part.get("type")).startswith("response.") else None  # of events: never null
                changed = True
    return changed
