"""The dashboard in headless Chromium, over a running `agl-otel store` with real spans, hostile ones among them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, ResourceLogs, ScopeLogs

from agl_otel.web.static import FOLDER, HEADERS
from agl_otel_hook import conventions
from tests.contract.collector.otlp import attributes
from tests.contract.web.browser import built, look
from tests.contract.web.conftest import OTLP, Web, with_bytes

HOSTILE = "<script>window.hacked=1</script><img src=x onerror='window.hacked=1'>[x](javascript:alert(1))\x1b[31mred\u202egnp"
TRACE = "0af7651916cd43dd8448eb211c81{:04x}"
RUN = "pages"


def span(begun: dict[str, Any], number: int, name: str, parent: int | None = None, **attributes: Any) -> dict[str, Any]:
    ids = {"rollout_id": begun["rollout_id"], "attempt_id": begun["attempt"]["attempt_id"], "sequence_id": number}
    trace = {"trace_id": TRACE.format(7), "span_id": f"b7ad6b71692034{number:02x}", "parent_id": parent and f"b7ad6b71692034{parent:02x}"}
    times = {"start_time": 1_790_000_000.0 + number, "end_time": 1_790_000_000.5 + number, "context": None, "parent": None}
    status = {"status_code": "ERROR", "description": HOSTILE} if name == HOSTILE else {"status_code": "OK"}
    rest = {"events": [], "links": [], "resource": {"attributes": {}, "schema_url": ""}, "status": status}
    return {**ids, **trace, **times, **rest, "name": name, "attributes": attributes}


def message_json(role: str, text: str) -> str:
    return json.dumps([{"role": role, "parts": [{"type": "text", "content": text}]}])


@pytest.fixture(scope="module")
def begun(web: Web) -> dict[str, Any]:
    """Store a rollout with a model call, a hostile tool and a reward, its resources in two versions, and a queued rollout."""
    built()
    for template in ("before", f"after {HOSTILE}"):
        prompt = {"resource_type": "prompt_template", "template": template, "engine": "f-string"}
        model = {"resource_type": "llm", "endpoint": "http://m", "model": "x", "api_key": "sk-secret"}
        web.rest("POST", "/resources/rs-pages", {"resources": {"p": prompt, "m": model}})
    given = {
        "input": {"q": HOSTILE},
        "mode": "train",
        "metadata": {"run": RUN, "step": 1},
        "resources_id": "rs-pages",
        "worker_id": "w-page",
    }
    made = web.rest("POST", "/rollouts", given).json
    tokens = {
        conventions.LLM_PROMPT_TOKEN_IDS: [11, 12],
        conventions.LLM_RESPONSE_TOKEN_IDS: [4711, 4712],
        conventions.LLM_RESPONSE_LOGPROBS: [-0.1, -3.0],
    }
    messages = {
        "gen_ai.input.messages": message_json("user", HOSTILE),
        "gen_ai.output.messages": message_json("assistant", f"**{HOSTILE}**"),
    }
    told = {conventions.LLM_BRIDGE: json.dumps({"refused": "cut"})}
    unread = {"name": conventions.EVALUATION, "attributes": {conventions.EVALUATION_LABEL: HOSTILE}, "timestamp": 1_790_000_001.0}
    call = {conventions.LLM_CALL: 1, conventions.LLM_CHOICE: 0, conventions.PROCESS: "proxy-1", "gen_ai.request.model": HOSTILE}
    spans = [
        {**span(made, 1, "invoke_agent"), "attributes": {"gen_ai.conversation.id": f"thread-1 {HOSTILE}"}, "events": [unread]},
        span(made, 2, conventions.SPAN_LLM, 5, **tokens, **messages, **call, **told),
        span(made, 3, HOSTILE, 1, **{"gen_ai.tool.name": "t", HOSTILE: HOSTILE}),
        span(made, 4, conventions.SPAN_ANNOTATION, 1, **{conventions.reward_name_key(0): "exact", conventions.reward_value_key(0): 0.75}),
        span(made, 5, "chat x", 1, **{"gen_ai.request.model": "x"}),
    ]
    for each in spans:
        assert web.rest("POST", "/spans", each).status == 201
    web.rest("POST", f"/rollouts/{made['rollout_id']}/attempts/latest", {"status": "succeeded"})
    ids = {conventions.ROLLOUT_ID: made["rollout_id"], conventions.ATTEMPT_ID: made["attempt"]["attempt_id"]}
    said = {
        conventions.EVALUATION_TEXT: "too short <b>",
        conventions.FEEDBACK_CORRECTION: "Try again.",
        conventions.FEEDBACK_RUBRIC: "tone@2",
    }
    given = {conventions.EVALUATION_NAME: "feedback", conventions.FEEDBACK_SOURCE: "ann", **said, **ids}
    record = LogRecord(event_name=conventions.EVALUATION, attributes=attributes(given), time_unix_nano=time.time_ns())
    record.trace_id, record.span_id = (bytes.fromhex(str(spans[-1][name])) for name in ("trace_id", "span_id"))
    logs = ExportLogsServiceRequest(resource_logs=[ResourceLogs(scope_logs=[ScopeLogs(log_records=[record])])])
    assert web.call("POST", "/v1/logs", logs.SerializeToString(), OTLP).status == 200
    web.rest("POST", "/queues/rollouts/enqueue", {"rollouts": [{"input": 1, "mode": "val", "metadata": {"run": RUN, "step": 2}}]})
    return made


DEEPEST = 24


@pytest.fixture(scope="module")
def deep(web: Web) -> str:
    """Store a rollout whose spans are 24 levels deep and begin half a minute after the claim, with twelve long answers and a late seal."""
    made = web.rest("POST", "/rollouts", {"input": {"question": "how deep?"}, "mode": "test", "metadata": {"run": RUN, "step": 1500}}).json
    answer = message_json("assistant", "\n".join(f"line {number} of a long answer" for number in range(60)))
    spans = [span(made, 1, conventions.SPAN_ATTEMPT), span(made, 61, conventions.SPAN_SEAL, 1)]
    reward = {conventions.reward_name_key(0): "exact", conventions.reward_value_key(0): 0.75}
    spans.append(span(made, 60, conventions.SPAN_ANNOTATION, 1, **reward))
    spans += [span(made, 30 + level, f"look_up level {level}", 30 + level - 1 if level else 1) for level in range(DEEPEST)]
    spans += [
        span(made, 70 + number, "chat y", 30, **{"gen_ai.request.model": "y", "gen_ai.output.messages": answer}) for number in range(12)
    ]
    for each in spans:
        assert web.rest("POST", "/spans", each).status == 201
    web.rest("POST", f"/rollouts/{made['rollout_id']}/attempts/latest", {"status": "succeeded"})
    return str(made["rollout_id"])


@pytest.fixture(scope="module")
def incomplete(web: Web) -> dict[str, Any]:
    """Store a rollout with a span of bytes, and the second of a proxy's calls without the first; return its verdict."""
    made = web.rest("POST", "/rollouts", {"input": "incomplete", "mode": "test"}).json
    ids = made["rollout_id"], made["attempt"]["attempt_id"]
    assert web.call("POST", "/v1/traces", with_bytes(*ids).SerializeToString(), OTLP).status == 200
    call: dict[str, Any] = {conventions.LLM_CALL: 2, conventions.LLM_CHOICE: 0, conventions.PROCESS: "proxy-1"}
    assert web.rest("POST", "/spans", span(made, 9, conventions.SPAN_LLM, **call)).status == 201
    web.rest("POST", f"/rollouts/{ids[0]}/attempts/latest", {"status": "succeeded"})
    (figures,) = web.rest("GET", f"/rollouts/{ids[0]}/figures").json
    return figures["verdict"]


