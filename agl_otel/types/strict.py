"""JSON from users and other programs, parsed strictly by RFC 8259. Pure.

Python's parser accepts NaN and Infinity and turns 1e999 into infinity, none of which can be written as JSON again.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, Final

SHOWN: Final = 40  # most characters of a refused number in the message

SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")
"""The start of the JSON escape of a surrogate."""


def strict_json(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError (JSONDecodeError is one) with the reason."""
    try:
        value = json.loads(text, parse_float=number_in_range, parse_constant=_no_json)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if SURROGATE.search(text.decode(errors="replace") if isinstance(text, bytes) else text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("it has an unpaired surrogate, which is no character") from None
    return value


def strict_lines(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (line number, value) of each line that is not blank. Raises ValueError, which names the line."""
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            try:
                yield number, strict_json(line)
            except ValueError as error:
                raise ValueError(f"line {number} is not JSON ({why_no_json(error)})") from None


def why_no_json(error: ValueError) -> str:
    """Return the reason of an error of strict_json, without the text."""
    return f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)


def check_json(value: Any) -> None:
    """Raise ValueError if the value holds NaN or Infinity."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise ValueError("an input holds NaN or Infinity, which are no JSON: write null, or leave it out") from None


def number_in_range(literal: str) -> float:
    """Parse a number. Raises ValueError if it exceeds the range of a double."""
    number = float(literal)
    if math.isinf(number):
        shown = literal if len(literal) <= SHOWN else f"{literal[:SHOWN]}…"
        raise ValueError(f"the number {shown} is beyond what can be kept (about 1.8e308): write it as text, or leave it out")
    return number


def _no_json(name: str) -> float:
    raise ValueError(f"{name} is no JSON: write null, or leave it out")
