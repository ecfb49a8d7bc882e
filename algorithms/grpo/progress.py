"""The progress of a GRPO run in its folder: a line for each step and checkpoints, from which it is resumed.

The files are those of run_folder.py and checkpoint.py; here is when they are written, and what of a run is in them.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from agl_otel.algorithms.base_model import name_of_base
from agl_otel.algorithms.grpo.checkpoint import Checkpoints, State, as_random_state
from agl_otel.algorithms.grpo.groups import InFlight, Take, TaskOrder
from agl_otel.algorithms.grpo.options import Schedule
from agl_otel.algorithms.grpo.push import Pushes, dtype_of_model
from agl_otel.algorithms.grpo.report import StepReport
from agl_otel.algorithms.grpo.serving import Serving
from agl_otel.algorithms.model_files import keep_small_files
from agl_otel.algorithms.run_folder import RunFolder

TAKEN: Final = "taken.jsonl"
"""The groups and rollouts that each step took."""
_logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Progress:
    """What changes from step to step, which is kept in the run's folder and restored from it. A run in memory has no folder."""

    run: RunFolder | None
    model_dir: Path
    model: Any
    optimizer: torch.optim.Optimizer
    pushes: Pushes
    serving: Serving
    reports: list[StepReport]
    order: TaskOrder
    shuffle: random.Random
    in_flight: InFlight
    schedule: Schedule
    validator: Callable[[int, Path], Awaitable[object]] | None
    writer: Executor
    """A thread that writes checkpoints beside the next steps."""
    in_worker: Callable[..., Awaitable[Any]]
    """Calls a function in torch's own thread."""
    _checkpoints: Checkpoints = field(init=False)
    _noted: int = field(init=False, default=0)
    """The last step in taken.jsonl."""
    _saved_at: float = field(init=False, default_factory=time.monotonic)

    async def resume(self) -> Path:
        """Continue the run from its last checkpoint; return the folder of its weights.

        A model server that was started for the run has read the same folder. Raises what Checkpoints.load raises.
        """
        if self.run is None:
            return self.model_dir
        folder, updates = self.run.folder, self.pushes.updates
        named = partial(name_of_base, self.model_dir, folder, dtype=str(dtype_of_model(updates)).removeprefix("torch."))
        base = await asyncio.to_thread(named) if updates.lora_rank is not None else None
        self._checkpoints = Checkpoints(folder, keep=self.schedule.keep_checkpoints, writer=self.writer, base=base)
        self._checkpoints.remove_incomplete()
        await asyncio.to_thread(keep_small_files, self.model_dir, folder)
        self._saved_at = time.monotonic()
        place = self._checkpoints.latest()
        taken: dict[int, Sequence[Take]] = {row["step"]: row["takes"] for row in self.run.rows(TAKEN)}
        self._noted = max(taken, default=0)
        if place is None:
            self.run.metrics(0)
            self.in_flight.repeat(taken)
            return self.model_dir
        state: State = await self.in_worker(self._checkpoints.load, place, self.run.run_id, self.model, self.optimizer)
        self.serving.resume(state.version, folder)
        self.reports += [StepReport.of_row(row) for row in self.run.metrics(state.step)]
        self.order.restore(state.tasks)
        self.shuffle.setstate(as_random_state(state.shuffle))
        self.in_flight.repeat({step: takes for step, takes in taken.items() if step > state.step})
        await self.in_flight.restore(state.next_group, state.groups)
        _logger.info("run %s resumes after step %d", self.run.run_id, state.step)
        return self.pushes.resumed(place, folder, state.version)

    def note_taken(self, step: int, takes: Sequence[Take]) -> None:
        """Record, before the weights change, what a step trains on: repeated from an earlier checkpoint, it takes the same.

        Else the weights of its version would be others than those that sampled what was enqueued after it.
        """
        if self.run is not None and step > self._noted:
            self.run.append(TAKEN, {"step": step, "takes": takes})
            self._noted = step

    async def keep(self, report: StepReport, *, is_last: bool) -> None:
        """Keep a step: its line, then its checkpoint, where one is due. A line after the last checkpoint is removed on resuming."""
        if self.run is None:
            return
        self.run.metric(report.row)
        self._checkpoints.raise_failed()
        if is_last or self._validates(report.step) or self._is_due(report.step):
            await self._save()

    async def validate(self, *, last: bool = False) -> bool:
        """Have the weights of the last step validated where that is due; `last`: the training ends, so it is due unless it was done.

        Returns whether they were.
        """
        step = len(self.reports)
        if self.run is None or self.validator is None or not step or last == self._validates(step):
            return False
        await self.in_worker(self._checkpoints.wait)  # the validation names it
        await self.validator(step, self._checkpoints.of_step(step))
        return True

    async def keep_last(self) -> Path | None:
        """Have a complete checkpoint of the last step; return its folder, None without one."""
        if self.run is None or not self.reports:
            return None
        await self.in_worker(self._checkpoints.wait)
        place = self._checkpoints.of_step(len(self.reports))
        if not place.exists():
            await self._save()
            await self.in_worker(self._checkpoints.wait)
        return place

    def _validates(self, step: int) -> bool:
        return self.validator is not None and bool(self.schedule.val_every) and step % (self.schedule.val_every or 1) == 0

    def _is_due(self, step: int) -> bool:
        """Whether a checkpoint is due after this step, by the number of steps or by the time since the last one."""
        if self.schedule.checkpoint_every_steps is not None:
            return step % self.schedule.checkpoint_every_steps == 0
        return time.monotonic() - self._saved_at >= 60.0 * self.schedule.checkpoint_every_minutes

    async def _save(self) -> None:
        """Begin to write the checkpoint of the last step."""
        assert self.run is not None
        groups = [{"number": group.number, "step": group.step, "rollout_ids": list(group.rollout_ids)} for group in self.in_flight.groups]
        published = self.serving.published
        state = State(
            run_id=self.run.run_id,
            step=len(self.reports),
            resources_id=published.resources_id,
            version=published.version,
            tasks=self.order.state,
            next_group=self.in_flight.count,
            shuffle=list(self.shuffle.getstate()),
            groups=groups,
        )
        pushed = self.pushes.for_checkpoint(state.version)
        await self.in_worker(partial(self._checkpoints.save, state, self.model, self.optimizer, pushed=pushed))
        self._saved_at = time.monotonic()
