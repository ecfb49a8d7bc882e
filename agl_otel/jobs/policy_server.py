"""The model server of a job's policy: ours, or vLLM, as a child process on a port that its folder keeps."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import aiohttp

from agl_otel.algorithms.checked_files import read_checked, with_checksum, write_json
from agl_otel.algorithms.grpo.model_port import ANSWERING
from agl_otel.algorithms.grpo.vllm import LORA_RANKS, START_SECONDS, STOP_SECONDS, vllm_command
from agl_otel.errors import InUseError
from agl_otel.jobs.job import Job
from agl_otel.net.http_server import PROBE_SECONDS, is_healthy
from agl_otel.service.forkserver import ForkServer
from agl_otel.service.ports import is_free
from agl_otel.service.processes import HEALTH_POLL_SECONDS, Process
from agl_otel.settings import free_port

OURS: Final = "agl_otel.algorithms.grpo.server"
VLLM: Final = "agl_otel.algorithms.grpo.vllm"
PORT: Final = "model_server.json"
PORT_SECONDS: Final = 20.0  # the model server of a killed run ends shortly after it
OUR_START_SECONDS: Final = 120.0  # mostly for importing torch on a busy machine
OUR_STOP_SECONDS: Final = 5.0
SHARED_UTILIZATION: Final = 0.4  # of a GPU that vLLM shares with the trainer, whose weights, gradients and optimizer stay there
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


class PolicyServer:
    """A model server. `prepare` it, start the process, and wait until it is `ready`.

    Args:
        job: says which server, and how.
        model_dir: the model's folder.
        folder: keeps its port, where rollouts that still wait after a stop look for it, and its logs.
        record: the file of our server's own record of its samples.
        name: of the process, in messages and logs.
        forks: of `forks_of`, from which it is forked; None: it is started by itself.
    """

    def __init__(
        self, job: Job, model_dir: Path, folder: Path, *, record: Path, name: str = "model server", forks: ForkServer | None = None
    ) -> None:
        self._job = job
        self._model_dir = model_dir
        self._folder = folder
        self._record = record
        self._name = name
        self._forks = forks
        self._start_seconds = START_SECONDS if job.policy.server == "vllm" else OUR_START_SECONDS
        self.stop_seconds = STOP_SECONDS if job.policy.server == "vllm" else OUR_STOP_SECONDS
        self.url = ""
        """Known once it is prepared."""
        self.process: Process | None = None

    async def prepare(self, *, weights: Path | None = None, version: int = 1) -> Process:
        """Return the process that serves these weights (None: the model's), when the port is free. Raises InUseError, DataError."""
        port = await self._port()
        self.url = f"http://127.0.0.1:{port}"
        spec, logs = self._job.policy, self._folder / "logs"
        arguments = ["--model", str(self._model_dir), "--port", str(port), "--seed", str(spec.seed), "--version", str(version)]
        arguments += ["--weights", str(weights)] if weights is not None else []
        if spec.server == "vllm":
            arguments += ["--vllm", vllm_command(spec.vllm), "--log", str(logs / "vllm.log"), *vllm_arguments(self._job)]
        else:
            arguments += ["--record", str(self._record), *(["--device", "cuda"] if spec.devices else [])]
        log, module = logs / "model_server.log", VLLM if spec.server == "vllm" else OURS
        if self._forks is not None:
            self.process = self._forks.process(self._name, module, *arguments, log=log)
        else:
            env = visible(spec.devices) if spec.devices else {}
            self.process = Process.python_module(self._name, module, *arguments, log=log, env=env)
        return self.process

    async def ready(self) -> None:
        """Wait until the started process is healthy. Raises UnavailableError where it ends, or does not come."""
        assert self.process is not None, "it was prepared"
        await self.process.ready(lambda: is_healthy(f"{self.url}/health"), timeout_seconds=self._start_seconds)

    async def idle(self) -> None:
        """Wait until it answers nobody, or does not answer itself."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PROBE_SECONDS)) as session:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                while True:
                    async with session.get(f"{self.url}/health") as answer:
                        if (await answer.json())[ANSWERING] == 0:
                            return
                    await asyncio.sleep(HEALTH_POLL_SECONDS)

    async def _port(self) -> int:
        kept = self._folder / PORT
        if not kept.exists():
            write_json(kept, with_checksum({"port": free_port()}))
        port: int = read_checked(kept)["port"]
        deadline = time.monotonic() + PORT_SECONDS
        while not is_free("127.0.0.1", port):
            if time.monotonic() > deadline:
                raise InUseError(
                    f"port {port}, where the rollouts of the run in {self._folder} look for their model, is taken: "
                    "end the process that holds it"
                )
            await asyncio.sleep(HEALTH_POLL_SECONDS)
        return port


def forks_of(job: Job, folder: Path) -> ForkServer | None:
    """Return what the model servers of a run in `folder` are forked from, which imports torch and transformers once for all of them.

    None where each is started by itself: vLLM, and a server on a GPU, whose driver may not be forked.
    """
    if job.policy.server != "ours" or job.policy.devices:
        return None
    return ForkServer([OURS], log=folder / "logs" / "forks.log")


def is_shared(job: Job) -> bool:
    """Whether the model server and the trainer are on one GPU."""
    kind, _, number = job.options.get("device", "cpu").partition(":")
    if kind == "cpu" or (job.policy.server == "ours" and job.policy.devices is None):
        return False
    return int(number or 0) in (job.policy.devices or [0])


def gpu_share(job: Job) -> float | None:
    """Return the share of a GPU's memory that vLLM takes; None: its default."""
    return job.policy.gpu_memory_utilization or (SHARED_UTILIZATION if is_shared(job) else None)


def adapter_rank(job: Job) -> int:
    """Return the rank of the LoRA adapters that the model server loads; 0: it loads merged weights."""
    rank: int = job.options.get("lora_rank") or 0
    return rank if job.policy.server == "vllm" and job.policy.adapters and rank <= LORA_RANKS[-1] else 0


def vllm_arguments(job: Job) -> list[str]:
    """Return the arguments of grpo/vllm.py that the job's keys set; those after "--" are of `vllm serve`."""
    spec, share, rank = job.policy, gpu_share(job), adapter_rank(job)
    arguments = [*(["--lora-rank", str(rank)] if rank else []), *(["--sleep"] if spec.sleep else []), "--"]
    arguments += ["--gpu-memory-utilization", str(share)] if share is not None else []
    arguments += ["--tensor-parallel-size", str(len(spec.devices))] if spec.devices and len(spec.devices) > 1 else []
    return [*arguments, *spec.vllm_options]


def visible(devices: Sequence[int]) -> dict[str, str]:
    """Return the environment of a process that sees these GPUs, of those that this process sees, only."""
    seen = os.environ.get(VISIBLE, "").split(",") if os.environ.get(VISIBLE) else [str(number) for number in range(max(devices) + 1)]
    return {VISIBLE: ",".join(seen[number].strip() for number in devices)}