def test_pages_have_a_content_policy_and_stable_urls(web: Web, begun: dict[str, Any]) -> None:
    for path in ("/", "/rollouts", "/resources", "/traces", "/runners", "/settings", "/runs", "/sql", f"/rollouts/{begun['rollout_id']}"):
        answer = web.call("GET", path)
        assert (answer.status, answer.headers.get_content_type()) == (200, "text/html"), path
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    assert b"<script>" not in answer.body and b"http" not in answer.body.replace(b"http-equiv", b""), "only files of its own"
    [script] = [path for path in (FOLDER / "assets").iterdir() if path.suffix == ".js"]
    asset = web.call("GET", f"/assets/{script.name}")
    assert asset.status == 200 and "immutable" in asset.headers["Cache-Control"]
    for path in ("/v1/nothing", "/v1/agl/nothing", "/assets/nothing.js", "/assets/../app.py", "/api/nothing"):
        assert web.call("GET", path).status == 404, path


@pytest.mark.full
def test_every_page_renders_and_treats_agent_output_as_text(
    web: Web, begun: dict[str, Any], incomplete: dict[str, Any], deep: str, tmp_path: Path
) -> None:
    given = {"url": web.url, "rollout": begun["rollout_id"], "run": RUN, "resources": "rs-pages", "shots": str(tmp_path), "deep": deep}
    assert incomplete["kind"] == "incomplete"
    given |= {name: "; ".join(incomplete[name]) for name in ("reasons", "notes")} | {"incomplete": incomplete["rollout_id"]}
    assert "proxy-1" in given["reasons"] and given["notes"], given
    look("look.py", given, seconds=300)
    assert {path.stem for path in tmp_path.glob("*.png")} >= {"run-dark", "run-light", "waterfall-dark", "conversation-light"}
