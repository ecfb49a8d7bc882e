"""Run a command as one attempt, on a running stack or a temporary one. Shared by `run` and `doctor`."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from pydantic import SecretStr

from agl_otel.errors import AglError
from agl_otel.proxy.upstream import OWN
from agl_otel.runner.agents import CommandAgent
from agl_otel.runner.process import run_runner
from agl_otel.runner.runner import new_worker_id
from agl_otel.settings import PRIVATE, Settings
from agl_otel.stack.supervisor import running_address, stack_for
from agl_otel.store import Store
from agl_otel.types import LLM, AttemptedRollout, EnqueueRolloutRequest, RolloutConfig, Span
from agl_otel.types.columns import Traces

_log = logging.getLogger(__name__)
DEFAULT_UPSTREAM: Final = "https://api.openai.com/v1"  # the default of OpenAI's client


@dataclass(frozen=True)
class FinishedAttempt:
    """One attempt with its stored traces and spans."""

    rollout: AttemptedRollout
    traces: Traces
    spans: list[Span]


@asynccontextmanager
async def run_once(
    settings: Settings, command: Sequence[str], *, task: Any, timeout_seconds: float | None
) -> AsyncGenerator[tuple[Store, FinishedAttempt]]:
    """Run `command` as one attempt of a new rollout and read back its spans; a temporary stack lives as long as the context.

    The rollout is started without being queued, so no other runner claims it. The agent's model calls go through the proxy to
    OPENAI_BASE_URL, else to the models of the running stack, else to OpenAI: the rollout has resources of its own for this, which never
    become the latest ones. OPENAI_API_KEY stays in the environment of this command and its proxy. A temporary stack stores everything
    in the data directory, never in configured servers, where other stacks' runners could claim the rollout.

    Raises UsageError if the command cannot be started, UnavailableError if the stack cannot.
    """
    given = os.environ.get("OPENAI_BASE_URL", "")
    upstream = given or settings.upstream_url or DEFAULT_UPSTREAM
    agent = CommandAgent(command)
    agent.check(task)
    key = SecretStr(os.environ.get("OPENAI_API_KEY", "")) if not settings.upstream_key.get_secret_value() else settings.upstream_key
    settings = _private(settings)
    async with stack_for(settings.model_copy(update={"upstream_url": upstream, "upstream_key": key})) as (store, _):
        model = LLM(endpoint=given or OWN, model=os.environ.get("OPENAI_MODEL", ""))
        resources = await store.queue.put_resources({"main_llm": model}, aside=True)
        config = RolloutConfig(timeout_seconds=timeout_seconds)
        request = EnqueueRolloutRequest(input=task, mode="test", resources_id=resources.resources_id, config=config)
        rollout = await _run(store, agent, request, settings)
        traces = await store.traces([rollout])
        yield store, FinishedAttempt(rollout, traces, await store.spans(rollout.rollout_id))


async def _run(store: Store, agent: CommandAgent, request: EnqueueRolloutRequest, settings: Settings) -> AttemptedRollout:
    """Start the rollout directly on a dedicated runner; return the finished rollout."""
    worker_id, stop = new_worker_id(), asyncio.Event()
    begun: asyncio.Future[AttemptedRollout] = asyncio.get_running_loop().create_future()

    async def claim(_: int) -> list[AttemptedRollout]:
        try:
            begun.set_result((await store.queue.start([request], worker_id=worker_id))[0])
        except AglError as error:
            begun.set_exception(error)
            stop.set()
            return []
        return [begun.result()]

    alone = settings.model_copy(update={"runner_metrics_port": 0})  # a permanent runner may use that port
    await run_runner(
        agent, store=store.description.queue, max_rollouts=1, worker_id=worker_id, stop=stop, claim=claim, settings=alone
    )  # fmt: skip
    (finished,) = await store.wait([(await begun).rollout_id])
    assert isinstance(finished, AttemptedRollout), "a rollout that was run has an attempt"
    return finished


def _private(settings: Settings) -> Settings:
    """Return `settings` if their stack is running, else those of a private stack on the data directory."""
    if running_address(settings):
        return settings
    if named := [f"AGL_{name.upper()}" for name in ("queue_url", "clickhouse_url") if getattr(settings, name)]:
        _log.warning(
            "no stack runs here, so this attempt is kept in %s alone, and not in the stores of %s: to run in those, start a stack with "
            "`agl-otel up`, or give --store",
            settings.data_dir,
            " and ".join(named),
        )
    return settings.model_copy(update=dict(PRIVATE))
