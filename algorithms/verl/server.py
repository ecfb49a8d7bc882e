"""A rollout backend for verl without a GPU: this package's own model server (model_server.py), with weights handed over as tensors.

For tests and CPU-sized models; on GPUs verl's own backends (vllm, sglang) serve. Every answer says which weights sampled it.
"""

from __future__ import annotations

from typing import Any, Final

import ray  # pyright: ignore[reportMissingImports] - of the extra [verl], as the next ones
import torch
from verl.workers.rollout.base import BaseRollout  # pyright: ignore[reportMissingImports]
from verl.workers.rollout.replica import RolloutReplica  # pyright: ignore[reportMissingImports]

from agl_otel.algorithms.verl.model_server import ModelServer

ACTOR: Final = "agl_otel_server_{}"
"""A replica's, by its rank."""
CALLS_AT_A_TIME: Final = 1000


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
