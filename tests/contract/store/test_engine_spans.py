"""Spans of the model server itself, as of vLLM with --otlp-traces-endpoint: below the call, in the attempt, and no call of their own."""

from __future__ import annotations

from io import StringIO
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from rich.console import Console

from agl_otel.adapters.tree import TraceTree
from agl_otel.cli.render import span_trees
from agl_otel.proxy.upstream import FixedUpstreams, Upstream
from agl_otel.store import LightningStore
from agl_otel.types import AttemptedRollout
from agl_otel_hook import conventions
from tests.contract.proxy.stand import HELLO, proxy
from tests.model_server import ModelServer

LATENCIES = {"gen_ai.latency.time_in_queue": 0.001, "gen_ai.latency.time_to_first_token": 0.02, "gen_ai.latency.e2e": 0.5}


class Engine:
    """A model server that continues the trace of a request by OpenTelemetry's SDK and exports its span before it answers."""

    def __init__(self, collector: str) -> None:
        self.served = ModelServer({"/v1/chat/completions": self._chat})
        self._provider = TracerProvider(resource=Resource.create({"service.name": "vllm"}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=f"{collector}/v1/traces")))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        headers = {name: request.headers[name] for name in ("traceparent", "tracestate") if name in request.headers}
        context = TraceContextTextMapPropagator().extract(headers)
        attributes: dict[str, Any] = {
            "gen_ai.response.model": "m",
            "gen_ai.request.id": "cmpl-1",
            "gen_ai.usage.prompt_tokens": 7,
            **LATENCIES,
        }
        self._provider.get_tracer("vllm.llm_engine").start_span("llm_request", context, SpanKind.SERVER, attributes).end()
        self._provider.force_flush()
        return await self.served._chat(request)  # pyright: ignore[reportPrivateUsage]  # as it would answer

    async def stop(self) -> None:
        await self.served.stop()
        self._provider.shutdown()


@pytest.mark.parametrize("traceparent", ["", f"00-{'a' * 32}-{'b' * 16}-01"], ids=["a trace of the call's own", "the agent's trace"])
async def test_a_span_of_the_engine_is_below_its_call(store: LightningStore, begun: AttemptedRollout, traceparent: str) -> None:
    await store.open()
    assert store.description.collector_http is not None
    engine = Engine(store.description.collector_http)
    await engine.served.start()
    collector: Any = SimpleNamespace(grpc_address=store.description.collector_grpc)
    scope = f"/rollout/{begun.rollout_id}/attempt/{begun.attempt.attempt_id}"
    headers = {"traceparent": traceparent} if traceparent else {}
    async with (
        proxy(collector, FixedUpstreams(Upstream(engine.served.url))) as stand,
        stand.client(f"{scope}/v1", **headers) as client,
    ):
        await client.chat.completions.create(model="m", messages=HELLO)
    await engine.stop()
    await store.reader.barrier()
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{store.description.collector_http}/maintain", json={"since": 0}) as answer,
    ):
        assert answer.status == 200, await answer.text()  # maintenance does so every few seconds
    traces = await store.traces([begun.rollout_id], deadline_seconds=0)
    spans = {span.name: span for span in await store.spans(begun.rollout_id)}
    call, of_engine = spans[conventions.SPAN_LLM], spans["llm_request"]
    assert (of_engine.trace_id, of_engine.parent_id, of_engine.attempt_id) == (call.trace_id, call.span_id, begun.attempt.attempt_id)
    assert {name: of_engine.attributes[name] for name in LATENCIES} == LATENCIES
    outline = {span.name: span for span in (await store.reader.outline(begun.rollout_id, limit=10))[0]}
    assert outline["llm_request"].parent_id == call.span_id and not outline["llm_request"].is_call
    verdict = traces.verdicts[begun.rollout_id, begun.attempt.attempt_id]
    assert verdict.kind == "complete" and verdict.notes[0].startswith("1 span is not counted"), verdict
    assert len(traces.calls) == 1 and len(TraceTree.from_spans([*spans.values()]).find_llm_calls()) == 1
    out = StringIO()
    for tree in span_trees([*spans.values()]):
        Console(file=out, width=200, color_system=None).print(tree)
    lines = out.getvalue().splitlines()
    assert lines[-2].startswith(conventions.SPAN_LLM) and "── llm_request" in lines[-1], lines
