"""HTTP agents, and the command line of container agents."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agl_otel.errors import UsageError
from agl_otel.net.auth import attempt_ingest_key, attempt_key
from agl_otel.queue.client import RolloutUpdate
from agl_otel.runner.__main__ import event_line
from agl_otel.runner.agents import ContainerAgent, HttpAgent, Limits
from agl_otel.types import LLM, Answered, Attempt, Rollout
from agl_otel_hook import conventions
from agl_otel_hook.records import CONTAINER_ROOT, folder_of
from tests.contract.runner.conftest import Stack


class Service:
    """An agent's web service, which answers with `answer` and records requests."""

    def __init__(self) -> None:
        self.asked: list[tuple[dict[str, str], Any]] = []
        self.answer: Any = 0.5
        self.status = 200
        self.process = ""
        self.events: list[str] = []
        self.moved = ""
        self.hang = asyncio.Event()
        self.gone = asyncio.Event()
        app = web.Application()
        app.router.add_post("/solve/{name}", self._solve)
        self.server = TestServer(app)

    @property
    def url(self) -> str:
        return str(self.server.make_url("/solve/")) + "{name}"

    async def _solve(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((dict(request.headers), await request.json()))
        if self.moved and request.match_info["name"] != "eve":
            raise web.HTTPTemporaryRedirect(self.moved)
        if self.answer == "hang":
            try:
                await self.hang.wait()
            finally:
                self.gone.set()
        if not self.events:
            counts = {conventions.HEADER_PROCESS: self.process} if self.process else None
            return web.json_response(self.answer, status=self.status, headers=counts)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in self.events:
            await response.write(f"data: {event}\n\n".encode())
        return response


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    service = Service()
    await service.server.start_server()
    yield service
    service.hang.set()
    await service.server.close()


async def ask(stack: Stack, agent: HttpAgent) -> tuple[Rollout, Attempt]:
    [rollout] = await stack.enqueue({"name": "adam/eve", "n": 2}, resources={"main": LLM(endpoint="http://model/v1", model="m")})
    await stack.run(agent, max_rollouts=1)
    [attempt] = await stack.finished(rollout)
    return rollout, attempt


def rewards(stack: Stack, rollout: Rollout) -> list[Any]:
    return [span.attributes[conventions.reward_value_key(0)] for span in stack.spans(rollout, conventions.SPAN_ANNOTATION)]


async def test_a_request_carries_task_trace_and_ids_and_a_number_is_the_reward(stack: Stack, service: Service) -> None:
    rollout, attempt = await ask(stack, HttpAgent(service.url, headers={"authorization": "Bearer x"}))
    [(headers, task)] = service.asked
    headers = {name.lower(): value for name, value in headers.items()}
    [root] = stack.spans(rollout, conventions.SPAN_ATTEMPT)
    assert task == {"name": "adam/eve", "n": 2}
    assert headers["traceparent"] == f"00-{root.trace_id}-{root.span_id}-01"
    assert headers["baggage"] == f"agentlightning.rollout_id={rollout.rollout_id},agentlightning.attempt_id={attempt.attempt_id}"
    assert (headers["agl-rollout-id"], headers["agl-attempt-id"]) == (rollout.rollout_id, attempt.attempt_id)
    assert f"/rollout/{rollout.rollout_id}/attempt/{attempt.attempt_id}" in headers["agl-openai-base-url"]
    assert headers["authorization"] == "Bearer x"
    assert (attempt.status, rewards(stack, rollout)) == ("succeeded", [0.5])
    assert stack.logs.printed[attempt.attempt_id] == {"stdout": "0.5"}


@pytest.mark.parametrize(
    ("counts", "collected"),
    [("4;3", 4), ("999999999999999999;1", None), ("-4;-4", None), ("x;x", None), ("4", None)],
    ids=["credible", "beyond belief", "negative", "no number", "half"],
)
async def test_a_span_count_in_an_answer_is_used_if_plausible(stack: Stack, service: Service, counts: str, collected: int | None) -> None:
    service.process = f"0123456789abcdef;{counts}"
    rollout, _ = await ask(stack, HttpAgent(service.url))
    ended = stack.events[-1]
    made = None if collected is None else collected + len(rewards(stack, rollout)) + stack.proxy.spans
    assert (ended.spans, "Collected" in event_line(ended)) == (made, made is not None)


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (b"500 a\xff", b"x", "answers 500 a\ufffd: x"),
        (b"200 OK", b"9" * 400, "finite"),
        (b"200 OK", b'{"\\ud800":1.0,"b":-' + b"9" * 400 + b"}", "finite, got b=-inf"),
        (b"200 OK", b'{"\\ud800":1e999}', "finite, got \ufffd=inf"),
    ],
)
async def test_a_malformed_answer_fails_its_attempt_with_the_reason(stack: Stack, status: bytes, body: bytes, says: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        _, attempt = await ask(stack, HttpAgent(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"))
    assert attempt.status == "failed" and attempt.error is not None
    assert says in attempt.error and "could not complete" not in attempt.error and "Traceback" not in attempt.error


async def test_the_attempts_keys_are_not_sent_to_another_origin(stack: Stack, service: Service) -> None:
    agent = HttpAgent(service.url)
    sampling = {"extra_headers": {"X-Api-Key": "sk-theirs"}}
    llm = LLM(endpoint="http://u:sk-theirs@model/v1", model="m", api_key="sk-theirs", sampling_parameters=sampling)
    [rollout] = await stack.enqueue({"name": "adam"}, resources={"main": llm})
    await stack.run(agent, max_rollouts=1, token="secret")
    [attempt] = await stack.finished(rollout)
    [(headers, task)] = service.asked
    ids = rollout.rollout_id, attempt.attempt_id
    assert headers["agl-otlp-key"] == attempt_ingest_key("secret", *ids)
    assert headers["agl-openai-api-key"] == attempt_key("secret", *ids)
    assert "aglo-" not in headers["baggage"] and "sk-theirs" not in f"{headers}{task}"

    other = Service()
    await other.server.start_server()
    for place, status in ((str(service.server.make_url("/solve/eve")), "succeeded"), (str(other.server.make_url("/solve/eve")), "failed")):
        service.moved = place
        [rollout] = await stack.enqueue({"name": "adam"})
        await stack.run(HttpAgent(service.url), max_rollouts=1, token="secret")
        [attempt] = await stack.finished(rollout)
        assert attempt.status == status, attempt.error
    await other.server.close()
    assert "redirects to" in (attempt.error or "") and other.asked == []


async def test_a_streamed_answer_is_read_to_its_end_and_joined(stack: Stack, service: Service) -> None:
    chunks = [json.dumps({"choices": [{"delta": {"content": part}}]}) for part in ("fo", "ur")]
    service.events = [*chunks, "!", "[DONE]"]
    rollout, attempt = await ask(stack, HttpAgent(service.url, grader=lambda task, answer: float(answer == "four!")))
    assert (attempt.status, rewards(stack, rollout)) == ("succeeded", [1.0])


async def test_errors_missing_services_and_oversized_answers_fail_the_attempt(stack: Stack, service: Service) -> None:
    service.status, service.answer = 500, "out of luck"
    _, attempt = await ask(stack, HttpAgent(service.url))
    assert attempt.status == "failed" and 'answers 500 Internal Server Error: "out of luck"' in (attempt.error or "")
    service.status, service.answer = 200, "x" * 2000
    _, attempt = await ask(stack, HttpAgent(service.url, output_bytes=1000))
    assert attempt.status == "failed" and "more than 1000 bytes" in (attempt.error or "")
    away = HttpAgent(service.url)
    await service.server.close()
    _, attempt = await ask(stack, away)
    assert attempt.status == "failed" and "does not answer" in (attempt.error or "")


async def test_cancelling_a_rollout_drops_the_request(stack: Stack, service: Service) -> None:
    service.answer = "hang"
    [rollout] = await stack.enqueue({"name": "adam"})
    async with stack.running(HttpAgent(service.url)):
        await stack.until(lambda: service.asked)
        await stack.queue.update_rollouts([RolloutUpdate(rollout_id=rollout.rollout_id, status="cancelled")])
        async with asyncio.timeout(60):
            await service.gone.wait()


_SERVICE = """
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
import os, signal, threading
from opentelemetry import context, propagate, trace
from opentelemetry.instrumentation.propagators import get_global_response_propagator

class Service(BaseHTTPRequestHandler):
    def do_POST(self):
        task = self.rfile.read(int(self.headers["content-length"]))
        answer = {}
        token = context.attach(propagate.extract(dict(self.headers)))  # what the instrumentation of a web framework does
        with trace.get_tracer("service").start_as_current_span("solve"):
            get_global_response_propagator().inject(answer)
            if b"hang" in task:
                threading.Event().wait()
        context.detach(token)
        self.send_response(200)
        for name, value in (answer if b"silent" not in task else {}).items():
            self.send_header(name, value)
        if b"stream" not in task:
            self.send_header("content-length", "4")
        self.end_headers()
        self.wfile.write(b"done")
        if b"die" in task:
            self.wfile.flush()
            os.kill(os.getpid(), signal.SIGKILL)

server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
print(server.server_port, flush=True)
server.serve_forever()
"""


@contextlib.asynccontextmanager
async def hooked_service(stack: Stack) -> AsyncGenerator[tuple[str, asyncio.subprocess.Process]]:
    """Run a service under the hook; yield its address and its process."""
    environment = {
        **{name: value for name, value in os.environ.items() if name != conventions.ENV_LEDGER},  # without a ledger, as on another machine
        "OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{stack.receiver.grpc_address}",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
    }  # fmt: skip
    instrument = Path(sys.executable).with_name("opentelemetry-instrument")
    process = await asyncio.create_subprocess_exec(
        instrument, sys.executable, "-c", _SERVICE, env=environment, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(300):
            port = int(await process.stdout.readline())
        yield f"http://127.0.0.1:{port}/", process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


@pytest.mark.full
@pytest.mark.parametrize("task", ["whole", "stream", "silent"])
async def test_the_verdict_of_a_hooked_endpoint_follows_its_seal(stack: Stack, task: str) -> None:
    """The silent service reports no span count in its answer, so only its later seal proves that all spans arrived."""
    stack.proxy.spans = 0  # the service asks no model
    async with hooked_service(stack) as (url, _):
        [rollout] = await stack.enqueue(task)
        await stack.run(HttpAgent(url, hooked=True, grader=lambda task, answer: float(answer == "done")), max_rollouts=1)
        [attempt] = await stack.finished(rollout)
        await stack.until(lambda: any(seal.marker not in (attempt.seals or {}) for seal in stack.spans(rollout, conventions.SPAN_SEAL)))
    verdict = stack.verdict(attempt)
    assert (attempt.status, verdict.kind, verdict.alarm) == ("succeeded", "complete", False)
    assert attempt.ledger is not None and attempt.ledger.over is not None
    answered = [Answered(begun=1, streamed=task == "stream")] if task != "silent" else []
    assert [*attempt.ledger.answered.values()] == answered
    assert [span.marker is not None for span in stack.spans(rollout, "solve")] == [True]


@pytest.mark.full
async def test_an_endpoint_that_dies_after_its_answer_makes_the_attempt_incomplete(stack: Stack) -> None:
    stack.proxy.spans = 0
    async with hooked_service(stack) as (url, _):
        [rollout] = await stack.enqueue("die")
        await stack.run(HttpAgent(url, hooked=True, grader=lambda task, answer: float(answer == "done")), max_rollouts=1)
        [attempt] = await stack.finished(rollout)
    assert attempt.ledger is not None
    ((marker, answered),) = attempt.ledger.answered.items()
    verdict = stack.verdict(attempt)
    assert (attempt.status, answered.begun, verdict.kind) == ("succeeded", 1, "incomplete")
    assert any(marker in reason for reason in verdict.reasons), verdict.reasons


@pytest.mark.full
async def test_a_process_without_a_ledger_is_known_while_its_first_span_is_open(stack: Stack) -> None:
    """It announces itself, and so its attempt is incomplete if it is killed there."""
    stack.proxy.spans = 0
    async with hooked_service(stack) as (url, process):
        [rollout] = await stack.enqueue("hang")
        async with stack.running(HttpAgent(url, hooked=True), max_rollouts=1):
            await stack.until(lambda: stack.spans(rollout, conventions.SPAN_SEAL))
            process.kill()
            [attempt] = await stack.finished(rollout)
    (announced,) = stack.spans(rollout, conventions.SPAN_SEAL)
    verdict = stack.verdict(attempt)
    assert (attempt.status, verdict.kind, conventions.SEAL_SPANS in announced.attributes) == ("failed", "incomplete", False)
    assert any(announced.marker in reason for reason in verdict.reasons), verdict.reasons


def test_a_malformed_http_address_is_refused() -> None:
    with pytest.raises(UsageError, match="is not an HTTP address"):
        HttpAgent("localhost:9000")


def test_a_containers_command_line_has_variable_names_and_mounts_but_no_values() -> None:
    agent = ContainerAgent(
        "team/agent:1", ["--q", "{question}"], engine="sh", mounts={"/data": "/in"}, limits=Limits(memory_bytes=1 << 30), env={"MINE": "1"}
    )
    env = {
        "MINE": "1",
        conventions.ENV_ATTEMPT_ID: "at-1",
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=secret",
        "AGL_TASK_FILE": "/t/task",
    }
    argv, given = agent.launch(["/bin/docker", "--q", "2+2"], env)
    options = "--rm --init --name agl-at-1 --network host --memory 1073741824"
    names = "--env AGL_ATTEMPT_ID --env AGL_TASK_FILE --env MINE --env OTEL_EXPORTER_OTLP_HEADERS"
    mounts = "--volume /data:/in:ro --volume /t/task:/t/task:ro"
    assert argv == f"/bin/docker run {options} {names} {mounts} team/agent:1 --q 2+2".split()
    assert given.items() >= env.items()


def test_a_container_gets_no_ledger_but_its_attempts(tmp_path: Path) -> None:
    ids = {conventions.ENV_ROLLOUT_ID: "ro-1", conventions.ENV_ATTEMPT_ID: "at-1"}
    argv, given = ContainerAgent("team/agent:1", engine="sh").launch(["docker"], {**ids, conventions.ENV_LEDGER: str(tmp_path)})
    folder = folder_of(tmp_path, "ro-1", "at-1")
    assert [value for name, value in pairwise(argv) if name == "--volume"] == [f"{folder}:{folder_of(CONTAINER_ROOT, 'ro-1', 'at-1')}"]
    assert given[conventions.ENV_LEDGER] == CONTAINER_ROOT and str(tmp_path) not in given.values()


@pytest.mark.parametrize(
    ("command", "options", "hooked"),
    [
        (["agent"], {}, False),
        (["opentelemetry-instrument", "python", "agent.py"], {}, True),
        (["agent"], {"hooked": True}, True),
        (["opentelemetry-instrument", "node"], {"hooked": False}, False),
    ],
)
def test_a_container_is_hooked_by_its_command_or_by_option(command: list[str], options: dict[str, Any], hooked: bool) -> None:
    assert ContainerAgent("team/agent:1", command, engine="sh", **options).hooked is hooked


@pytest.fixture
def engine() -> str:
    found = next((name for name in ("docker", "podman") if shutil.which(name)), None)
    if found is None:
        pytest.skip("neither docker nor podman is installed")
    for step in (["info"], ["pull", "busybox"]):
        if subprocess.run([found, *step], capture_output=True, check=False).returncode != 0:
            pytest.skip(f"`{found} {' '.join(step)}` fails here")
    return found


@pytest.mark.full
async def test_a_container_runs_with_the_attempts_environment(stack: Stack, engine: str) -> None:
    said: list[str] = []
    agent = ContainerAgent("busybox", ["printenv", "AGL_ATTEMPT_ID"], engine=engine, grader=lambda task, answer: said.append(answer) or 1.0)
    [rollout] = await stack.enqueue("t")
    await stack.run(agent, max_rollouts=1)
    [attempt] = await stack.finished(rollout)
    assert said == [attempt.attempt_id]
