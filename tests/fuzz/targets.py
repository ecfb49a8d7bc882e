# ruff: noqa: E501 - tables of routes
"""The ports of a running stack, and the requests that each knows: from the OpenAPI document, the .proto files and the route tables."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from google.protobuf.descriptor import Descriptor
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from agl_otel.proxy.app import PREFIXES
from agl_otel.proxy.dialects import DIALECTS
from agl_otel.queue.proto import queue_pb2
from agl_otel.web.jaeger.proto import storage_pb2
from tests.contract.collector.otlp import request_of, span
from tests.fuzz.attacks import Route

# A service that says where it is is believed: whoever may call it may turn readers away.
TRUSTED: Final = frozenset({"Announce"})
OTLP: Final = {
    "/opentelemetry.proto.collector.trace.v1.TraceService/Export": ExportTraceServiceRequest.DESCRIPTOR,
    "/opentelemetry.proto.collector.logs.v1.LogsService/Export": ExportLogsServiceRequest.DESCRIPTOR,
    "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export": ExportMetricsServiceRequest.DESCRIPTOR,
}
_MESSAGES: Final = storage_pb2.DESCRIPTOR.message_types_by_name
JAEGER: Final = {
    f"/jaeger.storage.v2.{method}": (_MESSAGES[f"{request}Request"], stream)
    for method, request, stream in (
        ("TraceReader/GetServices", "GetOperations", False), ("TraceReader/GetOperations", "GetOperations", False),
        ("TraceReader/FindTraceIDs", "FindTraces", False), ("TraceReader/FindTraces", "FindTraces", True),
        ("TraceReader/GetTraces", "GetTraces", True), ("DependencyReader/GetDependencies", "GetDependencies", False),
    )
}  # fmt: skip
CALL: Final = (
    "model",
    "messages",
    "max_tokens",
    "temperature",
    "n",
    "stream",
    "logprobs",
    "tools",
    "prompt",
    "input",
    "seed",
    "system",
    "extra_body",
)


@dataclass(frozen=True)
class Target:
    """One port."""

    name: str
    address: str
    """host:port."""
    health: str = ""
    """What says that the service is well; empty: that it takes connections."""
    routes: Sequence[Route] = ()
    calm: str = ""
    """Where to post while attacks wait for what one of them was allowed to do: a paused proxy is told to go on."""
    methods: Mapping[str, tuple[Descriptor, bool]] = field(default_factory=dict[str, tuple[Descriptor, bool]])
    """Of gRPC: {method: (its request, whether it answers with a stream)}."""


def _http(url: str) -> str:
    return url.rpartition("://")[2]


def _otlp_routes() -> list[Route]:
    body = request_of([span()]).SerializeToString()
    routes = [Route("POST", f"/v1/{signal}", content_type="application/x-protobuf", body=body) for signal in ("traces", "logs", "metrics")]
    return [
        *routes,
        Route("POST", "/v1/traces", ("resourceSpans", "scopeSpans")),
        Route("POST", "/barrier", ("rollouts",)),
        Route("POST", "/delete", ("rollouts",)),
    ]


def _rest_routes(web: str) -> list[Route]:
    with urllib.request.urlopen(f"{web}/v1/agl/openapi.json", timeout=60) as answer:
        document: Any = json.load(answer)
    schemas = document.get("components", {}).get("schemas", {})

    def fields(operation: Any) -> tuple[str, ...]:
        named = [parameter["name"] for parameter in operation.get("parameters", []) if parameter["in"] == "query"]
        schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
        schema = schemas.get(schema.get("$ref", "").rpartition("/")[2], schema)
        return (*named, *schema.get("properties", ()))

    return [
        Route(method.upper(), path, fields(operation))
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
        if method in ("get", "post", "put", "patch", "delete")
    ]


def targets(stack: Mapping[str, str], jaeger: str) -> list[Target]:
    """All ports of a stack, by what `describe` says."""
    queue = queue_pb2.DESCRIPTOR.services_by_name["Queue"]
    calls = [Route("POST", f"{prefix}/{path}", CALL) for prefix in PREFIXES for path in DIALECTS]
    orders = [Route("POST", f"/{path}", ("attempts", "models")) for path in ("close", "pause", "resume", "model_list")]
    web = [*_rest_routes(stack["web"]), *_otlp_routes()[:3], Route("GET", "/metrics"), Route("GET", "/{x}"), Route("GET", "/assets/{x}")]
    viewers = [
        Route("GET", f"/api/{path}", ("service", "start", "end", "limit", "tags"))
        for path in ("services", "operations", "traces", "traces/{x}")
    ]
    sql = [Route(method, "/", ("query", "param_a", "default_format", "database")) for method in ("GET", "POST")]
    return [
        Target("queue", stack["queue"], methods={
            f"/{queue.full_name}/{m.name}": (m.input_type, bool(m.server_streaming)) for m in queue.methods if m.name not in TRUSTED
        }),
        Target("otlp-grpc", stack["collector_grpc"], f"{stack['collector_http']}/health", methods={name: (one, False) for name, one in OTLP.items()}),
        Target("otlp-http", _http(stack["collector_http"]), f"{stack['collector_http']}/health", _otlp_routes()),
        Target("clickhouse", _http(stack["clickhouse"]), f"{stack['clickhouse']}/ping", [*sql, Route("POST", "/", body=b"SELECT count() FROM otel_traces")]),
        Target("proxy", _http(stack["proxy"]), f"{stack['proxy']}/health", [*calls, *orders], f"{stack['proxy']}/resume"),
        Target("web", _http(stack["web"]), f"{stack['web']}/health", [*web, *viewers]),
        Target("jaeger", jaeger, f"{stack['web']}/health", methods=JAEGER),
    ]  # fmt: skip
