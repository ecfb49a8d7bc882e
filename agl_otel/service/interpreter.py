"""How the interpreter of a service is set: it starts soon, and its loop answers beside threads that compute.

`python -m agl_otel.service.interpreter MODULE …` is `python -m MODULE …` in an interpreter that is set so before MODULE is imported: the
search for garbage among what is being imported finds none. The last search, at the end, stays: without it triton's bindings print what they
miss.
What such a process makes is its owner's only (private.py).
"""

from __future__ import annotations

import gc
import runpy
import sys
from typing import Final

from agl_otel.service.private import keep_private

GARBAGE_OBJECTS: Final = 20_000  # new ones between two collections: a request makes thousands, hardly any of them in a circle
SWITCH_INTERVAL_SECONDS: Final = 0.0005  # after which a thread that computes hands over; the default 5 ms would hold every answer up


def load_quickly() -> None:
    """Before much is imported: collect garbage rarely."""
    gc.set_threshold(GARBAGE_OBJECTS, 20, 20)


def answer_first() -> None:
    """Collect garbage rarely, never go through what is loaded by now, and let the event loop run soon when other threads compute."""
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    gc.collect()
    gc.freeze()
    load_quickly()


if __name__ == "__main__":
    load_quickly()
    keep_private()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
