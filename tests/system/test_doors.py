"""Access control: every port of a running stack × every kind of visitor, compared with the responses in doors.json.

doors.json has, for each endpoint, the visitors by the response that they get: its status and, for a refusal, the reason.
"""

from __future__ import annotations

import asyncio
import base64
import http.client
import io
import json
import socket
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import grpc
import pytest
from aiohttp import web
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest, ExportMetricsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.metrics.v1.metrics_pb2 import Gauge, Metric, NumberDataPoint

from agl_otel.algorithms.grpo.model_port import access_checks
from agl_otel.net.auth import (
    SCOPES,
    Subject,
    attempt_ingest_key,
    attempt_key,
    feedback_key,
    ingest_key,
    model_server_key,
    scoped_token,
    shared_key,
)
from agl_otel.net.http_server import listen, make_runner
from agl_otel.queue.proto import queue_pb2
from agl_otel.settings import free_ports
from agl_otel_hook.conventions import ATTEMPT_ID, ROLLOUT_ID
from tests.contract.collector.otlp import request_of, span
from tests.system.stack_process import Command, naming, until

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]
TOKEN: Final = "s3cret"
OURS: Final = ("ro-1", "at-1")
FAR: Final = 4e9  # Unix seconds
CALL_SECONDS: Final = 300.0
ANSWERS: Final = Path(__file__).with_name("doors.json")
PORTS: Final = ("queue", "otlp_grpc", "otlp_http", "clickhouse", "proxy", "web", "jaeger", "queue_metrics", "runner_metrics")
Headers = Sequence[tuple[str, str]]


def bearer(token: str) -> Headers:
    return [("Authorization", f"Bearer {token}")]


def basic(password: str) -> Headers:
    return [("Authorization", "Basic " + base64.b64encode(f"user:{password}".encode()).decode())]


TOKENS: Final[dict[str, str]] = {
    "the token": TOKEN,
    "a wrong token": "wrong",
    "a token with more behind it": TOKEN + "x",
    "a token with a letter of Latin-1": "s\u00e9cret",
    "another stack's token": scoped_token("another", [*SCOPES], FAR),
    "an expired token": scoped_token(TOKEN, [*SCOPES], 1.0),
    **{f"a token for {scope}": scoped_token(TOKEN, [scope], FAR) for scope in SCOPES},
    "a response's feedback key": feedback_key(TOKEN, Subject("response", "chatcmpl-1"), FAR),
    "an expired feedback key": feedback_key(TOKEN, Subject("response", "chatcmpl-1"), 1.0),
    "the OTLP key": ingest_key(TOKEN),
    "the attempt's OTLP key": attempt_ingest_key(TOKEN, *OURS),
    "another attempt's OTLP key": attempt_ingest_key(TOKEN, "ro-2", "at-2"),
    "the attempt's model key": attempt_key(TOKEN, *OURS),
    "another attempt's model key": attempt_key(TOKEN, "ro-2", "at-2"),
    "the shared model key": shared_key(TOKEN),
    "the model servers' key": model_server_key(TOKEN),
    "a provider's key": "sk-0123456789",
}
VISITORS: Final[dict[str, Headers]] = {
    "nothing": [],
    **{name: bearer(token) for name, token in TOKENS.items()},
    "an empty header": [("Authorization", "")],
    "the scheme alone": [("Authorization", "Bearer ")],
    "the token without a scheme": [("Authorization", TOKEN)],
    "the token after a scheme in small letters": [("Authorization", f"bearer {TOKEN}")],
    "the token after two spaces": [("Authorization", f"Bearer  {TOKEN}")],
    "the token as a password": basic(TOKEN),
    "a token for clickhouse as a password": basic(TOKENS["a token for clickhouse"]),
    "a wrong password": basic("wrong"),
    "first the token, then a wrong one": [*bearer(TOKEN), *bearer("wrong")],
    "first a wrong token, then the right one": [*bearer("wrong"), *bearer(TOKEN)],
    "first another attempt's OTLP key, then the token": [*bearer(TOKENS["another attempt's OTLP key"]), *bearer(TOKEN)],
    "first the token, then another attempt's OTLP key": [*bearer(TOKEN), *bearer(TOKENS["another attempt's OTLP key"])],
    "the token as x-api-key": [("x-api-key", TOKEN)],
    "the attempt's model key as x-api-key": [("x-api-key", TOKENS["the attempt's model key"])],
    "a wrong token, and the right one as x-api-key": [*bearer("wrong"), ("x-api-key", TOKEN)],
    "the token as X-ClickHouse-Key": [("X-ClickHouse-Key", TOKEN)],
    "a token for web as X-ClickHouse-Key": [("X-ClickHouse-Key", TOKENS["a token for web"])],
}
"""The credentials of visitors."""
PLACES: Final[dict[str, Headers]] = {
    "by a foreign name": [("Host", "evil.example")],
    "by a name that ends in a good one": [("Host", "evil.localhost")],
    "by a name with open brackets": [("Host", "[evil")],
    "by no name": [("Host", "")],
    "by 0.0.0.0": [("Host", "0.0.0.0:1")],
    "by another address": [("Host", "192.0.2.7")],
    "by localhost": [("Host", "LOCALHOST:5")],
    "by an allowed name": [("Host", "stack.test:9")],
    "from a foreign page": [("Origin", "http://evil.example")],
    "from no page in particular": [("Origin", "null")],
    "from a page on another port": [("Origin", "http://127.0.0.1:1")],
    "from its own page": [("Host", "localhost"), ("Origin", "http://localhost")],
    "from an allowed page": [("Origin", "http://page.example")],
    "from another site": [("Sec-Fetch-Site", "cross-site")],
    "from another port, as the browser has it": [("Sec-Fetch-Site", "same-site")],
    "from its own site, whatever the origin": [("Sec-Fetch-Site", "same-origin"), ("Origin", "http://evil.example")],
    "by a link on another site": [("Sec-Fetch-Site", "cross-site"), ("Sec-Fetch-Mode", "navigate"), ("Sec-Fetch-Dest", "document")],
    "from a frame of another site": [("Sec-Fetch-Site", "cross-site"), ("Sec-Fetch-Mode", "navigate"), ("Sec-Fetch-Dest", "iframe")],
}
"""The host names that visitors use, and the pages from which they send."""


