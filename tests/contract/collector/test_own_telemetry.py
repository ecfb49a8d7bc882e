"""The collector's own telemetry: /status, /metrics, its log and the command line."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import subprocess
from collections import Counter
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest

from agl_otel.collector.grpc_port import METHODS
from agl_otel.collector.http_port import PROTOBUF
from agl_otel.net.front import HTTP2_PREFACE
from agl_otel_hook import conventions
from tests.command import run_command

from .otlp import post_spans, request_of, span
from .stack import Stack


async def get(stack: Stack, path: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(stack.http + path) as response:
        return response.status, await response.text()


async def numbers(stack: Stack) -> dict[str, Any]:
    """Return {metric, or metric/attribute value: value, or a histogram's count}."""
    _, text = await get(stack, "/status")
    found: dict[str, Any] = {}
    for name, points in json.loads(text)["metrics"].items():
        for point in points:
            key = "/".join([name.removeprefix("agl.collector."), *point["attributes"].values()])
            found[key] = point.get("value", point.get("count"))
    return found


async def test_every_stage_of_a_span_is_counted(own_stack: Stack) -> None:
    await own_stack.start_queue()
    await own_stack.start_collector()
    bad = span("work", {conventions.ROLLOUT_ID: "no good"})
    first = request_of([span(), span(), bad], {conventions.ROLLOUT_ID: "ro-1", conventions.ATTEMPT_ID: "at-1"})
    await post_spans(own_stack, first)
    await post_spans(own_stack, first, ack="stored")
    await post_spans(own_stack, request_of([span()]), ack="stored", agl_rollout_id="ro-2")
    await post_spans(own_stack, request_of([span()]), ack="stored")
    attempt = span(conventions.SPAN_ATTEMPT, {conventions.ROLLOUT_ID: "ro-3"})
    other = span(conventions.SPAN_ATTEMPT, {conventions.ROLLOUT_ID: "ro-4"}, trace=attempt.trace_id)
    child = span("child", trace=attempt.trace_id)
    await post_spans(own_stack, request_of([attempt, child]), ack="stored")
    await post_spans(own_stack, request_of([other]), ack="stored")
    found = await numbers(own_stack)
    assert found["received/traces"] == 8
    assert found["accepted/traces"] == 7
    assert found["rejected/traces/rollout id breaks the rule [A-Za-z0-9._:-]{1,128}"] == 1
    assert {level: found[f"identified/{level}"] for level in ("span", "resource", "metadata", "trace")} == {
        "span": 2,
        "resource": 2,
        "metadata": 1,
        "trace": 1,
    }
    assert (found["unidentified"], found["ambiguous_traces"], found["resent"]) == (1, 1, 1)
    assert (found["requests"], found["logged"], found["inserted"], found["kept_aside"]) == (5, 5, 7, 0)
    assert (found["backlog"], found["in_flight_bytes"], found["disk_level"]) == (0, 0, 0)
    assert found["visible.duration"] == found["wait.duration"] == found["insert.duration"] == found["batches"]


async def test_every_refused_request_is_counted_by_its_reason_and_logged(own_stack: Stack) -> None:
    own_stack.environment |= {"AGL_TOKEN": "secret", "AGL_MAX_MESSAGE_BYTES": str(1 << 18), "AGL_METRICS": "false"}
    await own_stack.start_collector()
    token, protobuf, as_json = ({"Authorization": "Bearer secret"}, {"Content-Type": PROTOBUF}, {"Content-Type": "application/json"})
    gzipped = {"Content-Encoding": "gzip"}
    cases: list[tuple[str, str, bytes, dict[str, str]]] = [
        ("unauthorized", "/v1/traces", b"", protobuf),
        ("unauthorized", "/barrier", b"", {}),
        ("unknown_path", "/v1/trace", b"", token),
        ("content_type", "/v1/traces", b"<xml/>", token | {"Content-Type": "text/xml"}),
        ("encoding", "/v1/traces", b"x", token | protobuf | {"Content-Encoding": "br"}),
        ("too_large", "/v1/traces", b"x" * (1 << 18 | 1), token | protobuf),
        ("malformed", "/v1/traces", b"\xff", token | protobuf),  # taken ahead of aiohttp
        ("malformed", "/v1/traces", b"{", token | as_json),
        ("malformed", "/v1/traces", b"no gzip", token | protobuf | gzipped),
        ("malformed", "/v1/traces", gzip.compress(b"x" * 1000, mtime=0)[:-9], token | protobuf | gzipped),
        ("crowded", "/v1/traces", b"\x0a\x00" * 20_000, token | protobuf),
        ("crowded", "/v1/traces", b"[" + b"{}," * 20_000, token | as_json),
        ("switched_off", "/v1/metrics", b"x", token | protobuf),
    ]
    async with aiohttp.ClientSession() as session:
        for reason, path, body, headers in cases:
            async with session.post(own_stack.http + path, data=body, headers=headers, skip_auto_headers=["Content-Type"]) as response:
                assert 400 <= response.status < 500 or reason == "switched_off", (reason, await response.read())
        async with session.get(own_stack.http + "/status", headers=token) as response:
            points = (await response.json())["metrics"]["agl.collector.refused_requests"]
    expected = Counter(reason for reason, *_ in cases)
    assert {point["attributes"]["reason"]: point["value"] for point in points} == expected
    lines = [line for line in own_stack.log.read_text().splitlines() if " WARNING agl_otel.collector.refusals refused 1 request (" in line]
    assert len(lines) == len(expected)
    async with grpc.aio.insecure_channel(own_stack.grpc) as channel:
        known = (("authorization", "Bearer secret"),)
        for metadata, method, body in (
            ((), METHODS[0], b"\xff"),
            (known, METHODS[0], b"\xff"),
            (known, METHODS[0], b"x" * (1 << 18 | 1)),
            ((), "/no.Such/Method", b"\xff"),
        ):
            call = channel.unary_unary(method, request_serializer=bytes, response_deserializer=bytes)
            with pytest.raises(grpc.aio.AioRpcError):
                await call(body, metadata=metadata)
    async with aiohttp.ClientSession(headers=token) as session, session.get(own_stack.http + "/status") as response:
        points = (await response.json())["metrics"]["agl.collector.refused_requests"]
    of_grpc = {point["attributes"]["reason"]: point["value"] for point in points if point["attributes"]["transport"] == "grpc"}
    assert of_grpc == {"unauthorized": 1, "malformed": 1, "too_large": 1, "unknown_path": 1}


async def test_a_grpc_client_at_the_port_of_http_is_refused_and_counted(stack: Stack) -> None:
    _, before = await get(stack, "/status")
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.settings.otlp_http_port)
    writer.write(HTTP2_PREFACE)
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 400 ") and f"gRPC is at {stack.grpc} (AGL_OTLP_GRPC_PORT)".encode() in answer
    async with grpc.aio.insecure_channel(stack.http.removeprefix("http://")) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="HTTP status 400"):
            await channel.unary_unary(METHODS[0], request_serializer=bytes, response_deserializer=bytes)(b"")
    _, after = await get(stack, "/status")
    assert _refused(after, "other_protocol") >= _refused(before, "other_protocol") + 2
    assert "(other_protocol), the last over http: this is the port of OTLP over HTTP" in stack.log.read_text()


