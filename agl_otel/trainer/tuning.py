"""Supervised fine-tuning as a job file describes it: rounds of SFT over the job's agent, with a model server for as long as they last."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from typing import Any, Final, Literal, get_type_hints

import aiohttp
import torch
from pydantic import BaseModel, ConfigDict, create_model
from transformers.utils import logging as transformers_logging

from agl_otel.algorithms.grpo.algorithm import MODEL_NAME, RESOURCE_NAME
from agl_otel.algorithms.grpo.tiny import make_policy
from agl_otel.algorithms.sft.algorithm import SFT
from agl_otel.algorithms.sft.report import RoundReport
from agl_otel.errors import AglError, ModelServerError, SettingsError
from agl_otel.processes import Process
from agl_otel.settings import free_port
from agl_otel.trainer.run import JobRun, unless
from agl_otel.types import LLM, RolloutConfig

MODEL_SERVER_START_SECONDS: Final = 120.0  # importing torch on a busy machine takes most of it
METRICS: Final = "metrics.jsonl"
_SET_BY_JOB: Final = frozenset({"model_dir", "model_server_url", "on_step", "reports", "run_dir", "rollout_config"})


def options_model(name: str) -> type[BaseModel]:
    """[algorithm] of a job that tunes: its name and its options, which are the algorithm's own keyword arguments."""
    hints = get_type_hints(SFT)
    options: dict[str, Any] = {f.name: (hints[f.name], f.default) for f in fields(SFT) if f.name not in _SET_BY_JOB}
    return create_model("AlgorithmOptions", __config__=ConfigDict(extra="forbid"), name=(Literal["sft"], name), **options)


class Tuning(JobRun):
    """The processes of one run of SFT over a store. Use `async with`; `folder` gets the policy, rounds, weights, logs, metrics.jsonl."""

    async def _start(self) -> None:
        if (self.folder / METRICS).exists():
            raise SettingsError(f"{self.folder} holds a run already, and sft cannot go on with one yet: choose a new folder")
        transformers_logging.disable_progress_bar()
        spec = self.job.policy
        self.model_dir = self.folder / "policy" if spec.model == "tiny" else self.job.folder / spec.model
        if spec.model == "tiny":
            await asyncio.to_thread(self._make_tiny)
        if not (self.model_dir / "config.json").exists():
            raise SettingsError(f"[policy] model = {spec.model!r}: {self.model_dir} holds no config.json of a transformers model")
        port = free_port()
        self.server_url = f"http://127.0.0.1:{port}"
        arguments = ("--model", str(self.model_dir), "--port", str(port), "--seed", str(spec.seed))
        arguments += ("--record", str(self.folder / "model_server.jsonl"))
        log = self.folder / "logs" / "model_server.log"
        self._server = Process.python_module("model server", "agl_otel.algorithms.grpo.server", *arguments, log=log)
        await self._run(self._server, grace_seconds=5.0)
        await self._server.ready(self._server_is_well, timeout_seconds=MODEL_SERVER_START_SECONDS)
        algorithm = self.algorithm()
        sampling = {"temperature": algorithm.temperature, "max_tokens": algorithm.max_tokens}
        await self.store.publish({RESOURCE_NAME: LLM(endpoint=f"{self.server_url}/v1", model=MODEL_NAME, sampling_parameters=sampling)})

    def _make_tiny(self) -> None:
        torch.set_num_threads(1)  # for so small a model a second thread costs ten times what it does
        make_policy(self.model_dir, seed=self.job.policy.seed)

    async def _server_is_well(self) -> bool:
        timeout = aiohttp.ClientTimeout(total=2)
        try:
            async with aiohttp.ClientSession(timeout=timeout) as session, session.get(f"{self.server_url}/health") as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    def _ended(self, process: Process) -> type[AglError]:
        return ModelServerError if process is self._server else super()._ended(process)

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
