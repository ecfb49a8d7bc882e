"""The regular expressions that users give: they are checked before any data is read, and choose agents by their names."""

from __future__ import annotations

import re

from agl_otel.errors import UsageError


def checked_pattern(given: str, name: str = "it") -> str:
    """Return a regular expression. Raises UsageError, which calls it `name`, if it is none."""
    try:
        re.compile(given)
    except re.error as error:
        raise UsageError(f"{name} is no regular expression: {error}") from None
    return given


def matches_agent(agent_match: str | None, agent: str) -> bool:
    """Return whether `agent_match` is found somewhere in an agent's name; None takes every agent."""
    return agent_match is None or re.search(agent_match, agent) is not None
