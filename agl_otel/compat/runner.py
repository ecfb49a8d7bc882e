"""LitAgentRunner, with 0.3's run_context, iter and step, over agl_otel.runner.

0.3's behaviour around an attempt (hooks, the tracer's context, the allowed return values) is one kind of Agent (runner/job.py); claims,
resources, heartbeats, seals and completion belong to runner/runner.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

from opentelemetry.sdk.trace import ReadableSpan

from agl_otel.compat.litagent import LitAgent, as_agent
from agl_otel.compat.stores import LightningStore
from agl_otel.compat.tracer import Route, Tracer, process_telemetry
from agl_otel.errors import AgentError, UnavailableError
from agl_otel.runner.completion import retry_unavailable
from agl_otel.runner.environment import Addresses, agent_resources, first_llm, without_keys
from agl_otel.runner.job import Job
from agl_otel.runner.runner import CLAIM_WAIT_SECONDS, FIND_STACK_SECONDS
from agl_otel.runner.runner import Runner as QueueRunner
from agl_otel.runner.snapshot import SystemSnapshot
from agl_otel.runner.threads import call
from agl_otel.spans.emitted import find_final_reward, find_reward_spans, get_reward_value
from agl_otel.store import Store
from agl_otel.types import (
    AttemptedRollout,
    Hook,
    NamedResources,
    ParallelWorkerBase,
    ProxyLLM,
    Rollout,
    RolloutMode,
    Span,
    SpanCoreFields,
    TaskInput,
)
from agl_otel_hook import attempt_scope
from agl_otel_hook.emit import emit_reward
from agl_otel_hook.emit.emitters import as_number

T = TypeVar("T")
EVENT_POLL_SECONDS: Final = 0.1  # events of threads and processes cannot be awaited
PROGRESS_EVERY: Final = 10
_log = logging.getLogger("agl_otel.runner")


class Event(Protocol):
    """A stop event: asyncio's, threading's, multiprocessing's, or an ExecutionEvent."""

    def is_set(self) -> bool:
        """Return whether the runner should stop."""
        ...


