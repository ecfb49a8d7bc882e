"""Runs a runner in the test's process, with a real queue, OTLP receivers and a fake of the proxy's close call."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse
from opentelemetry.proto.collector.logs.v1.logs_service_pb2_grpc import LogsServiceServicer, add_LogsServiceServicer_to_server
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceServicer, add_TraceServiceServicer_to_server

from agl_otel.queue.client import QueueClient
from agl_otel.queue.server import QueueServer, open_engine
from agl_otel.runner.job import Agent
from agl_otel.runner.runner import Runner
from agl_otel.runner.running import RunnerEvent
from agl_otel.telemetry.setup import Telemetry
from agl_otel.traces.verdict import AttemptFacts, MarkerFacts, decide
from agl_otel.types import Attempt, EnqueueRolloutRequest, NamedResources, Rollout, RolloutConfig, Verdict
from agl_otel_hook import conventions
from tests.otlp_receiver import OtlpReceiver, Received


@pytest.fixture(autouse=True)
def no_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable instrumentors for model calls, which these commands do not make: their imports dominate the start of a Python program."""
    monkeypatch.setenv("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "openai,langchain")


@pytest.fixture(scope="session")
def receiver() -> Iterator[OtlpReceiver]:
    receiver = OtlpReceiver()
    yield receiver
    receiver.close()


@pytest.fixture(scope="module")
def telemetry(receiver: OtlpReceiver) -> Iterator[Telemetry]:
    """Install the module's tracer provider, which emit_* uses."""
    telemetry = Telemetry.start(otlp_endpoint=receiver.grpc_address, service_name="test-runner")
    yield telemetry
    telemetry.shutdown()


class Logs(LogsServiceServicer):
    """Receives the output of agents: {attempt id: {stream: text}}."""

    def __init__(self) -> None:
        self.printed: dict[str, dict[str, str]] = {}

    async def Export(self, request: ExportLogsServiceRequest, context: object) -> ExportLogsServiceResponse:  # type: ignore[override]  # noqa: N802  # the generated base class is synchronous and names the method
        for resource_logs in request.resource_logs:
            for record in (record for scope in resource_logs.scope_logs for record in scope.log_records):
                attributes = {pair.key: pair.value.string_value for pair in record.attributes}
                streams = self.printed.setdefault(attributes[conventions.ATTEMPT_ID], {})
                streams[attributes[conventions.LOG_STREAM]] = streams.get(attributes[conventions.LOG_STREAM], "") + record.body.string_value
        return ExportLogsServiceResponse()


class Traces(TraceServiceServicer):
    """Passes spans that arrive on the logs' port to the receiver."""

    def __init__(self, receiver: OtlpReceiver) -> None:
        self._receiver = receiver
        self.refused = 0

    async def Export(self, request: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:  # type: ignore[override]  # noqa: N802  # the generated base class is synchronous and names the method
        await asyncio.to_thread(self._receiver.go.wait, 300)
        if self._receiver.refuse:
            self.refused += 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "told to refuse")
        self._receiver.take(request)
        return ExportTraceServiceResponse()


class Proxy:
    """Answers the proxy's close call with `spans` model calls for each attempt."""

    def __init__(self) -> None:
        self.closed: list[list[tuple[str, str]]] = []
        self.fail = 0
        self.spans = 2
        self.late = 0
        """Number of answers that omit their first attempt, as if a dead proxy's spans of it were not stored yet."""
        app = web.Application()
        app.router.add_post("/close", self._close)
        self.server = TestServer(app)

    async def _close(self, request: web.Request) -> web.Response:
        if self.fail:
            self.fail -= 1
            raise web.HTTPServiceUnavailable
        attempts = (await request.json())["attempts"]
        self.closed.append([(rollout_id, attempt_id) for rollout_id, attempt_id in attempts])
        counts: list[dict[str, int] | None] = [{"proxy-marker": self.spans} for _ in attempts]
        if self.late:
            self.late -= 1
            counts[0] = None
        return web.json_response({"counts": counts})


@dataclass
class Stack:
    """Everything a test needs to run a runner and to inspect the results."""

    queue: QueueClient
    receiver: OtlpReceiver
    telemetry: Telemetry
    logs: Logs
    proxy: Proxy
    server: QueueServer
    directory: Path
    traces: Traces
    events: list[RunnerEvent] = field(default_factory=list[RunnerEvent])
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    runner: Runner | None = None

    async def enqueue(self, *tasks: Any, resources: NamedResources | None = None, **config: Any) -> list[Rollout]:
        if resources:
            await self.queue.put_resources(resources)
        requests = [EnqueueRolloutRequest(input=task, config=RolloutConfig(**config)) for task in tasks]
        return await self.queue.enqueue(requests)

    async def run(self, agent: Agent, **options: Any) -> Counter[str]:
        """Run a runner until `stop` or `max_rollouts`; return its counts."""
        options = {"heartbeat_seconds": 0.05, "grace_seconds": 10.0, "worker_id": "worker", **options}
        self.runner = Runner(self.queue, self.telemetry, agent, on_event=self.events.append, **options)
        async with asyncio.timeout(300):
            return await self.runner.run(self.stop)

    @contextlib.asynccontextmanager
    async def running(self, agent: Agent, **options: Any) -> AsyncGenerator[asyncio.Task[Counter[str]]]:
        """Run a runner during the block."""
        task = asyncio.create_task(self.run(agent, **options))
        try:
            yield task
        finally:
            self.stop.set()
            await task

    async def finished(self, *rollouts: Rollout) -> list[Attempt]:
        """Wait until the rollouts have finished; return all their attempts."""
        ids = [rollout.rollout_id for rollout in rollouts]
        async for _ in self.queue.wait(ids, timeout_seconds=300):
            pass
        return sorted(await self.queue.query_attempts(ids), key=lambda attempt: (ids.index(attempt.rollout_id), attempt.sequence_id))

    def spans(self, rollout: Rollout, name: str | None = None) -> list[Received]:
        return [span for span in self.receiver.spans(name) if span.key[0] == rollout.rollout_id]

    def verdict(self, attempt: Attempt) -> Verdict:
        """Return a reader's verdict on the received spans and the runner's report to the queue."""
        key = (attempt.rollout_id, attempt.attempt_id)
        spans = {span.span_id: span for span in self.receiver.spans() if span.key == key}.values()
        markers: dict[str, MarkerFacts] = {}
        for span in spans:
            if (marker := span.marker) is None:
                continue
            seen = markers.setdefault(marker, MarkerFacts())
            if span.name == conventions.SPAN_SEAL:
                if (count := span.attributes.get(conventions.SEAL_SPANS)) is not None:
                    closed = seen.closed or bool(span.attributes.get(conventions.SEAL_CLOSING))
                    sealed_at = max(seen.sealed_at, span.start / 1e9)
                    markers[marker] = replace(seen, seal=max(seen.seal or 0, count), closed=closed, sealed_at=sealed_at)
            elif not span.attributes.get(conventions.LATE):
                annotations = seen.annotations + (span.name == conventions.SPAN_ANNOTATION)
                markers[marker] = replace(seen, spans=seen.spans + 1, annotations=annotations)
        hooked = any(span.attributes.get(conventions.ATTEMPT_HOOKED) for span in spans if span.name == conventions.SPAN_ATTEMPT)
        unmarked = [span for span in spans if span.marker is None and span.name != conventions.SPAN_ATTEMPT]
        return decide(AttemptFacts(*key, attempt.seals, markers, len(unmarked), hooked=hooked, ledger=attempt.ledger))

    async def until(self, condition: Any) -> None:
        """Wait until `condition()` is true."""
        async with asyncio.timeout(300):
            while not condition():  # noqa: ASYNC110 - the condition depends on other processes and threads
                await asyncio.sleep(0.01)


@pytest.fixture
async def stack(tmp_path: Path, receiver: OtlpReceiver, telemetry: Telemetry) -> AsyncIterator[Stack]:
    server = QueueServer(open_engine(f"sqlite:///{tmp_path / 'queue.db'}"), sweep_seconds=0.05)
    address = await server.start("127.0.0.1", 0)
    logs, proxy, traces = Logs(), Proxy(), Traces(receiver)
    await proxy.server.start_server()
    log_server = grpc.aio.server()
    add_LogsServiceServicer_to_server(logs, log_server)
    add_TraceServiceServicer_to_server(traces, log_server)
    logs_address = f"127.0.0.1:{log_server.add_insecure_port('127.0.0.1:0')}"
    await log_server.start()
    async with QueueClient(address) as queue:
        await queue.announce("collector", "c", {"collector_grpc": logs_address, "collector_http": receiver.http_url})
        await queue.announce("proxy", "p", {"proxy": str(proxy.server.make_url("")).rstrip("/")})
        stack = Stack(queue, receiver, telemetry, logs, proxy, server, tmp_path, traces)
        yield stack
    await log_server.stop(None)
    await proxy.server.close()
    await stack.server.stop(0)  # a test may have replaced `server`
