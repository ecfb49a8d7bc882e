"""The base class of all models, and ids."""

from __future__ import annotations

import os
import time
from functools import lru_cache
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from agl_otel.errors import InvalidIdError
from agl_otel_hook import conventions

_CROCKFORD = "0123456789abcdefghjkmnpqrstvwxyz"
_SHOWN_ERRORS: Final = 20
_LISTED_ERRORS: Final = 10_000
_DIGITS: Final = _CROCKFORD.encode() * 8
"""Translates random bytes to digits, each as likely as the others."""


def new_id(prefix: Literal["ro", "at", "rs"]) -> str:
    """Return a new time-ordered id: 48 bits of milliseconds and 80 random bits as 26 characters of lower-case base 32 (a ULID).

    ClickHouse sorts spans by rollout id, so ids that grow with time keep inserts and reads local.
    """
    return f"{prefix}-{_time(time.time_ns() // 1_000_000)}{os.urandom(16).translate(_DIGITS).decode()}"


@lru_cache(maxsize=1)
def _time(milliseconds: int) -> str:
    return "".join([_CROCKFORD[milliseconds >> shift & 31] for shift in range(45, -1, -5)])


def check_id(value: str, what: str) -> str:
    """Return `value`; raise InvalidIdError, which names `what`, if it does not match conventions.ID_PATTERN."""
    if not conventions.is_valid_id(value):
        raise InvalidIdError(f"{what} {value[:140]!r} is not allowed: use 1 to 128 of the characters A-Z a-z 0-9 . _ : -")
    return value


def describe_invalid(error: ValidationError) -> str:
    """Return `field: message` of the first errors, or the message alone where the value as a whole is invalid.

    A list of a million wrong values has a million errors, which take pydantic seconds and gigabytes to tell.
    """
    count = error.error_count()
    if count > _LISTED_ERRORS:
        return f"{count} values are wrong"
    told = error.errors(include_url=False, include_context=False, include_input=False)[:_SHOWN_ERRORS]
    more = [f"and {count - _SHOWN_ERRORS} more"] if count > _SHOWN_ERRORS else []
    return "; ".join([": ".join(filter(None, (".".join(map(str, e["loc"])), e["msg"].removeprefix("Value error, ")))) for e in told] + more)


class Model(BaseModel):
    """Base of the models; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")
