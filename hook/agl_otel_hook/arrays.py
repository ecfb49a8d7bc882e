"""Pack token ids and log-probs for span attributes, as the bytes of OTLP's ArrayValue.

The SDK goes through a sequence attribute twice, value by value (to check and to encode it): about 2 µs per number. It leaves bytes alone.
So long arrays are packed here (0.1 µs per number), and the exporter of our own processes (wire.py) writes the bytes as the int or double
array that OTLP defines. Only for spans that go through that exporter.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Final

from agl_otel_hook import conventions
from agl_otel_hook.varint import varint

PACKED_KEYS: Final = frozenset({conventions.LLM_PROMPT_TOKEN_IDS, conventions.LLM_RESPONSE_TOKEN_IDS, conventions.LLM_RESPONSE_LOGPROBS})
_DOUBLE: Final = b"\x0a\x09\x21"  # field 1 (values) of 9 bytes, in it field 4 (double_value) of 8
_element: Final = struct.Struct("<3sd").pack
MAX_CACHED: Final = 400_000  # more ids than in any vocabulary


def int_value(number: int) -> bytes:
    """Return an OTLP AnyValue: an int, or text if the number has more than 64 bits."""
    if -(1 << 63) <= number < 1 << 63:
        return b"\x18" + varint(number & 0xFFFF_FFFF_FFFF_FFFF)
    digits = b"%d" % number
    return b"\x0a" + varint(len(digits)) + digits


class _Encoded(dict[int, bytes]):
    """Cache {int: its bytes as an element of an ArrayValue}, filled on demand up to MAX_CACHED."""

    def __missing__(self, number: int) -> bytes:
        value = int_value(number)
        encoded = b"\x0a" + varint(len(value)) + value
        if len(self) < MAX_CACHED:
            self[number] = encoded
        return encoded


_encoded: Final = _Encoded()


def pack_ints(numbers: Iterable[int]) -> bytes:
    """Return a serialised OTLP ArrayValue of ints (64 bits, signed)."""
    return b"".join(map(_encoded.__getitem__, numbers))


def pack_doubles(numbers: Sequence[float]) -> bytes:
    """Return a serialised OTLP ArrayValue of doubles."""
    return b"".join([_element(_DOUBLE, number) for number in numbers])
