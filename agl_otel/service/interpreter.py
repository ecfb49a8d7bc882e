"""Interpreter settings of a service: a fast start, and an event loop that stays responsive beside computing threads.

`python -m agl_otel.service.interpreter PARENT MODULE …` is `python -m MODULE …` with these settings applied before MODULE is imported,
since garbage collection during imports finds nothing; it ends at once unless its parent is the process PARENT. The collection at exit
stays: without it triton's bindings report leaks.
Files that such a process creates are private (private.py).
"""

from __future__ import annotations

import gc
import os
import runpy
import sys
from typing import Final

from agl_otel.service.private import keep_private

GARBAGE_OBJECTS: Final = 20_000  # new objects between two collections: a request makes thousands, hardly any of them in cycles
SWITCH_INTERVAL_SECONDS: Final = 0.0005  # after which a computing thread yields; the default 5 ms would delay every answer


def tune_for_startup() -> None:
    """Collect garbage rarely, for a faster import of many modules."""
    gc.set_threshold(GARBAGE_OBJECTS, 20, 20)


def tune_for_latency() -> None:
    """Exempt all objects loaded so far from garbage collection, collect rarely, and let computing threads yield sooner to the loop."""
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    gc.collect()
    gc.freeze()
    tune_for_startup()


if __name__ == "__main__":
    if os.getppid() != int(sys.argv[1]):  # it ended before the kernel was told to end this process with it
        sys.exit(f"{sys.argv[2]} does not begin: process {sys.argv[1]}, which started it, has ended")
    tune_for_startup()
    keep_private()
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
