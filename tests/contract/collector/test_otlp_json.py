"""OTLP/JSON and zstd over HTTP, as sent by clients without protobuf and in the specification's examples."""

from __future__ import annotations

import gzip
import json
import os
import time
from typing import Any

import aiohttp
import pytest

from agl_otel.traces.reader import TraceReader
from agl_otel_hook import conventions

from .otlp import request_of, span
from .stack import Stack

JSON = {"Content-Type": "application/json"}


def text(key: str, value: str) -> dict[str, Any]:
    return {"key": key, "value": {"stringValue": value}}


def json_span(**fields: Any) -> dict[str, Any]:
    now = time.time_ns()
    times = {"startTimeUnixNano": str(now), "endTimeUnixNano": str(now + 1000)}
    return {"traceId": os.urandom(16).hex().upper(), "spanId": os.urandom(8).hex(), "name": "work", "kind": 2, **times, **fields}


def json_request(rollout: str, *spans: dict[str, Any]) -> bytes:
    resource = {
        "attributes": [text("service.name", "my.service"), text(conventions.ROLLOUT_ID, rollout), text(conventions.ATTEMPT_ID, "at-1")]
    }
    scope = {"name": "my.library", "version": "1.0.0", "attributes": [text("my.scope.attribute", "some scope attribute")]}
    return json.dumps({"resourceSpans": [{"resource": resource, "scopeSpans": [{"scope": scope, "spans": list(spans)}]}]}).encode()


async def post(stack: Stack, path: str, body: bytes, **headers: str) -> tuple[int, str, Any]:
    sent = {**JSON, conventions.HEADER_ACK: "stored", **{name.replace("_", "-"): value for name, value in headers.items()}}
    async with aiohttp.ClientSession() as session, session.post(stack.http + path, data=body, headers=sent) as response:
        answer = await response.read()
        return response.status, response.content_type, json.loads(answer) if response.content_type == "application/json" else answer


async def test_a_json_request_is_stored_like_any_other(stack: Stack, reader: TraceReader) -> None:
    made = json_span(attributes=[text("my.span.attr", "some value"), {"key": "n", "value": {"intValue": "3"}}])
    assert await post(stack, "/v1/traces", json_request("ro-json", made)) == (200, "application/json", {})
    (found,) = await reader.spans(["ro-json"])
    assert (found.trace_id, found.span_id, found.name) == (made["traceId"].lower(), made["spanId"], "work")
    assert found.attributes == {"my.span.attr": "some value", "n": 3}


async def test_one_bad_json_span_is_refused_and_the_rest_is_kept(stack: Stack, reader: TraceReader) -> None:
    body = json_request("ro-json-part", json_span(), json_span(traceId="no hex"), json_span(parentSpanId="12"))
    status, kind, answer = await post(stack, "/v1/traces", body)
    assert (status, kind, answer["partialSuccess"]["rejectedSpans"]) == (200, "application/json", "2")
    assert "1 × trace id" in answer["partialSuccess"]["errorMessage"]
    assert len(await reader.spans(["ro-json-part"])) == 1


async def test_json_logs_are_taken(stack: Stack, reader: TraceReader) -> None:
    record = {"timeUnixNano": str(time.time_ns()), "severityNumber": 9, "severityText": "INFO", "body": {"stringValue": "hello"}}
    resource = {"attributes": [text(conventions.ROLLOUT_ID, "ro-json-logs"), text(conventions.ATTEMPT_ID, "at-1")]}
    body = json.dumps({"resourceLogs": [{"resource": resource, "scopeLogs": [{"logRecords": [record]}]}]}).encode()
    assert (await post(stack, "/v1/logs", body))[0] == 200
    (row,) = await reader.query("SELECT Body, SeverityNumber FROM otel_logs WHERE RolloutId = 'ro-json-logs'")
    assert row == {"Body": "hello", "SeverityNumber": 9}


async def test_json_that_is_not_a_request_gets_an_error_in_json(stack: Stack) -> None:
    status, kind, answer = await post(stack, "/v1/traces", b"{")
    assert (status, kind, answer["code"]) == (400, "application/json", 3)
    assert "OTLP/JSON" in answer["message"]


@pytest.mark.parametrize("encoding", ["gzip", "zstd", "deflate"])
async def test_compressed_bodies_are_taken(encoding: str, stack: Stack, reader: TraceReader) -> None:
    if encoding == "zstd":
        compress = pytest.importorskip("backports.zstd", reason="zstd is not installed").compress
    elif encoding == "deflate":
        compress = __import__("zlib").compress
    else:
        compress = gzip.compress
    rollout = f"ro-compressed-{encoding}"
    assert (await post(stack, "/v1/traces", compress(json_request(rollout, json_span())), Content_Encoding=encoding))[0] == 200
    plain = request_of([span()], {conventions.ROLLOUT_ID: rollout, conventions.ATTEMPT_ID: "at-1"}).SerializeToString()
    protobuf = "application/x-protobuf"
    assert (await post(stack, "/v1/traces", compress(plain), Content_Encoding=encoding, Content_Type=protobuf))[0] == 200
    assert len(await reader.spans([rollout])) == 2


async def test_an_unknown_encoding_gets_the_list_of_known_ones(stack: Stack) -> None:
    status, _, answer = await post(stack, "/v1/traces", b"x", Content_Encoding="br")
    assert status == 415
    assert "gzip" in answer["message"]


async def test_unknown_paths_and_methods_get_the_list_of_known_ones(stack: Stack) -> None:
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{stack.http}/v1/trace") as response:
            assert response.status == 404
            assert "POST /v1/traces" in await response.text()
        async with session.get(f"{stack.http}/v1/traces") as response:
            assert (response.status, response.headers["Allow"]) == (405, "POST")
            assert "takes POST, not GET" in await response.text()
