"""Supervised fine-tuning as a job file describes it: rounds of SFT over the job's agent, with a model server for as long as they last."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from typing import Any, Final, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, create_model

from agl_otel.algorithms.sft.algorithm import SFT
from agl_otel.algorithms.sft.report import RoundReport
from agl_otel.errors import SettingsError
from agl_otel.settings import free_port
from agl_otel.trainer.run import unless
from agl_otel.trainer.served import ServedRun
from agl_otel.types import RolloutConfig

METRICS: Final = "metrics.jsonl"
_SET_BY_JOB: Final = frozenset({"model_dir", "model_server_url", "on_step", "reports", "run_dir", "rollout_config"})


def options_model(name: str) -> type[BaseModel]:
    """[algorithm] of a job that tunes: its name and its options, which are the algorithm's own keyword arguments."""
    hints = get_type_hints(SFT)
    options: dict[str, Any] = {f.name: (hints[f.name], f.default) for f in fields(SFT) if f.name not in _SET_BY_JOB}
    return create_model("AlgorithmOptions", __config__=ConfigDict(extra="forbid"), name=(Literal["sft"], name), **options)


class Tuning(ServedRun):
    """The processes of one run of SFT over a store. Use `async with`; `folder` gets the policy, rounds, weights, logs, metrics.jsonl."""

    async def _start(self) -> None:
        if (self.folder / METRICS).exists():
            raise SettingsError(f"{self.folder} holds a run already, and sft cannot go on with one yet: choose a new folder")
        await self._make_policy(again=True)
        await self._serve(free_port())
        await self.publish_policy()

    async def fit(self, tasks: Sequence[Any], *, on_step: Callable[[RoundReport], object] | None = None) -> list[RoundReport]:
        """Tune until the algorithm is content; every round is also written to metrics.jsonl. Raises what SFT.train raises."""
        with (self.folder / METRICS).open("a") as metrics:

            def note(report: RoundReport) -> None:
                metrics.write(json.dumps(asdict(report)) + "\n")
                metrics.flush()
                if on_step:
                    on_step(report)

            return await unless(self.failed, self.algorithm(on_step=note).train(self.store, tasks))

    def algorithm(self, *, on_step: Callable[[RoundReport], object] | None = None) -> SFT:
        """The job's algorithm over this run's policy and model server."""
        options: dict[str, Any] = {"seed": self.job.policy.seed, **self.job.options}
        config = RolloutConfig(timeout_seconds=self.job.agent.timeout_seconds)
        place: dict[str, Any] = {"model_dir": self.model_dir, "model_server_url": self.server_url, "run_dir": self.folder}
        return SFT(**place, rollout_config=config, on_step=on_step, **options)
