"""Checks the regular expressions that users give, before any data is read."""

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
