"""One `agl-otel store` process for all tests of the web service."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.message import Message
from typing import Any, Final
from urllib.parse import urlencode

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue

from agl_otel.settings import free_port
from agl_otel_hook import conventions
from tests.contract.collector.otlp import span_request
from tests.system.stack_process import Command, naming, until

ORIGIN = "http://page.example"
CALL_SECONDS = 60.0


@dataclass(frozen=True)
class Answer:
    """An HTTP response."""

    status: int
    headers: Message[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Web:
    """An HTTP client of one address."""

    def __init__(self, url: str, jaeger: str = "", token: str = "") -> None:
        self.url = url
        self.token = token
        self.jaeger = jaeger
        """host:port of Jaeger's remote storage; empty if it is off."""

    def call(self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None) -> Answer:
        """Send one request. An error status is returned, not raised."""
        own = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        request = urllib.request.Request(self.url + path, data=body, headers={**own, **(headers or {})}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=CALL_SECONDS) as answer:
                return Answer(answer.status, answer.headers, answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, error.headers, error.read())

    def of(self, service: str) -> Web:
        """Return a client of another service of the stack."""
        return Web(self.rest("GET", "/describe").json[service], token=self.token)

    def rest(self, method: str, path: str, given: Any = None) -> Answer:
        """Call a route below /v1/agl; `given` is the query of a GET and the JSON body of a POST."""
        path = "/v1/agl" + path
        if method == "GET":
            return self.call("GET", path + (f"?{urlencode(given, doseq=True)}" if given else ""))
        return self.call("POST", path, json.dumps({} if given is None else given).encode(), {"Content-Type": "application/json"})


OTLP: Final = {"Content-Type": "application/x-protobuf", conventions.HEADER_ACK: "stored"}


def with_bytes(rollout_id: str, attempt_id: str) -> ExportTraceServiceRequest:
    """Build a request of one span whose attributes, and those of its event and resource, have bytes that are not UTF-8."""
    request = span_request([(rollout_id, attempt_id)], spans=1)
    sent = request.resource_spans[0].scope_spans[0].spans[0]
    value = AnyValue(array_value=ArrayValue(values=[AnyValue(bytes_value=b"\xff\xfe")]))
    pairs = [KeyValue(key="raw", value=AnyValue(bytes_value=b"\xff\xfe")), KeyValue(key="list", value=value)]
    sent.events.add(name="e", time_unix_nano=sent.start_time_unix_nano)
    for place in (sent, sent.events[0], request.resource_spans[0].resource):
        place.attributes.extend(pairs)
    return request


@pytest.fixture(scope="package")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Web]:
    folder = tmp_path_factory.mktemp("store")
    arguments = ["--port", "0", "--queue-port", "0", "--data-dir", str(folder / "data"), "--cors-origin", ORIGIN, "--json"]
    jaeger = free_port()
    with Command("store", *arguments, log=folder / "store.log", cwd=folder, env={"AGL_JAEGER_PORT": str(jaeger)}) as command:
        until(lambda: '"url"' in command.output or command.process.poll() is not None, "it says where it is")
        assert command.process.poll() is None, command.output
        output = next(line for line in command.output.splitlines() if line.startswith("{"))
        yield Web(json.loads(output)["url"], f"127.0.0.1:{jaeger}")
    assert naming(folder) == []
