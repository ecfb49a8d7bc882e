"""A handler that raises is answered as JSON under /v1, and counted as a crash."""

from __future__ import annotations

import logging

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from agl_otel.telemetry.http import Requests
from agl_otel.telemetry.meters import Meters
from agl_otel.web.json_errors import json_crashes, json_errors


async def test_a_crash_is_json_and_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(_: web.Request) -> web.Response:
        raise LookupError("inside")

    meters = Meters()
    app = web.Application(middlewares=[json_crashes, Requests(meters).counted, json_errors])
    app.router.add_get("/v1/agl/broken", fail)
    async with TestClient(TestServer(app)) as client:
        with caplog.at_level(logging.ERROR):
            answer = await client.get("/v1/agl/broken")
        assert (answer.status, await answer.json()) == (500, {"detail": "the service failed (LookupError): its log says where"})
    assert "LookupError: inside" in caplog.text
    assert 'status="520"' in meters.text()
