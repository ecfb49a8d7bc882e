"""Proxies and queues as processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence

import aiohttp

from agl_otel.queue.client import QueueClient
from agl_otel.settings import Settings
from agl_otel.types import LLM, AttemptedRollout, EnqueueRolloutRequest, NamedResources, PromptTemplate


async def start(module: str, settings: Settings, *, before: Sequence[str] = (), **environment: str) -> asyncio.subprocess.Process:
    """Start a process; `before` is a command that executes the command line after it."""
    env = {**os.environ, **settings.environment(), **environment}
    return await asyncio.create_subprocess_exec(*before, sys.executable, "-m", module, env=env, stderr=asyncio.subprocess.PIPE)


async def stop(process: asyncio.subprocess.Process) -> tuple[int | None, str]:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    _, err = await asyncio.wait_for(process.communicate(), 300)
    return process.returncode, err.decode()


async def healthy(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        for _ in range(600):
            try:
                async with session.get(f"{url}/health") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                await asyncio.sleep(0.05)
    raise AssertionError(f"{url} did not become healthy")


async def rollout(queue: QueueClient, endpoint: str, model: str, sampling: dict[str, float] | None = None) -> AttemptedRollout:
    resources: NamedResources = {
        "prompt": PromptTemplate(template="x", engine="f-string"),
        "llm": LLM(endpoint=endpoint, model=model, api_key="real-key", sampling_parameters=sampling or {}),
    }
    update = await queue.put_resources(resources, resources_id="rs-1")
    (started,) = await queue.start([EnqueueRolloutRequest(input=1, resources_id=update.resources_id)])
    return started
