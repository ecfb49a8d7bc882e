"""Token ids and log-probs as span attributes, packed: the bytes of OTLP's ArrayValue, made once.

The SDK walks a sequence attribute value by value, twice (to check it and to encode it): about 2 µs a number. It passes bytes
through untouched. So a long array is packed here (0.1 µs a number) and unpacked by the exporter of our own processes
(wire.py), which writes the int or double array that OTLP defines. Only for spans that go through that exporter.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Final

from agl_otel_hook import conventions
from agl_otel_hook.varint import varint

PACKED_KEYS: Final = frozenset({conventions.LLM_PROMPT_TOKEN_IDS, conventions.LLM_RESPONSE_TOKEN_IDS, conventions.LLM_RESPONSE_LOGPROBS})
_DOUBLE: Final = b"\x0a\x09\x21"  # field 1 (values), 9 bytes long: field 4 (double_value), 8 bytes
MAX_CACHED: Final = 400_000  # more ids than any vocabulary has


def int_value(number: int) -> bytes:
    """An OTLP AnyValue; text where the number has more than 64 bits."""
    if -(1 << 63) <= number < 1 << 63:
        return b"\x18" + varint(number & 0xFFFF_FFFF_FFFF_FFFF)
    digits = b"%d" % number
    return b"\x0a" + varint(len(digits)) + digits


class _Encoded(dict[int, bytes]):
    """{int: its bytes as an element of an ArrayValue}, filled as ids are met."""

    def __missing__(self, number: int) -> bytes:
        value = int_value(number)
        encoded = b"\x0a" + varint(len(value)) + value
        if len(self) < MAX_CACHED:
            self[number] = encoded
        return encoded


_encoded: Final = _Encoded()


def pack_ints(numbers: Iterable[int]) -> bytes:
    """An OTLP ArrayValue of ints (64 bits, signed), serialised."""
    return b"".join(map(_encoded.__getitem__, numbers))


def pack_doubles(numbers: Sequence[float]) -> bytes:
    """An OTLP ArrayValue of doubles, serialised."""
    return struct.pack("<" + "3sd" * len(numbers), *[part for number in numbers for part in (_DOUBLE, number)])