class Runner(ParallelWorkerBase, Generic[T]):
    """Base of runners: `iter` runs rollouts until it is stopped, `step` runs one task."""

    def init(self, agent: Any, *args: Any, hooks: Sequence[Hook] | None = None, **kwargs: Any) -> None:
        """Set the agent and hooks, in the main process."""

    def init_worker(self, worker_id: int | None, store: Store, *args: Any, **kwargs: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  # 0.3's signature
        """Set the store, in the worker."""

    async def iter(self, *, event: Event | None = None) -> None:
        """Run rollouts from the queue until `event` is set."""
        raise NotImplementedError(f"{type(self).__name__} gives no iter")

    async def step(
        self,
        input: T,  # noqa: A002 - the name that 0.3's callers use
        *,
        resources: NamedResources | None = None,
        mode: RolloutMode | None = None,
        event: Event | None = None,
    ) -> Rollout:
        """Run one task; return its finished rollout."""
        raise NotImplementedError(f"{type(self).__name__} gives no step")

    @contextlib.contextmanager
    def run_context(
        self, *, agent: Any, store: Store, hooks: Sequence[Hook] | None = None, worker_id: int | None = None
    ) -> Generator[Runner[T]]:
        """Set the runner up for `agent` and `store` within the context."""
        self.init(agent, hooks=hooks)
        try:
            self.init_worker(worker_id, store)
            try:
                yield self
            finally:
                self.teardown_worker(0 if worker_id is None else worker_id)
        finally:
            self.teardown()


class LitAgentRunner(Runner[T]):
    """Runs a LitAgent (or a function) for rollouts of a store, one at a time.

    Args:
        tracer: records the agent's spans.
        max_rollouts: `iter` ends after so many; None: no limit.
        poll_interval: ignored: the queue notifies a waiting runner.
        heartbeat_interval: seconds; 0 or below: no heartbeats.
        interval_jitter: random variation of the heartbeat interval, in seconds.
        heartbeat_launch_mode: takes the machine's snapshot in a thread ("thread") or in the event loop ("asyncio").
        heartbeat_include_gpu: whether the snapshot includes GPUs (nvidia-smi).

    Raises ValueError for another launch mode.
    """

    def __init__(
        self,
        tracer: Tracer,
        max_rollouts: int | None = None,
        poll_interval: float = 5.0,
        heartbeat_interval: float = 10.0,
        interval_jitter: float = 0.5,
        heartbeat_launch_mode: str = "thread",
        heartbeat_include_gpu: bool = False,
    ) -> None:
        if heartbeat_launch_mode not in ("thread", "asyncio"):
            raise ValueError(f"heartbeat_launch_mode is {heartbeat_launch_mode!r}: use 'thread' or 'asyncio'")
        super().__init__()
        self._tracer = tracer
        self._max_rollouts = max_rollouts
        self._heartbeat_seconds, self._jitter_seconds = heartbeat_interval, interval_jitter
        self._snapshot_in_thread, self._snapshot = heartbeat_launch_mode == "thread", SystemSnapshot(gpu=heartbeat_include_gpu)
        self._warned = False
        self._agent: LitAgent[Any] | None = None
        self._store: LightningStore | None = None
        self._hooks: list[Hook] = []

    # --- agent, store and tracer

    @property
    def tracer(self) -> Tracer:
        """The runner's tracer."""
        return self._tracer

    def init(self, agent: Any, *args: Any, hooks: Sequence[Hook] | None = None, **kwargs: Any) -> None:
        """Set the agent (a LitAgent, or a function of a task) and the hooks."""
        self._agent = as_agent(agent)
        self._agent.set_runner(self)
        self._hooks = list(hooks or ())
        self._tracer.init()

    def init_worker(self, worker_id: int | None, store: Store, *args: Any, **kwargs: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  # 0.3's signature
        """Set the store. Without a worker id no heartbeats are sent."""
        self.worker_id = worker_id
        self._store = LightningStore.over(store)
        self._tracer.init_worker(0 if worker_id is None else worker_id, self._store)

    def teardown_worker(self, worker_id: int, *args: Any, **kwargs: Any) -> None:
        """Release the store."""
        self._store = None
        self.worker_id = None
        self._tracer.teardown_worker(worker_id)

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        """Release the agent and hooks."""
        self._agent = None
        self._hooks = []
        self._tracer.teardown()

    def get_agent(self) -> LitAgent[T]:
        """Return the agent. Raises ValueError before `init`."""
        if self._agent is None:
            raise ValueError("the runner has no agent: use `with runner.run_context(agent=…, store=…)`")
        return self._agent

    def get_store(self) -> LightningStore:
        """Return the store. Raises ValueError before `init_worker`."""
        if self._store is None:
            raise ValueError("the runner has no store: use `with runner.run_context(agent=…, store=…)`")
        return self._store

    def get_worker_id(self) -> str:
        """Return the worker id under which the store knows the runner."""
        return "Worker-Unknown" if self.worker_id is None else f"Worker-{self.worker_id}"

    # --- running rollouts

    async def iter(self, *, event: Event | None = None) -> None:
        """Run rollouts from the queue until `event` is set or `max_rollouts` are done. Failed rollouts do not stop it."""
        await self._run(_Attempts(self), event, max_rollouts=self._max_rollouts)

    async def step(
        self,
        input: TaskInput,  # noqa: A002 - the name that 0.3's callers use
        *,
        resources: NamedResources | None = None,
        mode: RolloutMode | None = None,
        event: Event | None = None,
    ) -> Rollout:
        """Run one task as a rollout that is never queued; return the finished rollout. Raises the agent's error."""
        store = self.get_store()
        resources_id = (await store.add_resources(resources)).resources_id if resources else None
        started = await store.start_rollout(input, mode, resources_id, worker_id=None if self.worker_id is None else self.get_worker_id())
        attempts = _Attempts(self)

        async def claim(_: int) -> list[AttemptedRollout]:
            return [started]

        await self._run(attempts, event, max_rollouts=1, claim=claim)
        if attempts.error is not None:
            raise attempts.error
        finished = await store.get_rollout_by_id(started.rollout_id)
        assert finished is not None, "it was started above"
        return finished

    async def _run(
        self,
        attempts: _Attempts,
        event: Event | None,
        *,
        max_rollouts: int | None,
        claim: Callable[[int], Awaitable[list[AttemptedRollout]]] | None = None,
    ) -> None:
        store = await self.get_store().open()
        attempts.prepare(await retry_unavailable(lambda: _find_stack(store), seconds=FIND_STACK_SECONDS))
        telemetry = process_telemetry()
        heartbeat_seconds = self._heartbeat_seconds
        if self.worker_id is None and heartbeat_seconds > 0:
            if not self._warned:
                _log.warning("the runner has no worker id, so it sends no heartbeats: give run_context(worker_id=…)")
                self._warned = True
            heartbeat_seconds = 0.0
        worker = None if self.worker_id is None else self.get_worker_id()

        async def claim_next(limit: int) -> list[AttemptedRollout]:
            return await store.queue.claim(limit, worker_id=worker, wait_seconds=CLAIM_WAIT_SECONDS, labels=store.labels)

        async def claim_routed(limit: int) -> list[AttemptedRollout]:
            claimed = await (claim or claim_next)(limit)
            telemetry.routes.add([(r.rollout_id, r.attempt.attempt_id) for r in claimed], attempts.route)
            return claimed

        runner = QueueRunner(
            store.queue, telemetry, attempts, concurrency=1, worker_id=worker, heartbeat_seconds=heartbeat_seconds,
            heartbeat_jitter_seconds=self._jitter_seconds, snapshot=self._snapshot, snapshot_in_thread=self._snapshot_in_thread,
            max_rollouts=max_rollouts, token=store.token, claim=claim_routed,
        )  # fmt: skip
        stop = asyncio.Event()
        watcher = asyncio.create_task(_follow(event, stop))
        try:
            await runner.run(stop)
        finally:
            watcher.cancel()


class _Attempts:
    """Adapts a LitAgent to runner/runner.py's Agent: hooks, tracer context and return values."""

    instrument: tuple[str, ...] = ()  # the tracer enables instrumentations

    def __init__(self, runner: LitAgentRunner[Any]) -> None:
        self._runner = runner
        self._agent: LitAgent[Any] = runner.get_agent()
        self._store = runner.get_store()
        self._hooks: list[Hook] = list(runner._hooks)  # pyright: ignore[reportPrivateUsage]  # a helper of LitAgentRunner
        self._tracer = runner.tracer
        self.hooked = self._tracer.hooked
        self.route = Route("", self._store.token)
        """Destination of its attempts' spans."""
        self.error: BaseException | None = None
        """The error of the latest attempt; None if it succeeded."""
        self._done = 0

    def prepare(self, addresses: Addresses) -> None:
        """Set the stack's addresses. The process environment is not changed, because the algorithm may run in this process."""
        self.route.endpoint, self.route.http = addresses.collector_grpc, addresses.collector_http

    def check(self, task: Any) -> None:
        """Accept any task."""

    async def run(self, job: Job) -> None:
        """Run one attempt. Raises AgentError if the agent fails or returns an invalid value."""
        rollout, began = job.rollout, time.monotonic()
        self.error = None
        around: dict[str, Any] = {"agent": self._agent, "runner": self._runner, "rollout": rollout}
        spans: list[Any] = []
        try:
            await self._hook("on_rollout_start", **around)
            with attempt_scope(*job.key, traceparent=job.traceparent):
                async with self._tracer.trace_context(
                    name=rollout.rollout_id, store=self._store, rollout_id=rollout.rollout_id, attempt_id=rollout.attempt.attempt_id
                ):
                    await self._hook("on_trace_start", **around, tracer=self._tracer)
                    answer = await call(self._agent.method_for(rollout), rollout.input, _resources(job), rollout)
                    await self._hook("on_trace_end", **around, tracer=self._tracer)
                spans = list(self._tracer.get_last_trace())
                spans = await self._result(answer, spans, job)
        except Exception as error:  # the boundary to the user's code: its error is data about this attempt
            self.error = error
            _log.error("[Rollout %s] failed", rollout.rollout_id, exc_info=error)
            raise AgentError(f"{type(error).__name__}: {error}") from error
        finally:
            await self._hook("on_rollout_end", **around, spans=spans)
            self._done += 1
        reward = find_final_reward(spans)
        _log.info(
            "[Rollout %s] Completed in %.2fs. Collected %d span(s). Final reward: %s",
            rollout.rollout_id, time.monotonic() - began, len(spans), reward,
        )  # fmt: skip
        if self._done % PROGRESS_EVERY == 0:
            _log.info("%s: %d rollouts done", self._runner.get_worker_id(), self._done)

    async def _hook(self, name: str, **given: Any) -> None:
        for hook in self._hooks:
            try:
                await getattr(hook, name)(**given)
            except Exception:  # noqa: BLE001 - the boundary to the user's hooks, which must not fail a rollout
                _log.exception("hook %s.%s failed", type(hook).__name__, name)

    async def _result(self, answer: Any, traced: list[Any], job: Job) -> list[Any]:
        """Store the reward or spans that the agent returned; return the attempt's spans."""
        if answer is None:
            return traced
        if (number := as_number(answer)) is not None:
            return self._reward(number, traced)
        if not isinstance(answer, (list, tuple)):
            raise TypeError(f"an agent returns None, a number or a list of spans, not a {type(answer).__name__}")
        return await self._spans(list(answer), job) or traced  # pyright: ignore[reportUnknownArgumentType]  # _spans checks the items

    def _reward(self, value: float, traced: list[Any]) -> list[Any]:
        if isinstance(value, bool) or not isinstance(value, float):
            _log.warning("the agent returned %r as its reward; it counts as %s: return a float", value, float(value))
        if not math.isfinite(value):
            raise ValueError(f"a reward must be finite, the agent returned {value}")
        emitted = find_reward_spans(traced)
        if emitted:
            _log.warning(
                "the agent returned the reward %s and emitted %s as well: emit it or return it. Equal values count once",
                value, [get_reward_value(span) for span in emitted],
            )  # fmt: skip
            if get_reward_value(emitted[-1]) == float(value):
                return traced
        return [*traced, emit_reward(float(value))]

    async def _spans(self, answer: list[Any], job: Job) -> list[Any]:
        if not answer:
            _log.warning("[Rollout %s] the agent returned an empty list of spans: return None to use the traced ones", job.rollout_id)
            return answer
        if all(isinstance(span, ReadableSpan) for span in answer):
            for span in answer:
                await self._store.add_otel_span(*job.key, span)
        elif all(isinstance(span, Span) for span in answer):
            await self._store.add_many_spans(answer)
        elif all(isinstance(span, SpanCoreFields) for span in answer):
            numbers = await self._store.get_many_span_sequence_ids([job.key] * len(answer))
            made = [
                Span.from_core_fields(core, rollout_id=job.rollout_id, attempt_id=job.attempt_id, sequence_id=number)
                for core, number in zip(answer, numbers, strict=True)
            ]
            await self._store.add_many_spans(made)
            return list(made)
        else:
            kinds = ", ".join(sorted({type(span).__name__ for span in answer}))
            raise ValueError(f"an agent returns spans of one kind (ReadableSpan, Span or SpanCoreFields), not a list of {kinds}")
        return answer


async def _find_stack(store: Store) -> Addresses:
    addresses = Addresses.of(await store.queue.describe())
    if addresses is None:
        raise UnavailableError("the stack has no collector: start it with `agl-otel store` or `agl-otel up`")
    return addresses


def _resources(job: Job) -> NamedResources:
    """Return the resources for the agent; a ProxyLLM stays one, with the proxy's address."""
    seen = agent_resources(job.resources, *job.key, job.addresses.proxy)
    first = first_llm(job.resources)
    for name, resource in job.resources.items():
        if resource is first and isinstance(resource, ProxyLLM) and job.addresses.proxy is not None:
            seen[name] = without_keys(resource).model_copy(update={"endpoint": f"{job.addresses.proxy}/v1"})
    return seen


async def _follow(event: Event | None, stop: asyncio.Event) -> None:
    """Set `stop` when `event` is."""
    if event is None:
        return
    if isinstance(event, asyncio.Event):
        await event.wait()
    while not event.is_set():  # noqa: ASYNC110 - set in another thread or process
        await asyncio.sleep(EVENT_POLL_SECONDS)
    stop.set()


__all__ = ["LitAgentRunner", "Runner"]
