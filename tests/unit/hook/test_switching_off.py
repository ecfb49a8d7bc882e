"""`uninstrument_all` undoes what `instrument_all` did, whatever the instrumentation itself forgets to undo."""

from __future__ import annotations

import threading

import pytest
from openai.resources.chat.completions import AsyncCompletions, Completions
from openai.resources.embeddings import Embeddings
from wrapt import FunctionWrapper

from agl_otel.telemetry.setup import instrument_all, uninstrument_all

CALLS = ((Completions, "create"), (AsyncCompletions, "create"), (Embeddings, "create"), (threading.Thread, "start"))


def layers() -> list[int]:
    """How many wrappers are around each of CALLS."""
    found: list[int] = []
    for owner, name in CALLS:
        held, count = vars(owner)[name], 0
        while isinstance(held, FunctionWrapper):
            held, count = held.__wrapped__, count + 1
        found.append(count)
    return found


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # OpenLLMetry's models use pydantic's older way
def test_nothing_stays_wrapped_and_nothing_is_wrapped_twice() -> None:
    assert layers() == [0, 0, 0, 0]
    for _ in range(2):
        instrument_all()
        assert layers() == [1, 1, 1, 1]
        uninstrument_all()
        assert layers() == [0, 0, 0, 0]
