"""The boundary between our code and the agent's: errors in ours are counted, logged once for each place, and not raised."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Final, ParamSpec

logger = logging.getLogger("agl_otel.instrumentation")
failures: Final[Counter[str]] = Counter()
"""{place: number of our failures in the agent's process}."""

P = ParamSpec("P")


def never_raises(function: Callable[P, None]) -> Callable[P, None]:
    """Wrap `function`: an error is counted in `failures`, logged the first time, and not raised."""
    where, note, is_torn_down = function.__qualname__, note_failure, sys.is_finalizing  # globals are gone at interpreter shutdown

    @wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  # the named boundary: tracing must never break the agent
            if not is_torn_down():
                note(where, error)

    return guarded


def while_running(function: Callable[P, None]) -> Callable[P, None]:
    """Wrap `function`: skip it at interpreter shutdown, when a new thread never runs and a lock may be held for ever."""
    is_torn_down = sys.is_finalizing

    @wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        if not is_torn_down():
            function(*args, **kwargs)

    return guarded


def note_failure(where: str, error: BaseException | str) -> None:
    """Count a failure; log it the first time it happens at `where`."""
    failures[where] += 1
    if failures[where] == 1:
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        logger.warning("agl-otel: %s failed, the program runs on and its trace may be incomplete: %s", where, text)
