"""The most memory that Python took at one time, for tests of what strangers may send."""

from __future__ import annotations

import tracemalloc
from collections.abc import Generator
from contextlib import contextmanager


class Peak:
    """Its `bytes`, beside what was held before."""

    bytes = 0


@contextmanager
def peak_memory() -> Generator[Peak]:
    """Measure the block."""
    found = Peak()
    tracemalloc.start()
    try:
        yield found
        found.bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
