"""Lines on stderr about what a training run is waiting for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import click

from agl_otel.errors import AglError
from agl_otel.store import Store
from agl_otel.types import TERMINAL_STATUSES, RolloutMode, RolloutQuery

EVERY_SECONDS: Final = 15.0


@asynccontextmanager
async def rollout_progress(store: Store, what: str, *, total: int, prefix: str) -> AsyncGenerator[None]:
    """While the block runs, print how many of `total` rollouts, whose ids contain `prefix`, have ended: at once and at intervals."""
    query = RolloutQuery(rollout_id_contains=prefix, status_in=[*TERMINAL_STATUSES], limit=1)

    async def report() -> None:
        while True:
            with suppress(AglError):  # the run itself reports a stack that has ended
                click.echo(f"{what}: {(await store.rollouts(query)).total}/{total} rollouts have ended", err=True)
            await asyncio.sleep(EVERY_SECONDS)

    async with _in_background(report()):
        yield


@asynccontextmanager
async def step_progress(store: Store, run_id: str) -> AsyncGenerator[None]:
    """While the block trains, print how many rollouts of the run have ended and how many are open, at intervals, where it has changed."""

    async def report() -> None:
        lines = TrainingLines()
        while True:
            await asyncio.sleep(EVERY_SECONDS)
            with suppress(AglError):
                ended, are_open = await _counts(store, run_id, "train")
                _, scoring = await _counts(store, run_id, "val")
                if (line := lines.next(ended, are_open, scoring)) is not None:
                    click.echo(line, err=True)

    async with _in_background(report()):
        yield


async def _counts(store: Store, run_id: str, mode: RolloutMode) -> tuple[int, int]:
    """Return how many rollouts of a run and mode have ended, and how many are open."""
    everything = (await store.rollouts(RolloutQuery(run=run_id, mode_in=[mode], limit=1))).total
    ended = (await store.rollouts(RolloutQuery(run=run_id, mode_in=[mode], status_in=[*TERMINAL_STATUSES], limit=1))).total
    return ended, everything - ended


class TrainingLines:
    """Describes a training by the rollouts of its run. With none open it does not wait for any, but works on those of a step."""

    def __init__(self) -> None:
        self._said = ""

    def next(self, ended: int, are_open: int, scoring: int) -> str | None:
        """Return the line for these counts of training rollouts, and for `scoring` open ones of a validation; None where it was returned
        last."""
        what = f"{are_open} are open" if are_open else "none is open: they are read, and the weights updated"
        what = f"{scoring} of a validation are open" if scoring and not are_open else what
        before, self._said = self._said, f"training: {ended} rollouts of all steps have ended, {what}"
        return self._said if self._said != before else None


@asynccontextmanager
async def _in_background(work: Coroutine[Any, Any, None]) -> AsyncGenerator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
