"""What each route is asked for beyond what the agent asked, and what is taken out of its answer again. Pure.

A table, not a ladder: a further route is a further row in DIALECTS.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from agl_otel.proxy.dialects.anthropic import MESSAGES
from agl_otel.proxy.dialects.dialect import Dialect
from agl_otel.proxy.dialects.openai import CHAT, COMPLETIONS, EMBEDDINGS, TOKEN_IDS
from agl_otel.proxy.dialects.responses import RESPONSES
from agl_otel.proxy.reply import Json, dicts

__all__ = ["CHAT", "DIALECTS", "Dialect", "Prepared", "as_sampled", "prepare", "take_out"]

DIALECTS: Final = {dialect.path: dialect for dialect in (CHAT, COMPLETIONS, RESPONSES, MESSAGES, EMBEDDINGS)}
_ID_FIELDS: Final = ("prompt_token_ids", "token_ids")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request as it goes upstream."""

    fields: Json
    """What is set in the agent's body; the rest of it stays as the agent wrote it."""
    added: frozenset[str]
    """Fields that the agent did not ask for: what they bring is taken out of the answer."""


def prepare(dialect: Dialect, asked: Mapping[str, Any], *, model: str | None, sampling: Mapping[str, Any], capture: bool) -> Prepared:
    """What to set in the agent's body: the resource's model, its sampling parameters where the agent set none, and what capture needs."""
    names = dialect.sampling
    defaults = sampling if names is None else {names[name]: value for name, value in sampling.items() if name in names}
    fields = {name: value for name, value in defaults.items() if asked.get(name) is None}  # null asks for the server's own default
    if model and asked.get("model") != model:
        fields["model"] = model
    if not capture:
        return Prepared(fields, frozenset())
    added = {name: value for name, value in dialect.extras.items() if asked.get(name) is None or asked[name] is False}
    return Prepared(fields | added, frozenset(added))


def as_sampled(asked: Mapping[str, Any], sampling: Mapping[str, Any]) -> Mapping[str, Any]:
    """The request with what is set where the agent set none, under the names of `sampling`."""
    return {**sampling, **{name: value for name, value in asked.items() if value is not None}} if sampling else asked


def take_out(payload: Json, added: frozenset[str]) -> bool:
    """Remove from an answer (or a chunk of one) what the agent did not ask for; whether there was anything."""
    changed = False
    choices = dicts(payload.get("choices"))
    inner = [cast("Json", payload[name]) for name in ("response", "message") if isinstance(payload.get(name), dict)]
    if TOKEN_IDS in added:
        for part in (payload, *inner, *choices):
            for name in _ID_FIELDS:
                if name in part:
                    del part[name]
                    changed = True
    if "logprobs" in added:
        for choice in choices:
            if choice.get("logprobs") is not None:
                choice["logprobs"] = None
                changed = True
    return changed
