"""A rollout backend of verl without a GPU: this package's model server (model_server.py), which receives weights as tensors.

For tests and small models; on GPUs use verl's backends (vllm, sglang). Each response has the version of the weights that sampled it.
"""

from __future__ import annotations

from typing import Any, Final

import ray  # pyright: ignore[reportMissingImports] - of the extra [verl], as the next ones
import torch
from verl.workers.rollout.base import BaseRollout  # pyright: ignore[reportMissingImports] - of the [verl] extra
from verl.workers.rollout.replica import RolloutReplica  # pyright: ignore[reportMissingImports] - of the [verl] extra

from agl_otel.algorithms.verl.model_server import ModelServer

ACTOR: Final = "agl_otel_server_{}"
"""The name of a replica's actor, with its rank."""
MAX_CONCURRENCY: Final = 1000


class Replica(RolloutReplica):
    """A replica with one model server."""

    async def launch_servers(self) -> None:
        """Start one actor, whatever the size of the replica."""
        options = {"name": ACTOR.format(self.replica_rank), "num_cpus": 0, "max_concurrency": MAX_CONCURRENCY}
        server = ray.remote(ModelServer).options(**options).remote(str(self.model_config.path), self.config.seed)
        self.servers = [server]
        self._server_handle = server
        self._server_address = await server.start.remote()


class Rollout(BaseRollout):
    """The trainer's side, which sends its weights to the server."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, model_config, device_mesh)
        self._server: Any = None

    async def resume(self, tags: list[str]) -> None:
        """Do nothing: no memory was released."""

    async def release(self) -> None:
        """Do nothing: there is no GPU memory to release."""

    async def update_weights(self, weights: Any, wire_format: str = "named_tensors", **more: Any) -> None:
        """Send the weights to the server; it samples with them when this returns."""
        if self._server is None:
            self._server = ray.get_actor(ACTOR.format(torch.distributed.get_rank()))
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights}
        await self._server.load.remote(copies, more.get("global_steps"))
