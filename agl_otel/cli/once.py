"""Run a command as one attempt, on a running stack or a temporary one. Shared by `run` and `doctor`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
from pydantic import SecretStr

from agl_otel.cli.collector import OTHER_COLLECTOR, statuses_of, trouble_of
from agl_otel.errors import AglError
from agl_otel.proxy.upstream import OWN
from agl_otel.queue.client import AttemptUpdate, RolloutUpdate
from agl_otel.queue.lifecycle import OPEN
from agl_otel.runner.agents import CommandAgent
from agl_otel.runner.job import Grader
from agl_otel.runner.process import run_runner
from agl_otel.runner.runner import new_worker_id
from agl_otel.settings import PRIVATE, Settings
from agl_otel.stack.sharing import store_for
from agl_otel.stack.supervisor import running_address
from agl_otel.store import Store
from agl_otel.traces.collector_client import open_session
from agl_otel.types import LLM, TRIAL, TRIALS, AttemptedRollout, EnqueueRolloutRequest, RolloutConfig, Span
from agl_otel.types.columns import Traces
from agl_otel.types.rollouts import UNRESPONSIVE_SECONDS

_log = logging.getLogger(__name__)
DEFAULT_UPSTREAM: Final = "https://api.openai.com/v1"  # the default of OpenAI's client
HEALTH_SECONDS: Final = 5.0
NOT_BEGUN: Final = "the run was interrupted before the agent had started"


@dataclass(frozen=True)
class FinishedAttempt:
    """One attempt with its stored traces and spans."""

    rollout: AttemptedRollout
    traces: Traces
    spans: list[Span]
    printed: str = ""
    """What the agent printed, both streams."""
    graded: bool = False
    """Whether a grader gave the reward."""
    packages: Mapping[str, str] = field(default_factory=dict[str, str])
    """{name: version} in the agent's interpreter, where they are known."""
    unknown_paths: Mapping[str, int] = field(default_factory=dict[str, int])
    """{path below its address: requests} that it sent to the proxy, which does not have them."""


@contextlib.asynccontextmanager
async def run_once(
    settings: Settings,
    command: Sequence[str],
    *,
    by: str,
    task: Any,
    timeout_seconds: float | None,
    grader: Grader | None = None,
    inject: bool = False,
) -> AsyncGenerator[tuple[Store, FinishedAttempt]]:
    """Run `command` as one attempt of a new rollout, a trial `by` this command, and read back its spans.

    A temporary stack lives as long as the context.

    The rollout is started without being queued, so no other runner claims it. The agent's model calls go through the proxy to
    OPENAI_BASE_URL, else to the models of the running stack, else to OpenAI: the rollout has resources of its own for this, which never
    become the latest ones. OPENAI_API_KEY stays in the environment of this command and its proxy. A temporary stack stores everything
    in the data directory, never in configured servers, where other stacks' runners could claim the rollout.

    Raises UsageError if the command cannot be started, UnavailableError if the stack cannot.
    """
    given = os.environ.get("OPENAI_BASE_URL", "")
    upstream = given or settings.upstream_url or DEFAULT_UPSTREAM
    agent = CommandAgent(command, grader=grader, inject=inject)
    agent.check(task)
    key = SecretStr(os.environ.get("OPENAI_API_KEY", "")) if not settings.upstream_key.get_secret_value() else settings.upstream_key
    settings = _private(settings)
    async with store_for(settings.model_copy(update={"upstream_url": upstream, "upstream_key": key})) as (store, _):
        await warn_of_degraded_collectors(store, settings)
        model = LLM(endpoint=given or OWN, model=os.environ.get("OPENAI_MODEL", ""))
        resources = await store.queue.put_resources({"main_llm": model}, aside=True)
        config = RolloutConfig(timeout_seconds=timeout_seconds, unresponsive_seconds=UNRESPONSIVE_SECONDS)
        metadata = {TRIAL: by, "run": TRIALS}
        request = EnqueueRolloutRequest(input=task, mode="test", resources_id=resources.resources_id, config=config, metadata=metadata)
        rollout = await _run(store, agent, request, settings)
        traces = await store.traces([rollout])
        spans, printed, unknown_paths = await asyncio.gather(
            store.spans(rollout.rollout_id), store.reader.printed(rollout.rollout_id), _unknown_paths(store, rollout, settings)
        )
        graded = grader is not None
        yield store, FinishedAttempt(rollout, traces, spans, "\n".join(printed.values()), graded=graded, unknown_paths=unknown_paths)


