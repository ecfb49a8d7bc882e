"""What a client reports where something else than a stack answers, or the stack refuses its token."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agl_otel.errors import AglError, SettingsError, UnavailableError, UsageError
from agl_otel.queue.client import QueueClient
from agl_otel.store import LightningStore
from agl_otel.web.app import build_app
from tests.local_queue import LocalQueue

TOKEN = "s3cret"


async def refused(address: str, token: str = "") -> AglError:
    """Return the error of a first call to the stack at `address`."""
    with pytest.raises(AglError) as caught:
        async with LightningStore(address, token=token) as store:
            await store.statistics()
    return caught.value


@pytest.mark.parametrize(
    "answer",
    [
        web.json_response({"object": "list", "data": []}),
        web.json_response(["a list"]),
        web.Response(text="<html>a page</html>", content_type="text/html"),
        web.Response(text="{ no json", content_type="application/json"),
        web.json_response({"error": {"message": "Not Found"}}, status=404),
        web.json_response({"detail": "Method Not Allowed"}, status=405),
    ],
    ids=lambda answer: f"{answer.status}-{answer.text[:8]}",
)
async def test_another_http_service_is_no_stack(answer: web.Response) -> None:
    async def handle(_: web.Request) -> web.Response:
        return answer

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", handle)
    async with TestServer(application) as server:
        address = f"http://127.0.0.1:{server.port}"
        error = await refused(address)
        assert isinstance(error, UsageError) and str(error).startswith(f"what answers at {address} is no agl-otel stack"), error
        assert "\n" not in str(error) and "pydantic" not in str(error), error


async def test_a_web_service_that_is_not_ready_is_unavailable() -> None:
    async def handle(_: web.Request) -> web.Response:
        raise web.HTTPServiceUnavailable(text="the queue is down")

    application = web.Application()
    application.router.add_get("/{path:.*}", handle)
    async with TestServer(application) as server:
        error = await refused(f"http://127.0.0.1:{server.port}")
        assert isinstance(error, UnavailableError) and "503: the queue is down" in str(error)


async def test_an_http_port_without_its_scheme_is_reported_at_once() -> None:
    async with TestServer(web.Application()) as server, QueueClient(f"127.0.0.1:{server.port}", retry_seconds=300) as client:
        with pytest.raises(UnavailableError, match=f"speaks HTTP/1: .*http://127.0.0.1:{server.port}"):
            await client.describe()


async def test_another_grpc_port_is_no_queue() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    error = await refused(f"127.0.0.1:{port}")
    await server.stop(None)
    assert isinstance(error, UsageError) and f"127.0.0.1:{port} is no queue of agl-otel" in str(error) and "http://HOST:PORT" in str(error)


@pytest.fixture(params=["queue", "web"])
async def locked(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    """The address of a stack with a token."""
    async with LocalQueue(f"sqlite:///{tmp_path / 'queue.db'}", token=TOKEN) as queue:
        address = queue.server.service.address
        if request.param == "queue":
            yield address
            return
        store = LightningStore(address, token=TOKEN)
        async with store, TestServer(build_app(store, TOKEN)) as server:
            yield f"http://127.0.0.1:{server.port}"


async def test_a_wrong_token_and_a_missing_one_are_told_apart(locked: str) -> None:
    wrong, missing = await refused(locked, "guess"), await refused(locked)
    assert isinstance(wrong, SettingsError) and isinstance(missing, SettingsError)
    assert str(wrong) == f"the stack at {locked} does not accept this token: set AGL_TOKEN to the one that it was started with"
    assert str(missing) == f"the stack at {locked} wants a token, and none was given: set AGL_TOKEN to the one that it was started with"
