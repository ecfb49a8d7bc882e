"""Conversations in full, from the columns of texts: our proxy stores of a call's messages only what no earlier call of it has. Pure.

On spans the same is adapters/history.py, by the same rule.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

from agl_otel.spans.tolerant import json_of

Place = tuple[str, str, str, int]
"""(rollout, attempt, process, call)."""


def in_full(places: Sequence[Place], asked: Sequence[str], base: Sequence[int], before: Sequence[int]) -> list[str]:
    """The messages of every call, whole, as JSON.

    Args:
        places: of the calls, sorted; choices of one call follow each other.
        asked: the stored messages, as JSON.
        base: the call (of the same attempt and process) that has the first `before` of them; 0: all of them are stored.
        before: how many.

    One whose base is not there, or cannot be read, is empty: half a conversation would be taken for one.
    """
    wholes = whole_messages(places, [messages_in(text) for text in asked], base, before)
    return [
        text if not earlier else json.dumps(whole) if whole is not None else ""
        for text, earlier, whole in zip(asked, base, wholes, strict=True)
    ]


def whole_messages(
    places: Sequence[Place], told: Sequence[list[Any] | None], base: Sequence[int], before: Sequence[int]
) -> list[list[Any] | None]:
    """The messages of every call, whole; the arguments are those of `in_full`, `told` its messages read. None where they cannot be had."""
    of: dict[Place, list[Any] | None] = {}
    wholes: list[list[Any] | None] = []
    for place, messages, earlier, count in zip(places, told, base, before, strict=True):
        if earlier:
            first = of.get((*place[:3], earlier))
            messages = [*first[:count], *messages] if first is not None and messages is not None and len(first) >= count else None
        of.setdefault(place, messages)  # the first choice's
        wholes.append(messages)
    return wholes


def messages_in(value: Any) -> list[Any] | None:
    """A list of messages, which may be JSON; None where it is none."""
    try:
        found = json_of(value) if isinstance(value, str) else value
    except ValueError:
        return None
    return cast("list[Any]", found) if isinstance(found, list) else None
