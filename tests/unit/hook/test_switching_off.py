"""`instrument_all` wraps each function once; `uninstrument_all` reverts it, even where an instrumentation does so incompletely."""

from __future__ import annotations

import contextlib
import threading
from importlib import metadata
from typing import Any

import pytest
from openai.resources.chat.completions import AsyncCompletions, Completions
from openai.resources.embeddings import Embeddings
from opentelemetry.instrumentation.openai import OpenAIInstrumentor
from wrapt import FunctionWrapper

from agl_otel.telemetry import setup
from agl_otel.telemetry.setup import instrument_all, uninstrument_all

CALLS = ((Completions, "create"), (AsyncCompletions, "create"), (Embeddings, "create"), (threading.Thread, "start"))


def layers() -> list[int]:
    """Return the number of wrappers around each of CALLS."""
    found: list[int] = []
    for owner, name in CALLS:
        held, count = vars(owner)[name], 0
        while isinstance(held, FunctionWrapper):
            held, count = held.__wrapped__, count + 1
        found.append(count)
    return found


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # OpenLLMetry's models use pydantic's deprecated API
def test_nothing_stays_wrapped_and_nothing_is_wrapped_twice() -> None:
    assert layers() == [0, 0, 0, 0]
    for _ in range(2):
        instrument_all()
        assert layers() == [1, 1, 1, 1]
        uninstrument_all()
        assert layers() == [0, 0, 0, 0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_threads_that_instrument_at_once_wrap_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    listed, entered = threading.Barrier(2), threading.Barrier(2)
    seen: set[int] = set()
    original = OpenAIInstrumentor._instrument  # pyright: ignore[reportPrivateUsage] - after its check that it is not on yet

    def entry_points(**given: Any) -> Any:
        found = metadata.entry_points(**given)
        if threading.get_ident() not in seen:  # its list of what is installed: both threads have theirs before either goes on
            seen.add(threading.get_ident())
            listed.wait()
        return found

    def instrument(self: OpenAIInstrumentor, **given: Any) -> Any:
        with contextlib.suppress(threading.BrokenBarrierError):
            entered.wait(1)  # until a second thread gets here, which none should
        return original(self, **given)

    monkeypatch.setattr(setup, "entry_points", entry_points)
    monkeypatch.setattr(OpenAIInstrumentor, "_instrument", instrument)
    threads = [threading.Thread(target=setup.instrument_all) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        assert layers() == [1, 1, 1, 1]
    finally:
        uninstrument_all()
