"""A training run of a job file: weights, by GRPO, with a model server of its own for as long as it lasts."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, create_model

from agl_otel.algorithms.grpo.algorithm import GRPO
from agl_otel.algorithms.grpo.report import StepReport
from agl_otel.algorithms.run_folder import RunFolder, digest_of, write_json
from agl_otel.algorithms.utils import survives_its_runner
from agl_otel.errors import InUseError
from agl_otel.processes import HEALTH_POLL_SECONDS
from agl_otel.settings import free_port, is_free
from agl_otel.trainer.run import Evaluation, unless
from agl_otel.trainer.served import ServedRun

PORT_SECONDS: Final = 20.0  # the model server of a run that was killed ends a moment after it
SERVER: Final = "model_server.json"
_AGENT: Final = {"function", "command", "grader"}
"""What of [agent] decides a run's course; how many run at a time may change."""
_SET_BY_TRAINING: Final = frozenset({"model_dir", "model_server_url", "on_step", "reports", "weights_dir", "rollout_config", "run_dir"})


def options_model(name: str) -> type[BaseModel]:
    """[algorithm] of a job that trains weights: its name and its options, which are the algorithm's own keyword arguments."""
    hints = get_type_hints(GRPO)
    options: dict[str, Any] = {f.name: (hints[f.name], f.default) for f in fields(GRPO) if f.name not in _SET_BY_TRAINING}
    return create_model("AlgorithmOptions", __config__=ConfigDict(extra="forbid"), name=(Literal["grpo"], name), **options)


AlgorithmSpec: Final = options_model("grpo")
"""[algorithm]: its name and its options, which are the algorithm's own keyword arguments."""


@dataclass
class Report:
    """What a training run adds up to."""

    steps: list[StepReport] = field(default_factory=list[StepReport])
    stopped_because: str = ""


class Training(ServedRun):
    """The processes of one training run over a store. Use `async with`; a folder that holds the run already goes on with it.

    Args:
        job: what to train.
        store: a connected store.
        folder: where the run is kept: run.json, policy, checkpoints, metrics.jsonl, the model server's record and port, logs.
        stack_failed: fails when the stack is gone; the run then ends with that error.
    """

    async def _start(self) -> None:
        await self._make_policy(again=False)
        algorithm = self.algorithm()
        options = {
            **algorithm.course(self.job.tasks("train")),
            "val": digest_of(self.job.tasks("val")),
            "agent": self.job.agent.model_dump(include=set(_AGENT)),
        }
        self.run = RunFolder(self.folder, algorithm="grpo", options=options, seed=algorithm.seed)
        self._exit.callback(self.run.close)
        await self._serve(await self._port())

    async def _port(self) -> int:
        """The run's own: rollouts that wait when it is stopped look for their model there when it goes on. Raises InUseError."""
        kept = self.folder / SERVER
        if not kept.exists():
            write_json(kept, {"port": free_port()})
        port: int = json.loads(kept.read_text())["port"]
        deadline = time.monotonic() + PORT_SECONDS
        while not is_free("127.0.0.1", port):
            if time.monotonic() > deadline:
                raise InUseError(
                    f"port {port}, where the rollouts of the run in {self.folder} look for their model, is taken: "
                    "end the process that holds it"
                )
            await asyncio.sleep(HEALTH_POLL_SECONDS)
        return port

    async def fit(self, tasks: Sequence[Any], *, on_step: Callable[[StepReport], None] | None = None) -> Report:
        """Train until the algorithm is content; `on_step` gets every step that is done now, the report those before, too."""
        algorithm = self.algorithm(run=self.run, on_step=on_step)
        steps = await unless(self.failed, algorithm.run(self.store, tasks))
        return Report(steps, "the target score is reached" if len(steps) < algorithm.max_steps else "max_steps are done")

    async def evaluate_once(self, tasks: Sequence[Any], *, name: str) -> Evaluation:
        """`evaluate`, and what the run has evaluated under this name before is read again."""
        return await self.evaluate(tasks, key=f"{self.run.run_id}/{name}", seed=self.run.seed)

    def algorithm(self, *, run: RunFolder | None = None, on_step: Callable[[StepReport], None] | None = None) -> GRPO:
        """The job's algorithm over this run's policy and model server."""
        options: dict[str, Any] = {"seed": self.job.policy.seed, **self.job.options}
        return GRPO(
            model_dir=self.model_dir,
            model_server_url=self.server_url,
            weights_dir=self.folder / "weights",
            rollout_config=survives_its_runner(self.job.agent.timeout_seconds),
            run_dir=run,
            on_step=on_step,
            **options,
        )
