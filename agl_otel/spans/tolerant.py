"""Read values that agents wrote on spans, so that a malformed one affects only its own attempt. Pure.

JSON may be nested a hundred thousand levels deep, and a number may be a word. Readers of attributes use these functions, which raise only
ValueError, and treat an error of MALFORMED as a fault of that attempt.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final, cast

from agl_otel.types.strict import SURROGATE

MAX_DEPTH: Final = 100  # levels; tool schemas, the deepest JSON of libraries, have some twenty
MAX_BRACKETS: Final = 1_000_000  # lists and objects in one text: each of two or three bytes takes some 60 in memory
MALFORMED: Final = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError)
"""Errors that code raises on values of another shape than it expects."""
_WHOLE: Final = re.compile(r"[+-]?[0-9]{1,19}")
_NUMBER: Final = re.compile(
    r"[+-]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?|inf(?:inity)?|nan(?:\([a-z0-9_]*\))?)", re.IGNORECASE | re.ASCII
)


def json_of(text: str) -> Any:
    """Parse JSON of at most MAX_DEPTH levels; unpaired surrogates, which UTF-8 cannot encode, become U+FFFD.

    Raises ValueError if it is not JSON, nested too deep or too large.
    """
    brackets = text.count("[") + text.count("{")
    if brackets > MAX_BRACKETS:
        raise ValueError(f"JSON with {brackets} brackets: more than {MAX_BRACKETS} are not read")
    try:
        value = json.loads(text)
        if brackets > MAX_DEPTH:
            check_depth(value)
        if SURROGATE.search(text):
            value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    except RecursionError:
        raise ValueError(f"JSON of more than {MAX_DEPTH} levels is not read") from None
    except MemoryError:
        raise ValueError(f"JSON of {len(text)} characters is too large for the memory") from None
    return value


def check_depth(value: Any) -> None:
    """Raise ValueError if lists and objects are nested more than MAX_DEPTH levels deep."""
    level = [value] if isinstance(value, (list, tuple, dict)) else []
    for _ in range(MAX_DEPTH):
        level = [
            item
            for each in level
            for item in (cast("dict[Any, Any]", each).values() if isinstance(each, dict) else each)
            if isinstance(item, (list, tuple, dict))
        ]
        if not level:
            return
    raise ValueError(f"it is nested in more than {MAX_DEPTH} levels")


def whole_of(value: Any) -> int:
    """Return a 64-bit integer, also from text; 0 for other values, like ClickHouse's toInt64OrZero."""
    if isinstance(value, str):
        value = int(value) if _WHOLE.fullmatch(value) else 0
    elif isinstance(value, float):
        value = int(value) if value.is_integer() else 0
    return value if isinstance(value, int) and not isinstance(value, bool) and -(1 << 63) <= value < 1 << 63 else 0


def number_of(value: Any) -> float | None:
    """Return a number, also from text, which may be NaN or infinite; None for other values, like ClickHouse's toFloat64OrNull."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)) or (isinstance(value, str) and not _NUMBER.fullmatch(value)):
        return None
    try:
        return float(value.partition("(")[0] if isinstance(value, str) else value)
    except (ValueError, OverflowError):
        return None
