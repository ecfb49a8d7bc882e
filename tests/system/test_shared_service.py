"""An HTTP service under the hook that many attempts share, on a stack with a token: it writes only into attempts given to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agl_otel.settings import PORTS, Settings
from agl_otel.stack.supervisor import Stack
from agl_otel.store import Store
from agl_otel.types import EnqueueRolloutRequest
from agl_otel_hook import conventions
from agl_otel_hook.conventions import BOUND_PREFIX
from tests.clickhouse_server import ClickHouseServer
from tests.system.otelcol_process import binary

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
TOKEN = "the-stacks-own-token"
VICTIM = {conventions.ROLLOUT_ID: "ro-victim", conventions.ATTEMPT_ID: "at-victim"}
SERVICE = f"""
import json, logging, sys, urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from opentelemetry import context, propagate, trace
from opentelemetry.instrumentation.propagators import get_global_response_propagator

tracer = trace.get_tracer("service")

class Service(BaseHTTPRequestHandler):
    def do_POST(self):
        task, answer = json.loads(self.rfile.read(int(self.headers["content-length"]))), {{}}
        token = context.attach(propagate.extract(dict(self.headers)))  # what the instrumentation of a web framework does
        with tracer.start_as_current_span("solve"):
            logging.getLogger("service").warning("thinking about %s", task["question"])
            tracer.start_span("forged", attributes={VICTIM!r}).end()
            sent = {{}}
            propagate.inject(sent)  # what the instrumentation of an HTTP client does
            urllib.request.urlopen(urllib.request.Request(sys.argv[1], headers=sent)).close()
            get_global_response_propagator().inject(answer)
        context.detach(token)
        self.send_response(200)
        for name, value in {{**answer, "content-type": "application/json"}}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(b"0.5")

server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
print(server.server_port, flush=True)
server.serve_forever()
"""


class ThirdParty:
    """A server that the service calls; it keeps the request headers."""

    def __init__(self) -> None:
        self.headers: list[dict[str, str]] = []
        app = web.Application()
        app.router.add_get("/", self._handle)
        self.server = TestServer(app)

    async def _handle(self, request: web.Request) -> web.Response:
        self.headers.append(dict(request.headers))
        return web.Response()


@pytest.fixture(params=["python", "otelcol"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    with contextlib.ExitStack() as resources:
        body = {}
        if request.param == "otelcol":
            body = {"collector": str(binary()), "clickhouse_url": resources.enter_context(ClickHouseServer(tmp_path / "server")).url()}
        settings = Settings.load(data_dir=tmp_path / "data", token=TOKEN, **body, **dict.fromkeys(PORTS, 0))
        async with Stack(settings, only=("queue", "sql", "collector")) as stack, await Store.connect(stack.address, token=TOKEN) as store:
            async with asyncio.timeout(300):
                while not store.description.collectors:
                    store.description = await store.queue.describe()
                    await asyncio.sleep(0.05)
            yield store


async def until(ask: Callable[[], Awaitable[list[dict[str, Any]]]], rows: int) -> list[dict[str, Any]]:
    """Repeat `ask` until it returns enough rows."""
    async with asyncio.timeout(120):
        while len(found := await ask()) < rows:  # noqa: ASYNC110 - the condition is in another process
            await asyncio.sleep(0.1)
        return found


async def answered(*command: object, **environment: str) -> asyncio.subprocess.Process:
    """Start a process without variables of the stack in its environment."""
    given = {name: value for name, value in os.environ.items() if not name.startswith(("AGL_", "OTEL_"))}
    return await asyncio.create_subprocess_exec(*map(str, command), env={**given, **environment}, stdout=asyncio.subprocess.PIPE)


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
async def test_a_shared_service_under_the_hook_writes_only_into_attempts_given_to_it(store: Store, protocol: str) -> None:
    third = ThirdParty()
    await third.server.start_server()
    described = store.description
    endpoint = f"http://{described.collector_grpc}" if protocol == "grpc" else described.collector_http
    assert endpoint is not None and described.queue is not None
    telemetry = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL": protocol, "OTEL_TRACES_EXPORTER": "otlp",
        "OTEL_LOGS_EXPORTER": "otlp", "OTEL_METRICS_EXPORTER": "none", "OTEL_PYTHON_LOGGING_AUTO_INSTRUMENTATION_ENABLED": "true",
        "OTEL_BLRP_SCHEDULE_DELAY": "100",
    }  # fmt: skip
    instrument = Path(sys.executable).with_name("opentelemetry-instrument")
    service = await answered(instrument, sys.executable, "-W", "ignore", "-c", SERVICE, third.server.make_url("/"), **telemetry)
    processes = [service]
    try:
        assert service.stdout is not None
        async with asyncio.timeout(300):
            url = f"http://127.0.0.1:{int(await service.stdout.readline())}/"
        rollouts = await store.enqueue([EnqueueRolloutRequest(input={"question": each}) for each in "abcd"])
        unauthorized = urllib.request.Request(  # a client that was given no attempt
            url, data=b'{"question": "?"}', headers={"baggage": ",".join(f"{name}={value}" for name, value in VICTIM.items())}
        )
        with await asyncio.to_thread(urllib.request.urlopen, unauthorized, timeout=60) as answer:
            assert answer.status == 200
        runner = [sys.executable, "-m", "agl_otel.runner", "--url", url, "--hooked", "--max-rollouts", len(rollouts)]
        processes.append(await answered(*runner, AGL_STORE=described.queue, AGL_TOKEN=TOKEN))
        assert len(await store.wait([each.rollout_id for each in rollouts], timeout_seconds=300)) == len(rollouts)
        traces = await store.traces(rollouts, deadline_seconds=60)
        assert [verdict.kind for verdict in traces.verdicts.values()] == ["complete"] * len(rollouts), traces.verdicts
        rows = await store.reader.query("SELECT RolloutId, SpanName FROM otel_traces WHERE SpanName IN ('solve', 'forged')")
        assert sorted((row["RolloutId"], row["SpanName"]) for row in rows) == sorted((each.rollout_id, "solve") for each in rollouts)
        logs = await until(lambda: store.reader.query("SELECT RolloutId FROM otel_logs WHERE Body LIKE 'thinking%'"), len(rollouts))
        assert {row["RolloutId"] for row in logs} == {each.rollout_id for each in rollouts}
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()
        await third.server.close()
    assert len(third.headers) == len(rollouts) + 1 and any("baggage" in headers for headers in third.headers)
    assert BOUND_PREFIX not in unquote(json.dumps(third.headers)), "no key goes on to others"
