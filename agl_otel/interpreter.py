"""How the interpreter of a service is set: a loop that answers, beside threads that compute."""

from __future__ import annotations

import gc
import sys
from typing import Final

GARBAGE_OBJECTS: Final = 20_000  # new ones between two collections: a request makes thousands, hardly any of them in a circle
SWITCH_INTERVAL_SECONDS: Final = 0.0005  # after which a thread that computes hands over; the default 5 ms would hold every answer up


def answer_first() -> None:
    """Collect garbage rarely, never go through what is loaded by now, and let the event loop run soon when other threads compute."""
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_OBJECTS, 20, 20)
