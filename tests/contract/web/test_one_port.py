"""OTLP over HTTP, metrics and cross-origin requests on the port of `agl-otel store`."""

from __future__ import annotations

import asyncio
import gzip
import os
import re
import time
from functools import partial
from pathlib import Path

import aiohttp
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from agl_otel.collector.readings import COUNTERS, GAUGES
from agl_otel.queue.client import QueueClient
from agl_otel.runner.metrics import RunnerMeters
from agl_otel.settings import PORTS, Settings
from agl_otel.stack.supervisor import Stack
from agl_otel_hook import conventions
from tests.contract.web.conftest import ORIGIN, Web
from tests.environments import ROOT
from tests.system.stack_process import until

PROTOBUF = {"Content-Type": "application/x-protobuf"}


def request_of(rollout_id: str, attempt_id: str, names: list[str]) -> bytes:
    request, now = ExportTraceServiceRequest(), time.time_ns()
    group = request.resource_spans.add()
    for key, value in ((conventions.ROLLOUT_ID, rollout_id), (conventions.ATTEMPT_ID, attempt_id)):
        group.resource.attributes.append(KeyValue(key=key, value=AnyValue(string_value=value)))
    trace_id = os.urandom(16)
    group.scope_spans.add().spans.extend(
        Span(trace_id=trace_id, span_id=os.urandom(8), name=name, start_time_unix_nano=now - 1000, end_time_unix_nano=now) for name in names
    )
    return request.SerializeToString()


@pytest.mark.parametrize("compressed", [False, True])
def test_otlp_posted_to_the_port_can_be_read_from_it(web: Web, compressed: bool) -> None:
    begun = web.rest("POST", "/rollouts", {"input": 1}).json
    body = request_of(begun["rollout_id"], begun["attempt"]["attempt_id"], ["one", "two"])
    headers = {**PROTOBUF, conventions.HEADER_ACK: "stored"}
    if compressed:
        body, headers = gzip.compress(body), {**headers, "Content-Encoding": "gzip", "Accept-Encoding": "gzip"}
    answer = web.call("POST", "/v1/traces", body, headers)
    assert answer.status == 200, answer
    response = gzip.decompress(answer.body) if answer.headers.get("Content-Encoding") == "gzip" else answer.body
    assert ExportTraceServiceResponse.FromString(response).partial_success.rejected_spans == 0
    spans = web.rest("GET", "/spans", {"rollout_id": begun["rollout_id"]}).json
    assert [(span["name"], span["sequence_id"]) for span in spans["items"]] == [("one", 1), ("two", 2)]
    rollout = partial(web.rest, "GET", f"/rollouts/{begun['rollout_id']}")
    until(lambda: rollout().json["status"] == "running", "the queue hears of a span, and the rollout is running")


def test_bytes_that_are_not_otlp_are_refused_by_the_collector(web: Web) -> None:
    assert web.call("POST", "/v1/traces", b"not protobuf", PROTOBUF).status == 400
    assert web.call("POST", "/v1/traces", b"<xml/>", {"Content-Type": "text/xml"}).status in (400, 415)
    assert web.call("POST", "/v1/traces", b"", PROTOBUF).status == 200


@pytest.mark.parametrize("path", ["/metrics", "/v1/prometheus", "/v1/prometheus/"])
def test_metrics_are_one_page(web: Web, path: str) -> None:
    web.rest("POST", "/queues/rollouts/enqueue", {"rollouts": [{"input": 1}]})
    answer = web.call("GET", path)
    assert answer.status == 200 and answer.headers["Content-Type"].startswith("text/plain")
    samples = dict(line.rsplit(" ", 1) for line in answer.body.decode().splitlines() if line and not line.startswith("#"))
    assert float(samples['agl_rollouts{status="queuing"}']) >= 1 and float(samples["agl_claimable"]) >= 1
    assert any(name.startswith("agl_collector_inserted_total") for name in samples), sorted(samples)[:20]
    assert float(samples['agl_store_total{method="enqueue_many_rollouts",status="OK",store_pubmeth="enqueue_many_rollouts"}']) >= 1
    assert float(samples['agl_http_total{method="POST",path="/v1/agl/queues/rollouts/enqueue",status="201"}']) >= 1
    alone = web.call("GET", path + "?relay=0").body.decode()
    assert "\nagl_http_total{" in alone and "agl_store_total" not in alone and "agl_collector_inserted" not in alone
    text = answer.body.decode()
    heads = [line for line in text.splitlines() if line.startswith("# TYPE ")]
    assert len(heads) == len(set(heads)), "each metric is described once"


async def test_metrics_of_several_collectors_are_labelled(web: Web) -> None:
    where = web.rest("GET", "/describe").json
    url, queue_address = where["collectors"][0], where["queue"]
    twin = url.replace("127.0.0.1", "localhost")  # the same collector by another address
    async with QueueClient(queue_address) as queue:
        await queue.announce("collector", twin, {"collector_http": twin})
        try:
            text = await asyncio.to_thread(lambda: web.call("GET", "/metrics").body.decode())
        finally:
            await queue.announce("collector", twin, {"collector_http": twin}, gone=True)
    samples = {line.rsplit(" ", 1)[0] for line in text.splitlines()}
    for each in (url, twin):
        assert {f'agl_collector_up{{collector="{each}"}}', f'agl_collector_batches_total{{collector="{each}"}}'} <= samples
    assert text.count("# TYPE agl_collector_batches_total counter") == 1


