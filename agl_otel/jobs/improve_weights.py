"""What is particular to weights in `agl-otel improve`: a training run in each cycle, model servers, and a back-test."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Final

from agl_otel.adapters.gates import Rules
from agl_otel.algorithms.model_export import export_model
from agl_otel.algorithms.model_files import model_fingerprint
from agl_otel.jobs.grpo import GRPORun
from agl_otel.jobs.improve import Improvement
from agl_otel.jobs.improve_cycle import CycleFolder
from agl_otel.jobs.improve_evidence import Evidence, evidence, held_back, is_backtested
from agl_otel.jobs.job import Job
from agl_otel.jobs.policy_server import forks_of
from agl_otel.jobs.production_weights import ServedWeights
from agl_otel.jobs.served import ServedRun, prepare_policy
from agl_otel.jobs.sft import SFTRun

RUNS: Final[dict[str, type[ServedRun]]] = {"grpo": GRPORun, "sft": SFTRun}
"""{algorithm: how a cycle trains by it}."""
_RESOURCE: Final = ("bridge", "strict_tools")
"""Options of an algorithm that belong to its LLM resource."""


class WeightsImprovement(Improvement):
    """The loop over weights."""

    while_away: ClassVar[str] = "with them the model servers end: nobody answers users until the loop goes on"

    def _began_with(self) -> dict[str, Any]:
        return {"model": self.job.policy.model}

    async def _prepare(self) -> Path:
        if (forks := forks_of(self.job, self.folder)) is not None:
            self._exit.push_async_callback(forks.close)
            await forks.begin()
        self._forks = forks
        return await prepare_policy(self.job, self.folder)

    def _production(self, **named: str) -> ServedWeights:
        algorithm = import_module(self.job.run_by).made(self.job, self._first, "")
        given = {name: self.job.options[name] for name in _RESOURCE if name in self.job.options}
        slots, sampling = self.folder / "slots", algorithm.sampling_parameters
        return ServedWeights(self.job, self._plain, slots, sampling=sampling, options=given, forks=self._forks, **named)

    def _held_back(self, rollout_ids: Sequence[str], trusted: Collection[str]) -> list[str]:
        return held_back(rollout_ids, trusted)

    async def _learnt(self, cycle: CycleFolder) -> dict[str, Any]:
        algorithm = {name: value for name, value in self.job.algorithm.items() if name != "offline_mode"}
        policy = self.job.policy.model_copy(update={"model": str(self.promoted)})
        selection = cycle.of("window")["selection"]
        job = self.job.model_copy(update={"policy": policy, "algorithm": {**algorithm, "selection": selection}})
        facts = await self._trained(job, cycle.run)
        if facts["after"] is None:
            return {**facts, "weights": ""}
        shutil.rmtree(cycle.model, ignore_errors=True)  # of an interrupted stage
        await asyncio.to_thread(export_model, cycle.run, cycle.model, last=True)
        return {**facts, "weights": await asyncio.to_thread(model_fingerprint, cycle.model)}

    async def _trained(self, job: Job, run: Path) -> dict[str, Any]:
        """Run a training and score its weights before and after; `after` is None where it made none."""
        async with RUNS[self._trains](job, self._plain, run, settings=self.settings, force=self.force, forks=self._forks) as training:
            self._learns(training.run_id)
            await training.publish_policy()
            async with training.runners(mode="val"):
                before = await training.validate_before()
                report = await training.fit(job.tasks("train"))
                made = any(step.next_version != step.weights_version for step in report.steps)
                after = await training.validate_after(len(report.steps)) if made else None
        return {
            "run": training.run_id,
            "steps": len(report.steps),
            "trajectories": sum(step.trajectories for step in report.steps),
            "refused": dict(sum((Counter(step.refused) for step in report.steps), Counter[str]())),
            "before": before.rewards,
            "after": None if after is None else after.rewards,
        }

    def _rules(self) -> Rules:
        limit = self.spec.max_drift
        return replace(super()._rules(), max_drift=None if limit == "off" else limit)

    async def _evidence(self, cycle: CycleFolder) -> Evidence:
        window = cycle.of("window")
        return await evidence(
            self._plain,
            window["rollout_ids"],
            cycle.model,
            backtested=[each for each in window["held_back"] if is_backtested(each)],
            unseen=window["held_back"],
            sources=self._sources,
            trusted_sources=self.spec.trusted_sources,
            agent_match=self.job.options.get("agent_match"),
            device=self.job.options.get("device", "cpu"),
        )
