"""How a run ended is recorded as it was, and recording it hides no error."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agl_otel.algorithms.outcome import outcome_recorded
from agl_otel.errors import DataError


class Recorded:
    """A store that keeps outcomes, or raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self.outcomes: list[str] = []
        self._error = error

    async def record_outcome(self, run_id: str, outcome: str, *, algorithm: str) -> None:
        if self._error is not None:
            raise self._error
        self.outcomes.append(f"{run_id} {outcome}")


class SilentError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("its own text fails")


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "finished"),
        (DataError("no data"), "error: no data"),
        (ValueError("at postgresql://me:secret@host/db"), "error: ValueError: at postgresql://(secret"),
        (SilentError(), "error: SilentError"),
        (asyncio.CancelledError(), "interrupted"),
        (SystemExit(0), "interrupted"),
    ],
)
async def test_the_outcome_is_how_the_outermost_block_of_the_run_ended(error: BaseException | None, outcome: str) -> None:
    store = Recorded()

    async def block() -> None:
        async with outcome_recorded(store, "run-1", "grpo"), outcome_recorded(store, "run-1", "grpo"):
            if error is not None:
                raise error

    if error is None:
        await block()
    else:
        with pytest.raises(type(error)):
            await block()
    begun, ended = store.outcomes
    assert begun == "run-1 " and ended.startswith(f"run-1 {outcome}") and ":secret" not in ended


@pytest.mark.parametrize("store_error", [OSError("the disk is full"), DataError("damaged")])
async def test_a_store_that_takes_no_outcome_hides_no_error(store_error: Exception, caplog: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        async with outcome_recorded(Recorded(store_error), "run-1", "grpo"):
            raise ZeroDivisionError
    assert "run-1 is error could not be recorded" in caplog.text