class Door(NamedTuple):
    """A request that can be sent to a port."""

    port: str
    method: str
    path: str = ""
    """The path; for gRPC, the method's full name."""
    body: bytes = b""
    headers: Headers = ()


def training_figure() -> bytes:
    """Serialise a training metric, which only clients with the stack's token may send."""
    point = NumberDataPoint(as_double=1.0, time_unix_nano=span().end_time_unix_nano)
    request = ExportMetricsServiceRequest()
    made = request.resource_metrics.add()
    made.scope_metrics.add().metrics.append(Metric(name="agl.training.reward", gauge=Gauge(data_points=[point])))
    return request.SerializeToString()


OTLP: Final = [("Content-Type", "application/x-protobuf")]
JSON: Final = [("Content-Type", "application/json")]
BAGGAGE: Final = [*JSON, ("baggage", f"{ROLLOUT_ID}={OURS[0]},{ATTEMPT_ID}={OURS[1]}")]
SPAN: Final = request_of([span("work")], {ROLLOUT_ID: OURS[0], ATTEMPT_ID: OURS[1]}).SerializeToString()
TRACES: Final = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
METRICS: Final = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"
PAGE: Final = "/rollouts"
ATTEMPT: Final = f"/rollout/{OURS[0]}/attempt/{OURS[1]}"
RESOURCES: Final = queue_pb2.QueryResourcesRequest().SerializeToString()
DOORS: Final[dict[str, Door]] = {
    "queue: read": Door("queue", "gRPC", "/agl.queue.v1.Queue/Statistics"),
    "queue: read a resource with a provider's key": Door("queue", "gRPC", "/agl.queue.v1.Queue/StreamResources", RESOURCES),
    "queue: no such call": Door("queue", "gRPC", "/agl.queue.v1.Queue/Nothing"),
    "OTLP gRPC: a span of an attempt": Door("otlp_grpc", "gRPC", TRACES, SPAN),
    "OTLP gRPC: a figure of training": Door("otlp_grpc", "gRPC", METRICS, training_figure()),
    "OTLP gRPC: barrier": Door("otlp_grpc", "gRPC", "/agl.collector.v1.Collector/Barrier"),
    "OTLP gRPC: no such call": Door("otlp_grpc", "gRPC", "/agl.collector.v1.Collector/Nothing"),
    "Jaeger gRPC: read": Door("jaeger", "gRPC", "/jaeger.storage.v2.TraceReader/GetServices"),
    "Jaeger gRPC: no such call": Door("jaeger", "gRPC", "/jaeger.storage.v2.TraceReader/Nothing"),
    "OTLP HTTP: a span of an attempt": Door("otlp_http", "POST", "/v1/traces", SPAN, OTLP),
    "OTLP HTTP: a figure of training": Door("otlp_http", "POST", "/v1/metrics", training_figure(), OTLP),
    "OTLP HTTP: barrier": Door("otlp_http", "POST", "/barrier"),
    "OTLP HTTP: delete": Door("otlp_http", "POST", "/delete", b"[]", JSON),
    "OTLP HTTP: copy": Door("otlp_http", "POST", "/copy", b"[]", JSON),
    "OTLP HTTP: status": Door("otlp_http", "GET", "/status"),
    "OTLP HTTP: metrics": Door("otlp_http", "GET", "/metrics"),
    "OTLP HTTP: health": Door("otlp_http", "GET", "/health"),
    "OTLP HTTP: no such path": Door("otlp_http", "GET", "/nothing"),
    "SQL: query": Door("clickhouse", "GET", "/?query=SELECT%201"),
    "SQL: query by POST": Door("clickhouse", "POST", "/", b"SELECT 1"),
    "SQL: query, with the token as a parameter": Door("clickhouse", "GET", f"/?query=SELECT%201&password={TOKEN}"),
    "SQL: no query": Door("clickhouse", "GET", "/"),
    "SQL: ping": Door("clickhouse", "GET", "/ping"),
    "SQL: no such path": Door("clickhouse", "GET", "/nothing"),
    "proxy: a call of an attempt": Door("proxy", "POST", f"{ATTEMPT}/v1/chat/completions", b"{}", JSON),
    "proxy: a call of an attempt by baggage": Door("proxy", "POST", "/v1/chat/completions", b"{}", BAGGAGE),
    "proxy: a call of no attempt": Door("proxy", "POST", "/v1/chat/completions", b"{}", JSON),
    "proxy: a call of a broken id": Door("proxy", "POST", "/rollout/a%20b/attempt/c/v1/chat/completions", b"{}", JSON),
    "proxy: close an attempt": Door("proxy", "POST", f"{ATTEMPT}/close"),
    "proxy: resume": Door("proxy", "POST", "/resume", b"[]", JSON),
    "proxy: pause": Door("proxy", "POST", "/pause", b"[]", JSON),
    "proxy: replace the models": Door("proxy", "POST", "/model_list", b"[]", JSON),
    "proxy: models": Door("proxy", "GET", "/v1/models"),
    "proxy: models of an attempt": Door("proxy", "GET", f"{ATTEMPT}/v1/models"),
    "proxy: delete": Door("proxy", "POST", "/delete", b"[]", JSON),
    "proxy: metrics": Door("proxy", "GET", "/metrics"),
    "proxy: health": Door("proxy", "GET", "/health"),
    "proxy: no such path": Door("proxy", "GET", "/nothing"),
    "web: read": Door("web", "GET", "/v1/agl/rollouts"),
    "web: give feedback": Door("web", "POST", "/v1/agl/feedback", b"{}", JSON),
    "web: read by POST": Door("web", "POST", "/v1/agl/rollouts/search", b"{}", JSON),
    "web: change": Door("web", "POST", "/v1/agl/queues/rollouts/enqueue", b"[]", JSON),
    "web: before a page's change": Door("web", "OPTIONS", "/v1/agl/rollouts/search", b"", [("Access-Control-Request-Method", "POST")]),
    "web: OTLP": Door("web", "POST", "/v1/traces", SPAN, OTLP),
    "web: metrics": Door("web", "GET", "/metrics?relay=0"),
    "web: metrics, by 0.3's path": Door("web", "GET", "/v1/prometheus?relay=0"),
    "web: health": Door("web", "GET", "/health"),
    "web: health in REST": Door("web", "GET", "/v1/agl/health"),
    "web: Jaeger": Door("web", "GET", "/api/operations?service=none"),
    "web: Jaeger, version 3": Door("web", "GET", "/api/v3/operations?service=none"),
    "web: page": Door("web", "GET", PAGE),
    "web: no such path": Door("web", "GET", "/v1/nothing"),
    **{
        f"{whose} metrics port: {what}": Door(port, method, path)
        for whose, port in (("queue's", "queue_metrics"), ("runner's", "runner_metrics"))
        for what, method, path in (
            ("metrics", "GET", "/metrics"),
            ("health", "GET", "/health"),
            ("change", "POST", "/health"),
            ("no such path", "GET", "/nothing"),
        )
    },
}


