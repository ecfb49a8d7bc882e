"""This package's model server as a Ray actor. Does not import verl, which takes many seconds of CPU time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import ray  # pyright: ignore[reportMissingImports] - of the extra [verl]
import torch

from agl_otel.algorithms.grpo.model_port import require_key
from agl_otel.algorithms.grpo.policy import load_policy
from agl_otel.algorithms.grpo.sampler import Engine
from agl_otel.algorithms.grpo.server import make_app
from agl_otel.net.auth import model_server_key
from agl_otel.net.http_server import listen, make_runner
from agl_otel.settings import Settings


class ModelServer:
    """One replica; runs as a Ray actor."""

    def __init__(self, model_dir: str, seed: int) -> None:
        torch.set_num_threads(1)
        self._engine = Engine(load_policy(model_dir), seed=seed)
        self._exit = AsyncExitStack()

    async def start(self) -> str:
        """Serve on a free port of this node, for clients with `model_server_key`, and return host:port.

        Raises SettingsError where the port is reachable from other nodes and the stack has no token.
        """
        host = ray.util.get_node_ip_address() if os.environ.get("RAY_ADDRESS") else "127.0.0.1"
        key = model_server_key(Settings.load().token.get_secret_value())
        require_key(host, key)
        await self._exit.enter_async_context(self._engine)
        runner = make_runner(make_app(self._engine, host=host, key=key, loads=False))
        await runner.setup()
        self._exit.push_async_callback(runner.cleanup)
        return f"{host}:{await listen(runner, host, 0, None)}"

    async def load(self, weights: Mapping[str, torch.Tensor], version: int | None) -> None:
        """Use these weights from the next batch on; `version` None keeps the version."""
        await self._engine.take_weights(weights, self._engine.version if version is None else str(version))

    async def nothing(self, *_: Any, **__: Any) -> None:
        """Do nothing: there is no GPU memory to free, no profiler, and a synchronous trainer aborts no requests."""

    wake_up = sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = nothing
    start_profile = stop_profile = abort_all_requests = resume_generation = nothing
