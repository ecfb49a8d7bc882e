"""What each OpenAI route is asked for beyond what the agent asked, and what is taken out of its answer again. Pure.

A table, not a ladder: a further route is a further row in DIALECTS.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

TOKEN_IDS: Final = "return_token_ids"
_ID_FIELDS: Final = ("prompt_token_ids", "token_ids")


@dataclass(frozen=True, slots=True)
class Dialect:
    """One route: `path` under the base URL."""

    path: str
    operation: Literal["chat", "text_completion"]
    logprobs: bool | int
    """The value that makes `logprobs` hold the log-prob of each token of the reply."""


DIALECTS: Final = {
    dialect.path: dialect
    for dialect in (
        Dialect("chat/completions", "chat", logprobs=True),
        Dialect("completions", "text_completion", logprobs=0),
    )
}


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request as it goes upstream."""

    body: dict[str, Any]
    added: frozenset[str]
    """Fields that the agent did not ask for: what they bring is taken out of the answer."""


def prepare(dialect: Dialect, asked: Mapping[str, Any], *, model: str | None, sampling: Mapping[str, Any], capture: bool) -> Prepared:
    """The agent's body with the resource's model, its sampling parameters where the agent set none, and what capture needs.

    Raises ValueError for a body whose fields have the wrong type.
    """
    body = {**sampling, **asked}
    if model:
        body["model"] = model
    if not capture:
        return Prepared(body, frozenset())
    added: set[str] = set()
    if not asked.get(TOKEN_IDS):
        body[TOKEN_IDS] = True
        added.add(TOKEN_IDS)
    if asked.get("logprobs") is None or asked["logprobs"] is False:
        body["logprobs"] = dialect.logprobs
        added.add("logprobs")
    return Prepared(body, frozenset(added))


def take_out(payload: dict[str, Any], added: frozenset[str]) -> bool:
    """Remove from an answer (or a chunk of one) what the agent did not ask for; whether there was anything."""
    changed = False
    choices: list[Any] = payload["choices"] if isinstance(payload.get("choices"), list) else []
    parts: list[dict[str, Any]] = [payload, *(choice for choice in choices if isinstance(choice, dict))]
    for part in parts:
        if TOKEN_IDS in added:
            for name in _ID_FIELDS:
                if name in part:
                    del part[name]
                    changed = True
        if "logprobs" in added and part is not payload and part.get("logprobs") is not None:
            part["logprobs"] = None
            changed = True
    return changed
