"""Run a runner as a process: connect to a stack, run, and stop cleanly on SIGTERM or Ctrl+C. `agl-otel runner` calls this."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NoReturn, TypeVar

from agl_otel.errors import UnavailableError, UsageError
from agl_otel.net.tls import ambient
from agl_otel.queue.client import QueueClient
from agl_otel.runner import groups, threads
from agl_otel.runner.certificates import certificates
from agl_otel.runner.completion import retry_unavailable
from agl_otel.runner.environment import Addresses, shared_environment
from agl_otel.runner.job import Agent
from agl_otel.runner.metrics import RunnerMeters
from agl_otel.runner.runner import FIND_STACK_SECONDS, GRACE_SECONDS, HEARTBEAT_SECONDS, Claim, Runner
from agl_otel.runner.running import RunnerEvent
from agl_otel.service.main import on_stop_signals
from agl_otel.settings import Settings
from agl_otel.store import Store
from agl_otel.telemetry.reporting import served
from agl_otel.telemetry.setup import Telemetry
from agl_otel.types import RolloutMode

SERVICE_NAME: Final = "agl-runner"
PROXY_SECONDS: Final = 5.0  # longest wait for a proxy that may be starting
_CHECKED_TASKS: Final = 100  # limit on waiting rollouts that are checked
_log = logging.getLogger(__name__)
T = TypeVar("T")


async def run_runner(
    agent: Agent | Callable[[], Agent],
    *,
    store: str = "",
    token: str = "",
    concurrency: int = 8,
    max_rollouts: int | None = None,
    modes: Sequence[RolloutMode] = (),
    labels: Mapping[str, str] | None = None,
    worker_id: str | None = None,
    heartbeat_seconds: float = HEARTBEAT_SECONDS,
    grace_seconds: float = GRACE_SECONDS,
    timeout_seconds: float | None = None,
    on_event: Callable[[RunnerEvent], None] | None = None,
    stop: asyncio.Event | None = None,
    claim: Claim | None = None,
    settings: Settings | None = None,
) -> Counter[str]:
    """Run `agent` until stopped. Return Runner.counts, which are empty if it was stopped before a stack was found.

    Args:
        agent: an agent, or a factory that is called once this process's environment names the stack, so that user code which builds
            its clients at import time finds the proxy.
        store: address of the stack; empty: AGL_STORE, else the queue of the settings.
        stop: ends the run when set; None: SIGTERM and SIGINT stop it cleanly, a second one immediately.
        claim: see Runner; with it the queue's waiting rollouts are not checked either.
        settings: None: as this process loads them.
        The others: see Runner.

    Raises UsageError if rollouts wait and this agent can run none of them, UnavailableError if no stack answers.
    """
    settings = settings or Settings.load()
    token = token or settings.token.get_secret_value()
    address = store or settings.queue_address
    if stop is None:
        stop = asyncio.Event()
        stop_on_signals(stop)
    async with _connected(address, token, stop) as found:
        if found is None:
            return Counter()
        connected, addresses = found
        if not isinstance(agent, Agent):
            os.environ.update(shared_environment(os.environ, addresses, token=token))
            agent = agent()
        if claim is None:
            await check_waiting_tasks(agent, connected.queue, modes, labels)
        telemetry = _start_telemetry(addresses, token, agent)
        threads.keep_process()
        meters = RunnerMeters(on_event)
        runner = Runner(
            connected.queue, telemetry, agent, concurrency=concurrency, worker_id=worker_id, heartbeat_seconds=heartbeat_seconds,
            modes=modes, labels=labels, max_rollouts=max_rollouts, on_event=meters.record, token=token, grace_seconds=grace_seconds,
            timeout_seconds=timeout_seconds, claim=claim,
        )  # fmt: skip
        _log.info("runner %s: concurrency %d, store %s", runner.worker_id, concurrency, address)
        try:
            async with served(meters.meters, settings, "runner", settings.runner_metrics_port, "AGL_RUNNER_METRICS_PORT"):
                return await runner.run(stop)
        finally:
            await asyncio.to_thread(telemetry.shutdown)


def _start_telemetry(addresses: Addresses, token: str, agent: Agent) -> Telemetry:
    return Telemetry.start(
        otlp_endpoint=addresses.collector_grpc,
        otlp_http=addresses.collector_http,
        token=token,
        service_name=SERVICE_NAME,
        instrument=agent.instrument,
    )


@asynccontextmanager
async def _connected(address: str, token: str, stop: asyncio.Event) -> AsyncGenerator[tuple[Store, Addresses] | None]:
    """Find the stack and yield a store connected to it with its addresses; yield None if `stop` is set first."""
    _log.info("looking for the stack at %s, for up to %d s", address, FIND_STACK_SECONDS)
    store = await _unless_stopped(stop, retry_unavailable(lambda: Store.connect(address, token=token), seconds=FIND_STACK_SECONDS))
    if store is None:
        yield None
        return
    async with store:
        addresses = await _unless_stopped(stop, find_stack(store.queue))
        yield (store, addresses) if addresses is not None else None


async def _unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Await `work`; if `stop` is set first, cancel it and return None."""
    task, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        stopping.cancel()
        await asyncio.gather(task, stopping, return_exceptions=True)


async def check_waiting_tasks(
    agent: Agent, queue: QueueClient, modes: Sequence[RolloutMode], labels: Mapping[str, str] | None = None
) -> None:
    """Raise UsageError if rollouts wait and this agent can run none of them."""
    waiting = await queue.query_rollouts(status_in=["queuing", "requeuing"], mode_in=list(modes) or None, limit=_CHECKED_TASKS)
    problem: UsageError | None = None
    required = (labels or {}).items()
    for rollout in (rollout for rollout in waiting if required <= (rollout.labels or {}).items()):
        try:
            return agent.check(rollout.input)
        except UsageError as error:
            problem = problem or error
    if problem is not None:
        raise problem
    return None


def stop_on_signals(stop: asyncio.Event) -> None:
    """Set `stop` on the first SIGTERM or SIGINT; on the second, kill all agents and exit."""

    def first(number: signal.Signals) -> None:
        _log.info("%s: stopping, once no attempt is running; a second signal kills them", number.name)
        stop.set()

    def again(number: signal.Signals) -> NoReturn:
        groups.kill_all()
        os._exit(128 + number)

    on_stop_signals(first, again)


async def find_stack(queue: QueueClient) -> Addresses:
    """Ask the queue for the stack's addresses; wait up to PROXY_SECONDS for a proxy, which is optional.

    Raises UnavailableError if there is no collector within FIND_STACK_SECONDS.
    """

    async def found() -> Addresses:
        addresses = Addresses.of(await queue.describe(), certificates(ambient()))
        if addresses is None:
            raise UnavailableError("the stack has no collector: start it with `agl-otel up`")
        return addresses

    async def with_proxy() -> Addresses:
        addresses = await found()
        if addresses.proxy is None:
            raise UnavailableError("the stack has no proxy")
        return addresses

    try:
        return await retry_unavailable(with_proxy, seconds=PROXY_SECONDS)
    except UnavailableError:
        return await retry_unavailable(found, seconds=FIND_STACK_SECONDS)
