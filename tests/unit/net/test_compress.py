"""Bodies are decompressed up to the limit and not beyond."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Callable

import pytest

from agl_otel.errors import DataError, EncodingError, TooLargeError, UnavailableError
from agl_otel.net.compress import (
    _DECOMPRESSORS,  # pyright: ignore[reportPrivateUsage]  # what each is asked for is watched
    ENCODINGS,
    MAX_MEMBERS,
    PIECE_BYTES,
    WINDOW_BYTES,
    decompress,
)


def zstd(data: bytes) -> bytes:
    module = pytest.importorskip("backports.zstd", reason="zstd is not installed")
    return module.compress(data)


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress, "zstd": zstd}


@pytest.mark.parametrize("encoding", COMPRESSORS)
def test_compressed_bodies_round_trip(encoding: str) -> None:
    data = bytes(range(256)) * 40
    assert decompress(encoding, COMPRESSORS[encoding](data), len(data)) == data
    assert decompress(encoding.upper(), COMPRESSORS[encoding](b"a") + COMPRESSORS[encoding](b"b"), 10) == b"ab"


@pytest.mark.parametrize("encoding", COMPRESSORS)
def test_a_decompression_bomb_is_refused_early(encoding: str) -> None:
    with pytest.raises(TooLargeError, match="larger than 1 MiB"):
        decompress(encoding, COMPRESSORS[encoding](bytes(50 << 20)), 1 << 20)


@pytest.mark.parametrize("encoding", COMPRESSORS)
def test_damaged_and_truncated_bodies_are_invalid(encoding: str) -> None:
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


@pytest.mark.parametrize("encoding", COMPRESSORS)
def test_bodies_of_several_windows_and_members_round_trip(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compress = COMPRESSORS[encoding]
    noise, dense = os.urandom(WINDOW_BYTES + 1), bytes(3 * PIECE_BYTES + 1)
    parts = [noise, dense, b"", noise * 5, b"x", dense]
    assert decompress(encoding, b"".join(map(compress, parts)), sum(map(len, parts))) == b"".join(parts)
    monkeypatch.setattr("agl_otel.net.compress.WINDOW_BYTES", len(compress(noise)))  # a member that ends where a window ends
    assert decompress(encoding, compress(noise) + compress(b"y"), 1 << 20) == noise + b"y"


@pytest.mark.parametrize("encoding", COMPRESSORS)
def test_a_body_of_too_many_members_is_refused(encoding: str) -> None:
    empty = COMPRESSORS[encoding](b"")
    assert decompress(encoding, empty * MAX_MEMBERS, 1) == b""
    with pytest.raises(DataError, match="more than 1024 members"):
        decompress(encoding, empty * (MAX_MEMBERS + 1), 1)


@pytest.mark.parametrize("encoding", COMPRESSORS)
def test_at_most_a_window_is_copied_for_each_member(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decompressor copies the data after its end: for whole bodies of empty members that was quadratic in their length."""
    copied: list[int] = []
    make = _DECOMPRESSORS[encoding]

    class Watched:
        def __init__(self) -> None:
            self.inner = make()

        def __getattr__(self, name: str) -> object:
            found = getattr(self.inner, name)
            if name in ("unused_data", "unconsumed_tail"):
                copied.append(len(found))
            return found

    monkeypatch.setitem(_DECOMPRESSORS, encoding, Watched)
    body = COMPRESSORS[encoding](b"") * (MAX_MEMBERS - 1) + COMPRESSORS[encoding](os.urandom(4 << 20))
    assert len(decompress(encoding, body, 4 << 20)) == 4 << 20
    assert max(copied) <= WINDOW_BYTES


def test_decompression_stops_if_the_client_disconnects_or_it_takes_too_long() -> None:
    body = gzip.compress(bytes(20 * PIECE_BYTES))
    left = iter([False, False, True])
    with pytest.raises(UnavailableError, match="client went away"):
        decompress("gzip", body, 1 << 30, disconnected=lambda: next(left))
    with pytest.raises(TooLargeError, match="more than 0 s to unpack"):
        decompress("gzip", body, 1 << 30, cpu_seconds=0)
