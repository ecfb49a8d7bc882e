"""Attempts to review: many, each with one model call, in few requests."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from agl_otel_hook import conventions
from tests.contract.collector.otlp import attributes
from tests.contract.web.conftest import OTLP, Web

RUBRIC: Final = "Does it answer?\n\ngood = 1\nnot sure =\nbad = 0"


class Made(NamedTuple):
    """An attempt that was made."""

    rollout_id: str
    attempt_id: str

    def named(self) -> dict[str, str]:
        """Return its ids, as feedback names them."""
        return {"rollout_id": self.rollout_id, "attempt_id": self.attempt_id}


def message_json(role: str, text: str) -> str:
    """Return one message, as an attribute of a span has it."""
    return json.dumps([{"role": role, "parts": [{"type": "text", "content": text}]}])


def make(web: Web, run: str, asked: Sequence[tuple[str, str, Sequence[float]]], *, status: str = "succeeded") -> list[Made]:
    """Store an attempt that has ended for each (question, answer, log-probs of the answer's tokens), in order of enqueue."""

    def begin(question: str) -> Made:
        begun = web.rest("POST", "/rollouts", {"input": question, "metadata": {"run": run}}).json
        return Made(begun["rollout_id"], begun["attempt"]["attempt_id"])

    made = [begin(question) for question, _, _ in asked]
    request, now = ExportTraceServiceRequest(), time.time_ns()
    for place, (each, (question, answer, logprobs)) in enumerate(zip(made, asked, strict=True)):
        group = request.resource_spans.add()
        group.resource.attributes.extend(attributes({conventions.ROLLOUT_ID: each.rollout_id, conventions.ATTEMPT_ID: each.attempt_id}))
        content: dict[str, Any] = {
            "gen_ai.input.messages": message_json("user", question),
            "gen_ai.output.messages": message_json("assistant", answer),
            "gen_ai.request.model": "m",
            conventions.LLM_CALL: 1,
            conventions.LLM_CHOICE: 0,
            conventions.PROCESS: "proxy-1",
            conventions.LLM_PROMPT_TOKEN_IDS: [1, 2, 3],
            conventions.LLM_RESPONSE_TOKEN_IDS: list(range(4, 4 + len(logprobs))),
            conventions.LLM_RESPONSE_LOGPROBS: list(logprobs),
        }
        span = group.scope_spans.add().spans.add(name=conventions.SPAN_LLM, attributes=attributes(content))
        span.trace_id, span.span_id = (now + place).to_bytes(16, "big"), (place + 1).to_bytes(8, "big")
        span.start_time_unix_nano = now + place
        span.end_time_unix_nano = span.start_time_unix_nano + 10**6
    assert web.call("POST", "/v1/traces", request.SerializeToString(), OTLP).status == 200
    with ThreadPoolExecutor(4) as threads:
        ends = threads.map(lambda each: web.rest("POST", f"/rollouts/{each.rollout_id}/attempts/latest", {"status": status}), made)
        assert {answer.status for answer in ends} <= {200}
    return made


def review(web: Web, made: Made, source: str, rubric: str, label: str, **more: Any) -> None:
    """Store a review."""
    given = {**made.named(), "source": source, "rubric": rubric, "label": label, **more}
    assert web.rest("POST", "/feedback", given).status == 201, given
