"""Varints of protobuf, for code that reads and writes messages without the library."""

from __future__ import annotations

from typing import Final

_SMALL: Final = [bytes([number]) for number in range(0x80)]


def varint(number: int) -> bytes:
    """Encode a number ≥ 0: seven bits per byte, lowest first."""
    if number < 0x80:
        return _SMALL[number]
    if number < 0x4000:
        return bytes((number & 0x7F | 0x80, number >> 7))
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return (number, end offset); the offset is beyond the data if the varint is truncated or too long."""
    number = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7
    return number, len(data) + 1