def test_docs_name_every_metric(web: Web) -> None:
    def names(text: str) -> set[str]:
        return {line.split(" ")[2] for line in text.splitlines() if line.startswith("# TYPE ")}

    exposed = (
        names(web.call("GET", "/metrics").body.decode())
        | names(web.of("proxy").call("GET", "/metrics").body.decode())
        | names(RunnerMeters().meters.text())
    )
    exposed -= {name for name in exposed if name.startswith("agl_training_") or name == "target_info"}  # what trainers record
    listed = set(re.findall(r"^\| `(agl_\w+)`", (ROOT / "docs" / "metrics.md").read_text(), flags=re.MULTILINE))
    made = {f"agl_collector_{name}_total" for name, *_ in COUNTERS} | {f"agl_collector_{name}" for name, *_ in GAUGES}
    made |= {f"agl_collector_{what}_duration_seconds" for what in ("wait", "insert", "visible")}
    assert exposed | made == listed, (
        f"docs/metrics.md lacks {sorted((exposed | made) - listed)}; no page has {sorted(listed - exposed - made)}"
    )


async def test_metrics_show_that_the_collector_is_down_beside_all_others(tmp_path: Path) -> None:
    settings = Settings.load(data_dir=tmp_path / "data", **dict.fromkeys(PORTS, 0))
    async with Stack(settings, only=("queue", "web")) as stack, aiohttp.ClientSession() as session:
        address = stack.addresses()["web"].partition("://")[2]
        async with session.get(f"http://{address}/metrics") as answer:
            text = await answer.text()
    assert answer.status == 200
    assert "\nagl_collector_up 0" in text and "\nagl_claimable 0" in text and "\n# TYPE agl_verdicts_total" in text


def test_only_pages_of_a_configured_origin_may_call(web: Web) -> None:
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    allowed = web.call("OPTIONS", "/v1/agl/rollouts", headers={"Origin": ORIGIN, **asks})
    assert allowed.status == 204 and allowed.headers["Access-Control-Allow-Origin"] == ORIGIN
    assert "POST" in allowed.headers["Access-Control-Allow-Methods"] and "Content-Type" in allowed.headers["Access-Control-Allow-Headers"]
    for path in ("/v1/agl/rollouts", "/v1/agl/rollouts/ro-none", "/health"):  # errors too: a page must be able to read them
        answer = web.call("GET", path, headers={"Origin": ORIGIN})
        assert answer.headers["Access-Control-Allow-Origin"] == ORIGIN, (path, answer.status)
        assert web.call("GET", path, headers={"Origin": "http://other.example"}).headers["Access-Control-Allow-Origin"] is None
    assert web.call("OPTIONS", "/v1/agl/rollouts", headers={"Origin": "http://other.example", **asks}).status != 204


def test_cross_site_pages_cannot_change_anything(web: Web) -> None:
    """A form, or a fetch without CORS, sends text/plain without a preflight."""
    body, plain_text = b'{"input": "from a page"}', {"Content-Type": "text/plain"}
    before = web.rest("GET", "/rollouts").json["total"]
    for origin in ("http://other.example", "null", "http://127.0.0.1:1", "https://" + web.url.partition("://")[2].replace("127", "128")):
        answer = web.call("POST", "/v1/agl/queues/rollouts/enqueue", body, {"Origin": origin, **plain_text})
        assert answer.status == 403 and b"may not call this service" in answer.body, origin
    assert web.rest("GET", "/rollouts").json["total"] == before
    assert web.call("POST", "/v1/agl/sql", b'{"query": "SELECT 1"}', {"Origin": web.url}).status == 200
    assert web.call("POST", "/v1/agl/sql", b'{"query": "SELECT 1"}', {"Origin": ORIGIN}).status == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_cross_site_pages_cannot_time_a_read(web: Web, site: str) -> None:
    """A browser sends cross-site reads without a preflight; the page can measure when the response arrives, but not read it."""
    fetched = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "empty"}
    followed = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    framed = {**followed, "Sec-Fetch-Dest": "iframe"}
    sql = "/?query=SELECT%201"
    for service, path in (
        ("web", "/v1/agl/rollouts"),
        ("web", "/health"),
        ("clickhouse", sql),
        ("proxy", "/health"),
        ("collector_http", "/health"),
    ):
        for sent in (fetched, followed, framed):
            for method in ("GET", "HEAD", "OPTIONS", "POST"):
                answer = web.of(service).call(method, path, headers=sent)
                assert answer.status == 403, (service, method, sent)
                assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
        for own in ("same-origin", "none"):
            answer = web.of(service).call("GET", path, headers={**fetched, "Sec-Fetch-Site": own})
            assert (answer.status, answer.headers["Cross-Origin-Resource-Policy"]) == (200, "same-origin")
    for page, sent, status in (
        ("/", fetched, 403),
        ("/rollouts/ro-1", framed, 403),
        ("/", followed, 200),
        ("/rollouts/ro-1", followed, 200),
    ):
        answer = web.call("GET", page, headers=sent)
        assert (answer.status if b"not built here" not in answer.body else 200) == status, (page, sent)
        assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
    allowed = {**fetched, "Sec-Fetch-Mode": "cors", "Origin": ORIGIN}
    assert web.call("GET", "/v1/agl/rollouts", headers=allowed).status == 200
    assert web.of("clickhouse").call("GET", sql, headers=allowed).status == 403, "it is the web service that pages may call"


def test_an_unknown_host_name_is_refused(web: Web) -> None:
    assert web.call("GET", "/v1/agl/rollouts", headers={"Host": "0.0.0.0:4748"}).status == 403, "browsers say nothing of whose page asks"
    assert web.call("GET", "/v1/agl/rollouts", headers={"Host": "rebound.example"}).status == 403
    assert web.call("GET", "/v1/agl/rollouts", headers={"Host": "localhost:1"}).status == 200
    assert web.call("GET", "/v1/agl/rollouts", headers={"Host": "[::1]:4748"}).status == 200
