"""Finds out whether a disk takes data."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Final

TRIED_BYTES: Final = 1 << 20  # written at a time


def try_disk(folder: Path, size: int) -> None:
    """Write and sync `size` zero bytes to a file in `folder` that is gone afterwards. Raises OSError if the disk refuses them."""
    with tempfile.TemporaryFile(dir=folder) as file:
        for start in range(0, size, TRIED_BYTES):
            file.write(bytes(min(TRIED_BYTES, size - start)))
        file.flush()
        os.fsync(file.fileno())
