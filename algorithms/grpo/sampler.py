"""The inference engine of the model server: one thread that alternates between batches of requests and new weights.

Everything that uses the model runs in one worker thread, one task at a time, so new weights become active between two batches and the
event loop stays responsive. Requests that arrive while a batch runs form the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from agl_otel.algorithms.grpo.generate import Row, by_prompt_length, generate
from agl_otel.algorithms.grpo.logprobs import Scorer
from agl_otel.algorithms.grpo.model_port import Origin
from agl_otel.algorithms.grpo.policy import Policy, copy_weights, load_weights
from agl_otel.errors import FULL_DISK, DiskFullError, UnavailableError, unwritable

GATHER_SECONDS = 0.002  # batching delay of the first request, which halves the number of forward passes
MAX_BATCH_ROWS = 256


@dataclass(eq=False)
class Job:
    """One request, with a row for each choice."""

    id: str
    rows: list[Row]
    finished: asyncio.Future[str]
    """Resolves to the version of the weights that sampled it."""
    on_tokens: Callable[[str, list[int]], None] | None = None
    """For streams: called on the event loop with (version, number of tokens ready in each row)."""


class Record:
    """The model server's own record of what it sampled: a file with a JSON line for each choice. It is evidence, against which a run's
    traces are compared call by call, so a choice that it lacks is not given out either.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)

    def write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append all lines, or none. Raises DiskFullError, or UnavailableError where they cannot be written for another reason."""
        left = memoryview("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode())
        size = self._file.seek(0, os.SEEK_END)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(size)
            what = f"the model server's record {self._path}"
            full = error.errno in FULL_DISK
            raise (DiskFullError.of(what, error.strerror) if full else UnavailableError(unwritable(what, error))) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclass
class Engine:
    """Batches jobs through a policy. Use `async with`."""

    policy: Policy
    version: str = "0"
    record: Record | None = None
    """Receives each sampled choice before the response is sent; a call that it cannot take fails with its error."""
    seed: int = 0
    origin: Origin | None = None
    """Of the weights, where they were read from a folder."""
    _waiting: asyncio.Queue[Job] = field(default_factory=asyncio.Queue[Job])
    _worker: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="model"))
    _loop: asyncio.Task[None] | None = None
    _scorer: Scorer | None = None

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    async def __aenter__(self) -> Engine:
        await asyncio.get_running_loop().run_in_executor(self._worker, torch.set_num_threads, 1)
        self._loop = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
        self._worker.shutdown()

    def row_random(self, seed: int | None, choice: int) -> random.Random:
        """Return the random source of one choice: from the request's seed, else from the engine's."""
        return random.Random(self._random.getrandbits(64) if seed is None else f"{seed}/{choice}")

    async def submit(self, job: Job) -> str:
        """Sample the job's rows and return the version of the weights. Raises what Record.write raises."""
        self._waiting.put_nowait(job)
        return await job.finished

    async def score(self, token_ids: Sequence[int]) -> tuple[str, list[float]]:
        """Return the version of the weights, and the log-prob at temperature 1 of each token but the first."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, self._score, token_ids)

    async def set_weights(self, folder: Path, version: str) -> None:
        """Load `folder`'s weights between two batches; where these are the active ones, only their version changes.

        Raises UsageError where they do not fit; the old ones then stay active.
        """
        await asyncio.get_running_loop().run_in_executor(self._worker, self._load, folder, version)

    async def take_weights(self, weights: Mapping[str, torch.Tensor], version: str) -> None:
        """Set weights from memory, {name: tensor}, between two batches. Raises UsageError like `set_weights`."""
        await asyncio.get_running_loop().run_in_executor(self._worker, self._take, weights, version)

    @torch.no_grad()
    def _score(self, token_ids: Sequence[int]) -> tuple[str, list[float]]:
        if self._scorer is None:
            self._scorer = Scorer(self.policy.model, pack=False)
        ids = torch.tensor(token_ids, device=self.policy.model.device)
        scored = torch.arange(len(ids), device=ids.device) > 0
        return self.version, self._scorer(ids, [len(ids)], scored).tolist()

    def _load(self, folder: Path, version: str) -> None:
        if self.origin is None or not self.origin.is_still(folder):
            origin = Origin(folder)
            load_weights(self.policy.model, folder)
            self.origin = origin
        self.version = version

    def _take(self, weights: Mapping[str, torch.Tensor], version: str) -> None:
        copy_weights(self.policy.model, weights, f"weights version {version}")
        self.origin = None
        self.version = version

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            jobs = [await self._waiting.get()]
            await asyncio.sleep(GATHER_SECONDS)
            while not self._waiting.empty():
                jobs.append(self._waiting.get_nowait())
            jobs = [job for job in jobs if not job.finished.done()]
            try:
                await loop.run_in_executor(self._worker, self._generate, jobs, loop)
            except Exception as error:  # noqa: BLE001  # a failed batch must not end the server; each caller gets the error
                for job in jobs:
                    if not job.finished.done():
                        job.finished.set_exception(error)

    def _generate(self, jobs: Sequence[Job], loop: asyncio.AbstractEventLoop) -> None:
        """Sample every row, record, then wake the callers; runs in the worker thread."""
        owner = {id(row): job for job in jobs for row in job.rows}
        left = {job: len(job.rows) for job in jobs}
        version = self.version

        def on_tokens(rows: list[Row]) -> None:
            finished: list[Job] = []
            streaming: dict[Job, list[int]] = {}
            for row in rows:
                job = owner[id(row)]
                if job.on_tokens is not None and job not in streaming:
                    streaming[job] = [len(r.tokens) for r in job.rows]
                if row.finish_reason is not None:
                    left[job] -= 1
                    if not left[job]:
                        finished.append(job)
            if finished:
                self._write_record(finished, version)
            if finished or streaming:
                loop.call_soon_threadsafe(_wake, finished, streaming, version)

        for batch in by_prompt_length([row for job in jobs for row in job.rows], MAX_BATCH_ROWS):
            generate(self.policy.model, batch, self.policy.stop_ids, on_tokens, self.policy.decode)

    def _write_record(self, jobs: Sequence[Job], version: str) -> None:
        if self.record is None:
            return
        now = time.time()
        lines: list[dict[str, Any]] = [
            {
                "id": job.id,
                "choice": choice,
                "prompt_token_ids": row.prompt,
                "response_token_ids": row.tokens,
                "logprobs": row.logprobs,
                "model_version": version,
                "sampling": asdict(row.sampling),
                "time": now,
            }
            for job in jobs
            for choice, row in enumerate(job.rows)
        ]
        self.record.write(lines)


def _wake(finished: list[Job], streaming: dict[Job, list[int]], version: str) -> None:
    for job, ready in streaming.items():
        if job.on_tokens is not None:
            job.on_tokens(version, ready)
    for job in finished:
        if not job.finished.done():
            job.finished.set_result(version)