async def warn_of_degraded_collectors(store: Store, settings: Settings) -> None:
    """Warn of collectors that may take nothing in: the attempt would wait for its spans without a word."""
    for status in await statuses_of(store, settings.token.get_secret_value()):
        trouble = status["error"] if "error" in status else trouble_of(status)
        if trouble and trouble != OTHER_COLLECTOR:
            _log.warning("the collector at %s is degraded, so spans may come late or not at all: %s", status["address"], trouble)


async def _unknown_paths(store: Store, rollout: AttemptedRollout, settings: Settings) -> Counter[str]:
    """Ask each proxy for the unknown paths of the attempt. One that does not answer adds none."""
    key, found = f"{rollout.rollout_id}/{rollout.attempt.attempt_id}", Counter[str]()
    async with open_session(settings.token.get_secret_value(), timeout=aiohttp.ClientTimeout(total=HEALTH_SECONDS)) as session:
        for address in (await store.queue.describe()).proxies:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                async with session.get(f"{address}/health") as answer:
                    found.update((await answer.json()).get("unknown_paths", {}).get(key, {}))
    return found


async def _run(store: Store, agent: CommandAgent, request: EnqueueRolloutRequest, settings: Settings) -> AttemptedRollout:
    """Start the rollout directly on a dedicated runner; return the finished rollout.

    If the caller is cancelled, the rollout is, too: CancelledError then has a message of what became of it.
    """
    worker_id, stop, agent_started = new_worker_id(), asyncio.Event(), asyncio.Event()
    begun: asyncio.Future[list[AttemptedRollout]] | None = None

    async def claim(_: int) -> list[AttemptedRollout]:
        nonlocal begun
        begun = asyncio.ensure_future(store.queue.start([request], worker_id=worker_id))
        try:
            return await asyncio.shield(begun)  # an interrupt must know whether there is a rollout
        except AglError:
            stop.set()
            return []

    alone = settings.model_copy(update={"runner_metrics_port": 0})  # a permanent runner may use that port
    running = asyncio.ensure_future(
        run_runner(
            agent, store=store.description.queue, max_rollouts=1, worker_id=worker_id, stop=stop, claim=claim, settings=alone,
            grace_seconds=0.0, on_event=lambda _: agent_started.set(),
        )
    )  # fmt: skip
    try:
        await asyncio.shield(running)
        assert begun is not None, "the runner has claimed"
        [rollout] = await begun
    except asyncio.CancelledError:
        if agent_started.is_set():
            stop.set()  # ends the agent, and completes its attempt as at any end
        else:
            running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        raise asyncio.CancelledError(*([await _cancel(store, begun)] if begun is not None else [])) from None
    (finished,) = await store.wait([rollout.rollout_id])
    assert isinstance(finished, AttemptedRollout), "a rollout that was run has an attempt"
    return finished


async def _cancel(store: Store, begun: asyncio.Future[list[AttemptedRollout]]) -> str:
    """Cancel the rollout of an interrupted run unless it has succeeded; return what became of it."""
    rollout_id = "that was about to start"
    try:
        [rollout] = await begun
        rollout_id = rollout.rollout_id
        for found in await store.queue.query_rollouts(rollout_id_in=[rollout_id], status_in=["succeeded"]):
            return f"rollout {found.rollout_id} had succeeded"
        for attempt in await store.queue.query_attempts([rollout_id]):
            if attempt.status in OPEN:
                ended = AttemptUpdate(rollout_id=rollout_id, attempt_id=attempt.attempt_id, status="failed", error=NOT_BEGUN)
                await store.queue.update_attempts([ended])
        await store.queue.update_rollouts([RolloutUpdate(rollout_id=rollout_id, status="cancelled")])
    except AglError as error:
        return f"rollout {rollout_id} could not be cancelled: {error}"
    return f"rollout {rollout_id} is cancelled"


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
