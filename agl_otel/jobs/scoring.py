"""Score stored replies under a policy behind a server, for back-tests: as algorithms/backtest.py does with a model of its own."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agl_otel.adapters.trajectories import TrajectoryBatch
from agl_otel.jobs.model_client import ModelClient, tasks


async def served_logprobs(model: ModelClient, batch: TrajectoryBatch, *, at_once: int) -> NDArray[np.float32]:
    """Return the log-probs at temperature 1 of the tokens that the model wrote, of one trajectory after the other: float32 [tokens].

    Equal trajectories are asked about once, `at_once` at a time. Raises PromptRefusedError, ModelServerError.
    """
    rows = [np.concatenate([batch.prompt[row], batch.response[row]]) for row in range(len(batch))]
    distinct = {row.tobytes(): row for row in rows}
    found, room = dict[bytes, NDArray[np.float32]](), asyncio.Semaphore(at_once)

    async def score(key: bytes, row: NDArray[Any]) -> None:
        async with room:
            found[key] = np.array([0.0, *await model.logprobs(row.tolist())], np.float32)

    async with tasks() as group:
        for key, row in distinct.items():
            group.create_task(score(key, row))
    of_replies = (found[row.tobytes()][len(row) - len(mask) :][mask == 1] for row, mask in zip(rows, batch.response_mask, strict=True))
    return np.concatenate([*of_replies]) if rows else np.zeros(0, np.float32)