async def test_the_log_names_items_refused_alone_and_the_core_in_plain_python(own_stack: Stack) -> None:
    own_stack.environment |= {"AGL_CORE": "python"}
    await own_stack.start_collector()
    answer = await post_spans(own_stack, request_of([span(), span(values={conventions.ROLLOUT_ID: "a b"})]))
    assert answer.partial_success.rejected_spans == 1
    assert (await numbers(own_stack))["compiled_core"] == 0
    log = own_stack.log.read_text()
    assert "refused 1 item of traces in accepted requests, the last: 1 × rollout id breaks the rule" in log
    assert "requests are read by the core in plain Python" in log


def _refused(status: str, reason: str) -> int:
    points = json.loads(status)["metrics"].get("agl.collector.refused_requests", [])
    return sum(point["value"] for point in points if point["attributes"]["reason"] == reason)


async def test_prometheus_reads_the_same_numbers(stack: Stack) -> None:
    status, text = await get(stack, "/metrics")
    if status == 503:
        assert "opentelemetry-exporter-prometheus" in text
        pytest.skip("opentelemetry-exporter-prometheus is not installed")
    await post_spans(stack, request_of([span()]), ack="stored")
    _, text = await get(stack, "/metrics")
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    found = await numbers(stack)
    assert float(lines['agl_collector_accepted_total{signal="traces"}']) == found["accepted/traces"]
    assert float(lines["agl_collector_visible_duration_seconds_count"]) == found["visible.duration"]
    assert float(lines["agl_collector_log_budget_bytes"]) == 4 << 30


async def status_command(stack: Stack, *args: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(run_command, ("collector", "status", *args), os.environ)


async def test_the_command_prints_the_status_of_every_collector(stack: Stack) -> None:
    shown = await status_command(stack, "--store", stack.queue, "--json")
    assert shown.returncode == 0, shown.stderr
    (found,) = json.loads(shown.stdout)
    assert (found["address"], found["disk"]["level"]) == (stack.http, "ok")
    table = await status_command(stack, "--store", stack.queue)
    assert (table.returncode, "visible.duration" in table.stdout) == (0, True)


async def test_the_command_reports_what_is_missing(own_stack: Stack) -> None:
    nothing = await status_command(own_stack, "--data-dir", str(own_stack.settings.data_dir))
    assert (nothing.returncode, "agl-otel up" in nothing.stderr) == (1, True)
    await own_stack.start_queue()
    alone = await status_command(own_stack, "--store", own_stack.queue)
    assert (alone.returncode, "no collector has registered" in alone.stderr) == (1, True)


async def test_the_log_can_be_json_lines(own_stack: Stack) -> None:
    own_stack.settings.log_format = "json"
    await own_stack.start_collector()
    await own_stack.end("collector")
    lines = [json.loads(line) for line in own_stack.log.read_text().splitlines()]
    assert any("the collector serves on" in line["message"] and line["logger"] == "agl_otel.collector" for line in lines)
