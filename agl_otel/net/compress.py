"""Decompress request bodies with limits on the decompressed size, the number of members, and the CPU time.

A body is decompressed in windows: the data after the end of a member is copied for the next one, which for a whole body of empty members
would take time quadratic in its length.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from typing import Any, Final

from agl_otel.errors import DataError, EncodingError, TooLargeError, UnavailableError
from agl_otel.net.in_flight import Hold

try:
    from backports import zstd as _zstd
except ImportError:  # pragma: no cover - a dependency; without it, errors list the remaining encodings
    _zstd = None

WINDOW_BYTES: Final = 64 << 10
PIECE_BYTES: Final = 1 << 20  # decompressed between two checks of the limits
MAX_MEMBERS: Final = 1024  # gzip or deflate members, zstd frames; blockwise compressors write one for each 64 KiB
CPU_SECONDS: Final = 5.0  # of the decompressing thread: ten times what 64 MiB of spans take


_DECOMPRESSORS: Final[dict[str, Callable[[], Any]]] = {
    "gzip": lambda: zlib.decompressobj(31),
    "deflate": lambda: zlib.decompressobj(15),
}
if _zstd is not None:
    _DECOMPRESSORS["zstd"] = _zstd.ZstdDecompressor
ENCODINGS: Final = tuple(_DECOMPRESSORS)
"""Supported encodings, besides `identity`."""
_BROKEN: Final = (zlib.error, EOFError) if _zstd is None else (zlib.error, EOFError, _zstd.ZstdError)


def _never() -> bool:
    return False


def _nothing(_: int) -> None:
    pass


def decompress(
    encoding: str,
    body: bytes,
    limit: int,
    *,
    hold: Hold = _nothing,
    disconnected: Callable[[], bool] = _never,
    cpu_seconds: float = CPU_SECONDS,
) -> bytes:
    """Decompress `body`; `encoding` is the value of Content-Encoding. Time and memory are linear in `body` and `limit`.

    `hold` is called with the size of each decompressed piece; `disconnected` returns whether the client has disconnected. Raises
    EncodingError for an unknown encoding, TooLargeError beyond `limit` bytes or `cpu_seconds` of this thread, DataError for damaged bodies
    and too many members, UnavailableError if `disconnected`, and what `hold` raises.
    """
    name = encoding.strip().lower() or "identity"
    if name == "identity":
        if len(body) > limit:
            raise too_large(limit)
        return body
    make = _DECOMPRESSORS.get({"x-gzip": "gzip"}.get(name, name))
    if make is None:
        raise EncodingError(f"Content-Encoding {encoding!r} is not taken here: send {', '.join(ENCODINGS)}, or none")
    until = time.thread_time() + cpu_seconds

    def check(members: int) -> None:
        if disconnected():
            raise UnavailableError(f"the client went away while its {name} body was unpacked")
        if members > MAX_MEMBERS:
            raise DataError(f"the {name} body has more than {MAX_MEMBERS} members: compress a request as one")
        if time.thread_time() > until:
            raise TooLargeError(f"the {name} body takes more than {cpu_seconds:g} s to unpack: send less at once")

    try:
        return _unfolded(name, make, body, limit, check, hold)
    except _BROKEN as error:
        raise DataError(f"the body is not {name}: {error}") from None


def _unfolded(name: str, make: Callable[[], Any], body: bytes, limit: int, check: Callable[[int], None], hold: Hold) -> bytes:
    """Decompress all members of `body`; `check` is called before each piece with the number of members so far."""
    parts: list[bytes] = []
    room, position, members = limit, 0, 1
    stream, rest = make(), b""
    while not stream.eof:
        check(members)
        if not rest and getattr(stream, "needs_input", True):  # zstd keeps unread input; zlib returns it
            rest = body[position : position + WINDOW_BYTES]
            position += len(rest)
        part = stream.decompress(rest, min(PIECE_BYTES, room + 1))
        room -= len(part)
        if room < 0:
            raise too_large(limit)
        if part:
            hold(len(part))
            parts.append(part)
        if not stream.eof:
            if not part and position == len(body) and not rest:
                raise DataError(f"the {name} body ends too early")
            rest = getattr(stream, "unconsumed_tail", b"")
        elif (rest := stream.unused_data) or position < len(body):
            stream, members = make(), members + 1
    return b"".join(parts)


def too_large(limit: int) -> TooLargeError:
    """The error for a request beyond `limit` bytes."""
    size = f"{limit >> 20} MiB" if limit >= 1 << 20 else f"{limit} bytes"
    return TooLargeError(f"the request is larger than {size}: send less at once")
