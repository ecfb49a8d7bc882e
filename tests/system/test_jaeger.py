"""A real Jaeger reads a stack's traces: its own query API shows the stored spans. `make jaeger` builds it."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agl_otel.settings import free_ports
from agl_otel_hook import conventions
from tests.contract.web.conftest import Web
from tests.contract.web.test_jaeger import send_trace
from tests.system.stack_process import ENVIRONMENT, Command, naming, until

TOP = Path(__file__).parents[2]
BINARY = TOP / "build" / "jaeger" / "jaeger"
TOKEN = "a-token-for-viewers"
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not BINARY.exists(), reason="no Jaeger: `make jaeger` builds one (needs Go)"),
]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Web, str]]:
    folder = tmp_path_factory.mktemp("jaeger")
    storage, pages, grpc, otlp = free_ports(4)
    arguments = ["--port", "0", "--queue-port", "0", "--data-dir", str(folder / "data"), "--json"]
    env = {"AGL_JAEGER_PORT": str(storage), "AGL_TOKEN": TOKEN}
    with Command("store", *arguments, log=folder / "store.log", cwd=folder, env=env) as command:
        until(lambda: '"url"' in command.output or command.process.poll() is not None, "it says where it is")
        assert command.process.poll() is None, command.output
        url = json.loads(next(line for line in command.output.splitlines() if line.startswith("{")))["url"]
        config = (TOP / "deploy" / "jaeger" / "config.yaml").read_text().replace("# headers:", "headers:")
        (folder / "config.yaml").write_text(config)
        ports = {"http": pages, "grpc": grpc}
        flags = [f"--set=extensions.jaeger_query.{name}.endpoint=127.0.0.1:{port}" for name, port in ports.items()]
        places = {"AGL_JAEGER": f"127.0.0.1:{storage}", "JAEGER_OTLP": f"127.0.0.1:{otlp}", "AGL_TOKEN": TOKEN}
        with (folder / "jaeger.log").open("wb") as log:
            jaeger = subprocess.Popen(
                [BINARY, "--config", str(folder / "config.yaml"), *flags],
                env={**ENVIRONMENT, **places},
                cwd=folder,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            until(lambda: jaeger.poll() is not None or answers(f"http://127.0.0.1:{pages}/api/services"), "Jaeger answers")
            assert jaeger.poll() is None, (folder / "jaeger.log").read_text()
            yield Web(url, token=TOKEN), f"http://127.0.0.1:{pages}"
        finally:
            jaeger.terminate()
            jaeger.wait(60)
    assert naming(folder) == []


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=30):
            return True
    except (urllib.error.URLError, OSError):
        return False


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=120) as answer:
        return json.loads(answer.read())


def tags(span: dict[str, Any]) -> dict[str, Any]:
    return {tag["key"]: tag["value"] for tag in span["tags"]}


def test_a_jaeger_finds_and_shows_the_stored_spans(stack: tuple[Web, str]) -> None:
    web, jaeger = stack
    sent = send_trace(web)
    assert {sent.service, f"{sent.service}-model"} <= set(get(f"{jaeger}/api/services")["data"])
    assert {"name": "invoke_agent", "spanKind": "server"} in get(f"{jaeger}/api/operations?service={sent.service}")["data"]
    trace = get(f"{jaeger}/api/traces/{sent.trace_id}")["data"][0]
    spans = {span["operationName"]: span for span in trace["spans"]}
    assert len(spans) == 5
    head, call = tags(spans[conventions.SPAN_ATTEMPT]), tags(spans[conventions.SPAN_LLM])
    assert head["agentlightning.verdict"] and head["agentlightning.reward.final"] == 0.5
    assert call["agentlightning.llm.response_tokens"] == 2 and call[conventions.ROLLOUT_ID] == sent.rollout_id
    own = web.call("GET", f"/api/traces/{sent.trace_id}").json["data"][0]
    assert {span["spanID"]: (span["operationName"], span["startTime"], span["duration"]) for span in own["spans"]} == {
        span["spanID"]: (span["operationName"], span["startTime"], span["duration"]) for span in trace["spans"]
    }
    version_3 = get(f"{jaeger}/api/v3/traces/{sent.trace_id}")["result"]["resourceSpans"]
    assert sum(len(scope["spans"]) for group in version_3 for scope in group["scopeSpans"]) == 5


@pytest.mark.parametrize("service", ["own", "none of them"])
def test_a_jaeger_searches_by_tag_operation_and_duration(stack: tuple[Web, str], service: str) -> None:
    web, jaeger = stack
    sent = send_trace(web)
    name = sent.service if service == "own" else f"{sent.service}-other"
    expected = [sent.trace_id] if service == "own" else []
    for query in (
        {"tags": json.dumps({conventions.ROLLOUT_ID: sent.rollout_id})},
        {"operation": "invoke_agent", "tags": json.dumps({"team": "blue"})},
        {"operation": "invoke_agent", "minDuration": "7s", "maxDuration": "9s"},
        {"tags": json.dumps({"error": "true"})},
    ):
        times = {"start": sent.start // 1000 - 10**6, "end": sent.start // 1000 + 60 * 10**6, "limit": 20}
        found = get(f"{jaeger}/api/traces?{urllib.parse.urlencode({'service': name, **times, **query})}")["data"] or []
        assert [trace["traceID"] for trace in found] == expected, query


def test_a_large_trace_passes_through_a_jaeger(stack: tuple[Web, str]) -> None:
    web, jaeger = stack
    sent = send_trace(web, padding=10_000_000)
    trace = get(f"{jaeger}/api/traces/{sent.trace_id}")["data"][0]
    assert sum(len(str(tag["value"])) for span in trace["spans"] for tag in span["tags"]) > 10_000_000