@contextmanager
def stack(folder: Path, **env: str) -> Generator[dict[str, int]]:
    """Run `agl-otel up` with one resource that has a provider's key, and a runner; yield {name of a port: its number}."""
    ports: dict[str, int] = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    env = {**{f"AGL_{name.upper()}_PORT": str(port) for name, port in ports.items()}, **env}
    env |= {"AGL_ALLOWED_HOSTS": "stack.test", "AGL_CORS_ORIGINS": "http://page.example"}
    data = folder / "data"
    with Command("up", "--data-dir", str(data), log=folder / "up.log", cwd=folder, env=env) as command:
        until(lambda: (data / "stack.json").exists() or command.process.poll() is not None, "stack.json is written")
        assert command.process.poll() is None, command.output
        given = queue_pb2.PutResourcesRequest(
            resources_id="rs-1",
            resources_json='{"m": {"resource_type": "llm", "endpoint": "http://m/v1", "model": "x", "api_key": "sk-secret"}}',
        )
        with grpc.insecure_channel(f"127.0.0.1:{ports['queue']}") as channel:
            call = channel.unary_unary("/agl.queue.v1.Queue/PutResources", None, None)
            call(given.SerializeToString(), metadata=(("authorization", f"Bearer {TOKEN}"),), timeout=CALL_SECONDS)
        runner = ("runner", "--store", f"127.0.0.1:{ports['queue']}", "--", "true")
        with Command(*runner, log=folder / "runner.log", cwd=folder, env=env) as other:
            until(lambda: listens(ports["runner_metrics"]) or other.process.poll() is not None, "the runner serves its metrics")
            assert other.process.poll() is None, other.output
            yield ports
    until(lambda: naming(data) == [], "nothing is left")


