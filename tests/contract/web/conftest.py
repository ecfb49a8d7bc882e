"""One `agl-otel store` process for all tests of the web service."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.message import Message
from typing import Any
from urllib.parse import urlencode

import pytest

from agl_otel.settings import free_port
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
