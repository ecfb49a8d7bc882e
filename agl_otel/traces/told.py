"""Conversations in full, from the columns of texts: our proxy stores of a call's messages only what no earlier call of it has. Pure.

The same rule on spans is adapters/history.py, which stands above this room.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

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
    wholes: dict[Place, list[Any] | None] = {}
    full: list[str] = []
    for place, text, earlier, count in zip(places, asked, base, before, strict=True):
        messages = _messages(text)
        if earlier:
            first = wholes.get((*place[:3], earlier))
            messages = [*first[:count], *messages] if first is not None and messages is not None and len(first) >= count else None
            text = json.dumps(messages) if messages is not None else ""
        wholes.setdefault(place, messages)  # the first choice's
        full.append(text)
    return full


def _messages(text: str) -> list[Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return cast("list[Any]", found) if isinstance(found, list) else None