def listens(port: int) -> bool:
    with socket.socket() as made:
        return made.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def open_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, int]]:
    with stack(tmp_path_factory.mktemp("open")) as ports:
        yield ports


@pytest.fixture(scope="module")
def token_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, int]]:
    with stack(tmp_path_factory.mktemp("token"), AGL_TOKEN=TOKEN) as ports:
        yield ports


def answer_of(port: int, door: Door, headers: Headers) -> str:
    """Return the status, and the details in which responses differ."""
    return _over_grpc(port, door, headers) if door.method == "gRPC" else _over_http(port, door, headers)


def _over_grpc(port: int, door: Door, headers: Headers) -> str:
    metadata = tuple((name.lower(), value) for name, value in headers)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            body = b"".join(channel.unary_stream(door.path, None, None)(door.body, metadata=metadata, timeout=CALL_SECONDS))
        except grpc.RpcError as error:
            assert isinstance(error, grpc.Call)
            return f"{error.code().name} {error.details()}"
    return f"OK {_error_of(door, body)}".strip()


def _over_http(port: int, door: Door, headers: Headers) -> str:
    """Send the headers byte for byte: a client library would merge two headers of one name, and set its own Host."""
    names = {name for name, _ in headers}
    lines = [f"{door.method} {door.path} HTTP/1.1", *([] if "Host" in names else [f"Host: 127.0.0.1:{port}"])]
    lines += [f"{name}: {value}" for name, value in (*headers, *door.headers)]
    lines += [f"Content-Length: {len(door.body)}", "Connection: close", "", ""]
    with socket.create_connection(("127.0.0.1", port), timeout=CALL_SECONDS) as connection:
        connection.sendall("\r\n".join(lines).encode("latin-1") + door.body)
        with connection.makefile("rb") as came:
            response = http.client.HTTPResponse(_Socket(came.read()), method=door.method)  # pyright: ignore[reportArgumentType] - it only calls makefile
    response.begin()
    body = response.read()
    found = [str(200 if (door.path, response.status) == (PAGE, 503) else response.status)]  # 503: the dashboard is not built here
    if response.status in (401, 403):
        found += [_words(body), *(f"{name}: {value}" for name in ("WWW-Authenticate",) if (value := response.getheader(name)))]
    elif response.status == 200:
        found.append(_error_of(door, body))
    if (allowed := response.getheader("Access-Control-Allow-Origin")) is not None:
        found.append(f"(for pages of {allowed})")
    assert response.getheader("Cross-Origin-Resource-Policy") == "same-origin"
    return " ".join(filter(None, found))


