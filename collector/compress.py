"""Content-Encoding of OTLP over HTTP, taken off with a bound: a small body that unfolds beyond the limit is refused, not unfolded."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, Final

from agl_otel.errors import DataError

try:
    from backports import zstd as _zstd
except ImportError:  # pragma: no cover - a dependency; where it is missing, clients are told which encodings remain
    _zstd = None


class TooLargeError(DataError):
    """A request beyond `max_message_bytes`."""


class EncodingError(DataError):
    """A Content-Encoding that this collector does not take."""


_DECOMPRESSORS: Final[dict[str, Callable[[], Any]]] = {
    "gzip": lambda: zlib.decompressobj(31),
    "deflate": lambda: zlib.decompressobj(15),
}
if _zstd is not None:
    _DECOMPRESSORS["zstd"] = _zstd.ZstdDecompressor
ENCODINGS: Final = tuple(_DECOMPRESSORS)
"""What this installation takes, beside `identity`."""
_BROKEN: Final = (zlib.error, EOFError) if _zstd is None else (zlib.error, EOFError, _zstd.ZstdError)


def decompress(encoding: str, body: bytes, limit: int) -> bytes:
    """The bytes inside `body`; `encoding` is the value of Content-Encoding.

    Raises EncodingError for an encoding that we do not know, TooLargeError beyond `limit` bytes, DataError for damaged bodies.
    """
    name = encoding.strip().lower() or "identity"
    if name == "identity":
        if len(body) > limit:
            raise too_large(limit)
        return body
    make = _DECOMPRESSORS.get({"x-gzip": "gzip"}.get(name, name))
    if make is None:
        raise EncodingError(f"Content-Encoding {encoding!r} is not taken here: send {', '.join(ENCODINGS)}, or none")
    parts: list[bytes] = []
    room = limit + 1
    try:
        while body:  # gzip and zstd bodies may hold several frames
            stream = make()
            part = stream.decompress(body, room)
            room -= len(part)
            if room <= 0:
                raise too_large(limit)
            if not stream.eof:
                raise DataError(f"the {name} body ends too early")
            parts.append(part)
            body = stream.unused_data
    except _BROKEN as error:
        raise DataError(f"the body is not {name}: {error}") from None
    return b"".join(parts)


def too_large(limit: int) -> TooLargeError:
    """The error for a request beyond `limit` bytes."""
    size = f"{limit >> 20} MiB" if limit >= 1 << 20 else f"{limit} bytes"
    return TooLargeError(f"the request is larger than {size}: send smaller batches, or raise AGL_MAX_MESSAGE_BYTES")
