"""Text that others wrote, made fit for a terminal, a log or a JSON document on a screen. Pure.

What an agent, a model or a stranger's request says may hold escape sequences that move the cursor, rename the window, or turn the order
of the letters around. Such characters are shown as \\x1b, \\u202e, and never sent.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

_HIDDEN: Final = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Beside those below a space, which JSON escapes itself."""


def printable(text: str) -> str:
    """`text` with \\x1b and the like in the place of characters that do not print; a line end is one of them."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def printable_lines(text: str) -> str:
    """The same, and line ends stay; the lines after the first are indented, so that none of them looks like the beginning of something."""
    return "\n    ".join(printable(line.expandtabs()) for line in text.rstrip("\n").split("\n"))


def json_text(value: Any, *, indent: int | None = None) -> str:
    """`value` as JSON that can be printed: the same document, with escapes where a character would not print."""
    text = json.dumps(value, ensure_ascii=False, default=str, indent=indent)
    return _HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