class _Socket:
    """A socket as http.client needs it to parse a response."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, *_: Any) -> io.BytesIO:
        return io.BytesIO(self._data)


def _words(body: bytes) -> str:
    text = body.decode(errors="replace")  # that of the Go collector is protobuf
    try:
        found = json.loads(text)
    except ValueError:
        return text.strip()
    return found.get("detail") or found.get("message") or found["error"]["message"]


def _error_of(door: Door, body: bytes) -> str:
    """Return the part of a response that depends on the visitor."""
    if door.path in (TRACES, "/v1/traces"):
        return ExportTraceServiceResponse.FromString(body).partial_success.error_message
    if door.path in (METRICS, "/v1/metrics"):
        return ExportMetricsServiceResponse.FromString(body).partial_success.error_message
    if door.path.endswith("StreamResources"):
        return "with the key" if b"sk-secret" in body else "without the key"
    if door.path.endswith("/health") and door.method == "GET" and not door.port.endswith("_metrics"):
        return "all of it" if set(json.loads(body)) - {"status"} else "the status"
    return ""


def found_at(ports: Mapping[str, int], doors: Mapping[str, Door], visitors: Mapping[str, Headers]) -> dict[str, dict[str, str]]:
    """Return {endpoint: {response: visitors}}."""
    found: dict[str, dict[str, list[str]]] = {}
    for name, door in doors.items():
        for visitor, headers in visitors.items():
            if door.method == "gRPC" and not all(value.isascii() for _, value in headers):
                continue  # gRPC clients cannot send it
            found.setdefault(name, {}).setdefault(answer_of(ports[door.port], door, headers), []).append(visitor)
    return {name: {answer: "; ".join(visitors) for answer, visitors in answers.items()} for name, answers in found.items()}


def as_written(what: str, found: Mapping[str, Mapping[str, str]]) -> None:
    """Compare the responses with doors.json."""
    expected = json.loads(ANSWERS.read_text())[what]
    assert {*found} == {*expected}
    for door, answers in found.items():
        assert answers == expected[door], door


OVER_HTTP: Final = {name: door for name, door in DOORS.items() if door.method != "gRPC"}
SHOWING: Final = {name: [*headers, *bearer(TOKEN)] for name, headers in PLACES.items()}


def test_with_a_token_every_endpoint_requires_it(token_stack: dict[str, int]) -> None:
    as_written("with a token", found_at(token_stack, DOORS, VISITORS))


def test_without_a_token_every_endpoint_is_open(open_stack: dict[str, int]) -> None:
    few = {name: VISITORS[name] for name in ("nothing", "a wrong token", "the attempt's OTLP key", "another attempt's model key")}
    as_written("without a token", found_at(open_stack, DOORS, few))


def test_hosts_and_origins_are_checked_with_a_token(token_stack: dict[str, int]) -> None:
    as_written("whence, with a token", found_at(token_stack, OVER_HTTP, SHOWING))


def test_hosts_and_origins_are_checked_without_a_token(open_stack: dict[str, int]) -> None:
    as_written("whence, without a token", found_at(open_stack, OVER_HTTP, PLACES))


@asynccontextmanager
async def model_server(host: str, key: str) -> AsyncGenerator[int]:
    """Serve a port with the checks of every model server."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="sampled")

    app = web.Application(middlewares=access_checks(host, key))
    app.router.add_route("*", "/v1/chat/completions", answer)
    runner = make_runner(app)
    await runner.setup()
    try:
        yield await listen(runner, "127.0.0.1", 0, None)
    finally:
        await runner.cleanup()


async def test_a_model_server_checks_credentials_hosts_and_origins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_ALLOWED_HOSTS", "stack.test")
    key = model_server_key(TOKEN)
    showing = {name: [*headers, *bearer(key)] for name, headers in PLACES.items()}
    doors = {"sample": Door("", "POST", "/v1/chat/completions", b"{}", JSON), "look": Door("", "GET", "/v1/chat/completions")}
    for what, host, shown, visitors in (
        ("model server", "127.0.0.1", "", {"nothing": VISITORS["nothing"], "a wrong token": VISITORS["a wrong token"], **PLACES}),
        ("model server beyond loopback", "192.0.2.7", "", PLACES),
        ("model server with a key", "192.0.2.7", key, {**VISITORS, **{f"{name}, with the key": each for name, each in showing.items()}}),
    ):
        async with model_server(host, shown) as port:
            as_written(what, await asyncio.to_thread(found_at, {"": port}, doors, visitors))
