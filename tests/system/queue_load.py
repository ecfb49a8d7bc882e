"""Workers that load a queue from their own process and write to a journal before and after each call; `queue_history.py` checks it.

python -m tests.system.queue_load ADDRESS JOURNAL WORKERS SEED     (ends with SIGTERM)

A worker claims a few rollouts, reports spans of some, and ends them: most succeed, some fail, some are forgotten (their attempt becomes
overdue). Its client gives up a call quickly and repeats it with the same request id, so that lost responses are repeated.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
import time
from pathlib import Path
from typing import IO, Any

from agl_otel.errors import AglError, UnavailableError
from agl_otel.queue.client import AttemptUpdate, Observation, QueueClient
from agl_otel.types import AttemptedRollout

AWAY_SECONDS = 60.0


class Journal:
    """Writes one JSON object per line, flushed at once."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, event: str, **what: Any) -> None:
        """Append a line."""
        self._file.write(json.dumps({"event": event, **what}) + "\n")
        self._file.flush()


async def work(client: QueueClient, journal: Journal, name: str, chance: random.Random) -> None:
    """Claim and report rollouts until cancelled."""
    while True:
        try:
            claims = await client.claim(chance.choice((1, 4, 16)), worker_id=name, wait_seconds=0.5)
        except UnavailableError:
            continue
        for claim in claims:
            journal.write(
                "claim", worker=name, rollout=claim.rollout_id, attempt=claim.attempt.attempt_id, number=claim.attempt.sequence_id
            )
        if claims:
            await finish(client, journal, claims, chance)


async def finish(client: QueueClient, journal: Journal, claims: list[AttemptedRollout], chance: random.Random) -> None:
    """Report each claim separately; a forgotten one is never reported."""
    seen = [Observation(c.rollout_id, c.attempt.attempt_id, 1, time.time()) for c in claims if chance.random() < 0.5]
    updates = [
        AttemptUpdate(rollout_id=c.rollout_id, attempt_id=c.attempt.attempt_id, token=c.token, status=status)
        for c in claims
        if (status := chance.choices(("succeeded", "failed", None), (85, 12, 3))[0]) is not None
    ]
    try:
        if seen:
            await client.observe(seen, sent_at=time.time())
        outcomes: list[AglError | None] = await client.report(updates) if updates else []
    except UnavailableError as error:
        journal.write("unknown", attempts=[update.attempt_id for update in updates], why=str(error))
        return
    for update, refusal in zip(updates, outcomes, strict=True):
        journal.write(
            "report", attempt=update.attempt_id, status=update.status, refused=None if refusal is None else type(refusal).__name__
        )


async def run(address: str, journal: Journal, workers: int, seed: int) -> None:
    """Work until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    clients = [QueueClient(address, timeout_seconds=5, retry_seconds=AWAY_SECONDS) for _ in range(max(1, workers // 16))]
    tasks = [
        asyncio.create_task(work(clients[i % len(clients)], journal, f"w-{seed}-{i}", random.Random(seed * 1000 + i)))
        for i in range(workers)
    ]
    await stop.wait()
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if not isinstance(result, asyncio.CancelledError):
            raise AssertionError("a worker ended by itself") from result if isinstance(result, BaseException) else None
    for client in clients:
        await client.close()


def main() -> None:
    """Parse the arguments and run the workers."""
    address, path, workers, seed = sys.argv[1:]
    with Path(path).open("a") as file:
        asyncio.run(run(address, Journal(file), int(workers), int(seed)))


if __name__ == "__main__":
    main()
