"""What files hold, ClickHouse's once they are unfolded: a search for bytes finds nothing in what is compressed."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import lz4.block
from backports import zstd

HEAD_BYTES = 25  # of a block of ClickHouse's: checksum (16), method, size with these nine, size of what it unfolds to


def held(folder: Path, text: str) -> dict[str, int]:
    """{name of a file: how often it holds `text`, or its mirror image, as written, or as ClickHouse unfolds it}."""
    found: dict[str, int] = {}
    wanted = (text.encode(), text[::-1].encode())
    for root, _, names in os.walk(folder):  # ClickHouse removes folders meanwhile
        for path in (Path(root, name) for name in names):
            with contextlib.suppress(FileNotFoundError):
                data = b"" if path.is_symlink() else path.read_bytes()
                if count := sum(part.count(each) for part in (data, *blocks(data)) for each in wanted):
                    found[str(path.relative_to(folder))] = count
    return found


def blocks(data: bytes) -> Iterator[bytes]:
    """What the compressed blocks of a file of ClickHouse's unfold to; nothing for other files."""
    place = 0
    while place + HEAD_BYTES <= len(data):
        method, size, unfolded = data[place + 16], *struct.unpack_from("<II", data, place + 17)
        end = place + 16 + size
        if size < 9 or end > len(data):
            return
        body = data[place + HEAD_BYTES : end]
        with contextlib.suppress(zstd.ZstdError, lz4.block.LZ4BlockError):
            yield zstd.decompress(body) if method == 0x90 else lz4.block.decompress(body, unfolded) if method == 0x82 else body
        place = end
