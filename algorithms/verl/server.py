"""A rollout backend for verl without a GPU: this package's own model server in a Ray actor, with weights handed over as tensors.

For tests and CPU-sized models; on GPUs verl's own backends (vllm, sglang) serve. Every answer says which weights sampled it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any, Final

import ray  # pyright: ignore[reportMissingImports] - of the extra [verl], as the next ones
import torch
from verl.workers.rollout.base import BaseRollout  # pyright: ignore[reportMissingImports]
from verl.workers.rollout.replica import RolloutReplica  # pyright: ignore[reportMissingImports]

from agl_otel.algorithms.grpo.engine import Engine
from agl_otel.algorithms.grpo.policy import load_policy
from agl_otel.algorithms.grpo.server import make_app
from agl_otel.listen import listen, make_runner

ACTOR: Final = "agl_otel_server_{}"
"""A replica's, by its rank."""
CALLS_AT_A_TIME: Final = 1000


class ModelServer:
    """One replica; runs as a Ray actor."""

    def __init__(self, model_dir: str, seed: int) -> None:
        torch.set_num_threads(1)
        self._engine = Engine(load_policy(model_dir), seed=seed)
        self._exit = AsyncExitStack()

    async def start(self) -> str:
        """Serve on a free port of this node; host:port."""
        await self._exit.enter_async_context(self._engine)
        runner = make_runner(make_app(self._engine))
        await runner.setup()
        self._exit.push_async_callback(runner.cleanup)
        host = ray.util.get_node_ip_address() if os.environ.get("RAY_ADDRESS") else "127.0.0.1"
        return f"{host}:{await listen(runner, host, 0, None)}"

    async def load(self, weights: Mapping[str, torch.Tensor], version: int | None) -> None:
        """Sample with these from the next batch on."""
        await self._engine.take_weights(weights, self._engine.version if version is None else str(version))

    async def nothing(self, *_: Any, **__: Any) -> None:
        """There is no GPU memory to give back, nothing to profile, and no request that a synchronous trainer would abort."""

    wake_up = sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = nothing
    start_profile = stop_profile = abort_all_requests = resume_generation = nothing


class Replica(RolloutReplica):
    """Starts the server."""

    async def launch_servers(self) -> None:
        """One actor, whatever the size of the replica."""
        options = {"name": ACTOR.format(self.replica_rank), "num_cpus": 0, "max_concurrency": CALLS_AT_A_TIME}
        server = ray.remote(ModelServer).options(**options).remote(str(self.model_config.path), self.config.seed)
        self.servers = [server]
        self._server_handle = server
        self._server_address = await server.start.remote()


class Rollout(BaseRollout):
    """The trainer's side: hands its weights over."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, model_config, device_mesh)
        self._server: Any = None

    async def resume(self, tags: list[str]) -> None:
        """Nothing was given back."""

    async def release(self) -> None:
        """Nothing to give back."""

    async def update_weights(self, weights: Any, wire_format: str = "named_tensors", **more: Any) -> None:
        """Have the server sample with these; returns when it does."""
        if self._server is None:
            self._server = ray.get_actor(ACTOR.format(torch.distributed.get_rank()))
        held = {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights}
        await self._server.load.remote(held, more.get("global_steps"))
