"""Bodies unfold up to the limit and not beyond."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable

import pytest

from agl_otel.collector.compress import ENCODINGS, EncodingError, TooLargeError, decompress
from agl_otel.errors import DataError


def zstd(data: bytes) -> bytes:
    module = pytest.importorskip("backports.zstd", reason="zstd is not installed")
    return module.compress(data)


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress, "zstd": zstd}


@pytest.mark.parametrize("encoding", COMPRESSORS)
def test_what_was_compressed_comes_back(encoding: str) -> None:
    data = bytes(range(256)) * 40
    assert decompress(encoding, COMPRESSORS[encoding](data), len(data)) == data
    assert decompress(encoding.upper(), COMPRESSORS[encoding](b"a") + COMPRESSORS[encoding](b"b"), 10) == b"ab"


@pytest.mark.parametrize("encoding", COMPRESSORS)
def test_a_bomb_is_refused_before_it_unfolds(encoding: str) -> None:
    with pytest.raises(TooLargeError, match="larger than 1 MiB"):
        decompress(encoding, COMPRESSORS[encoding](bytes(50 << 20)), 1 << 20)


@pytest.mark.parametrize("encoding", COMPRESSORS)
def test_damaged_and_torn_bodies_are_invalid(encoding: str) -> None:
    body = COMPRESSORS[encoding](b"hello" * 100)
    for broken in (body[:-6], b"\x00garbage" + body, body + b"tail"):
        with pytest.raises(DataError):
            decompress(encoding, broken, 1 << 20)


def test_no_encoding_and_an_unknown_one() -> None:
    assert decompress("", b"abc", 3) == decompress("identity", b"abc", 3) == b"abc"
    with pytest.raises(TooLargeError):
        decompress("", b"abcd", 3)
    with pytest.raises(EncodingError, match=", ".join(ENCODINGS)):
        decompress("br", b"abc", 3)
