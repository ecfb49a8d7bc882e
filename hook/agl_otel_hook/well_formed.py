"""Text that UTF-8 can encode: without unpaired surrogates, e.g. of a cut emoji or of header bytes that are not UTF-8."""

from __future__ import annotations


def is_well_formed(text: str) -> bool:
    """Return whether UTF-8 can encode the text."""
    if not text.isascii():  # O(1): str keeps a flag for it
        try:
            text.encode()
        except UnicodeEncodeError:
            return False
    return True


def mended(text: str) -> str:
    """Replace each unpaired surrogate by U+FFFD; a surrogate pair becomes its character."""
    return text if is_well_formed(text) else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
