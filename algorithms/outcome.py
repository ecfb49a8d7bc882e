"""Record in the store that a run has begun, and how it ended; once, whoever runs it: a job, a Trainer, or a caller of an algorithm."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Final, Protocol

from agl_otel.errors import AglError
from agl_otel.text import error_text

_log = logging.getLogger(__name__)
BEGUN_SECONDS: Final = 30.0  # for recording that a run has begun, on a busy machine
OUTCOME_SECONDS: Final = 5.0  # for recording how it ended: the stack may have ended first
OUTCOME_CHARACTERS: Final = 2000
_RECORDED: Final[ContextVar[str]] = ContextVar("agl_otel_recorded_run", default="")
"""The id of the run whose outcome is recorded in this context."""


class OutcomeStore(Protocol):
    """The part of `agl_otel.store.Store` that records outcomes."""

    async def record_outcome(self, run_id: str, outcome: str, *, algorithm: str) -> None:
        """Record how a run ended, or by an empty outcome that it has begun."""
        ...


@asynccontextmanager
async def outcome_recorded(store: OutcomeStore, run_id: str, algorithm: str) -> AsyncGenerator[None]:
    """Record that the run has begun, and how the block ended (TrainingRun.outcome).

    Within another such block of the same run nothing is recorded: a job goes on after its algorithm has ended. A store that takes no
    outcome, as where the stack has ended, is no error.
    """
    if _RECORDED.get() == run_id:
        yield
        return
    before = _RECORDED.set(run_id)
    outcome = ""
    try:
        await _record(store, run_id, "", algorithm)
        yield
        outcome = "finished"
    except BaseException as error:
        outcome = _outcome_of(error)
        raise
    finally:
        _RECORDED.reset(before)
        await _record(store, run_id, outcome, algorithm)


def _outcome_of(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError | KeyboardInterrupt | SystemExit):
        return "interrupted"
    return f"error: {error}" if isinstance(error, AglError) else f"error: {error_text(error)}"


async def _record(store: OutcomeStore, run_id: str, outcome: str, algorithm: str) -> None:
    try:
        async with asyncio.timeout(OUTCOME_SECONDS if outcome else BEGUN_SECONDS):
            await store.record_outcome(run_id, outcome[:OUTCOME_CHARACTERS], algorithm=algorithm)
    except Exception as error:  # noqa: BLE001 - a store of others may raise anything, and must not hide how the run ended
        _log.warning("that run %s is %s could not be recorded: %s", run_id, outcome.partition(":")[0] or "begun", error_text(error))
