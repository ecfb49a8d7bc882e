"""Content-Encoding, taken off with bounds: on what a body unfolds to, on its members, and on the time that it takes.

A body is fed to its decompressor window by window: what stands behind a member's end is copied for the next one, and of a whole body of
empty members that would be the square of its length.
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
except ImportError:  # pragma: no cover - a dependency; where it is missing, clients are told which encodings remain
    _zstd = None

WINDOW_BYTES: Final = 64 << 10
PIECE_BYTES: Final = 1 << 20  # unfolded between two looks at the bounds
MAX_MEMBERS: Final = 1024  # of gzip or deflate, frames of zstd; blockwise compressors make one for each 64 KiB
CPU_SECONDS: Final = 5.0  # of the thread that unpacks: ten times what 64 MiB of spans take


_DECOMPRESSORS: Final[dict[str, Callable[[], Any]]] = {
    "gzip": lambda: zlib.decompressobj(31),
    "deflate": lambda: zlib.decompressobj(15),
}
if _zstd is not None:
    _DECOMPRESSORS["zstd"] = _zstd.ZstdDecompressor
ENCODINGS: Final = tuple(_DECOMPRESSORS)
"""What this installation takes, beside `identity`."""
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
    gone: Callable[[], bool] = _never,
    cpu_seconds: float = CPU_SECONDS,
) -> bytes:
    """The bytes inside `body`; `encoding` is the value of Content-Encoding. Takes time and memory in proportion to `body` and `limit`.

    `hold` is told of what it unfolds to, piece by piece; `gone` says whether nobody waits for it any more. Raises EncodingError for an
    encoding that we do not know, TooLargeError beyond `limit` bytes or `cpu_seconds` of this thread, DataError for damaged bodies and too
    many members, UnavailableError when `gone`, and what `hold` raises.
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
        if gone():
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
    """What all members of `body` hold; `check` is told before each piece how many there have been."""
    parts: list[bytes] = []
    room, position, members = limit, 0, 1
    stream, rest = make(), b""
    while not stream.eof:
        check(members)
        if not rest and getattr(stream, "needs_input", True):  # zstd keeps what it has not read yet; zlib hands it back
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
