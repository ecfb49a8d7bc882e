"""Unmaps the parts of a large library that only its start has used."""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Generator
from pathlib import Path
from typing import Final

_SMAPS: Final = Path("/proc/self/smaps")  # of Linux
_MAPPING: Final = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \S+ *(.*)")
_DONTNEED: Final = 4  # MADV_DONTNEED, madvise(2)


def unmap_unused(library: str) -> None:
    """Unmap the pages of code and constants of the library whose file name begins with `library`.

    The next use of a page maps it again from the kernel's cache. A library of half a gigabyte keeps most of what its start has touched
    mapped for ever, since the kernel maps 64 KiB around each touched page. Does nothing where there is no /proc/self/smaps.
    """
    libc = ctypes.CDLL(None)
    for begin, end in _clean_mappings(library):
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _DONTNEED)


def _clean_mappings(library: str) -> Generator[tuple[int, int]]:
    """Yield begin and end of the read-only mappings of a library in which no page is this process's own, as relocated ones are."""
    begin = end = 0
    with contextlib.suppress(FileNotFoundError):
        for line in _SMAPS.read_text().splitlines():
            if found := _MAPPING.fullmatch(line):
                wanted = "w" not in found[3] and Path(found[4]).name.startswith(library)
                begin, end = (int(found[1], 16), int(found[2], 16)) if wanted else (0, 0)
            elif end and line.startswith("Anonymous:") and line.split()[1] == "0":
                yield begin, end
