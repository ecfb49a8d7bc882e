"""Text that UTF-8 can write: without halves of characters, which Python makes of a cut emoji and of bytes in a header that are no UTF-8."""

from __future__ import annotations


def is_well_formed(text: str) -> bool:
    """Whether UTF-8 can write it."""
    if not text.isascii():  # known without a look at it
        try:
            text.encode()
        except UnicodeEncodeError:
            return False
    return True


def mended(text: str) -> str:
    """The text with U+FFFD for each half of a character; two halves that belong together are one."""
    return text if is_well_formed(text) else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
