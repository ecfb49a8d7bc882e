"""Numbers as protobuf writes them, for what writes messages without the library's objects."""

from __future__ import annotations

from typing import Final

_SMALL: Final = [bytes([number]) for number in range(0x80)]


def varint(number: int) -> bytes:
    """A number of at least 0: seven bits a byte, the lowest first."""
    if number < 0x80:
        return _SMALL[number]
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
