"""Answers of the web service to pages of other origins."""

from __future__ import annotations

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from agl_otel.web.app import ORIGINS, allow_origin, cors

ORIGIN = "http://page.example"


async def in_pieces(request: web.Request) -> web.StreamResponse:
    """A long list, as routes.py sends it: its headers go before the handler ends."""
    answer = web.StreamResponse()
    await answer.prepare(request)
    await answer.write(b"[1, 2]")
    await answer.write_eof()
    return answer


@pytest.mark.parametrize(
    ("allowed", "origin", "told"), [(ORIGIN, ORIGIN, ORIGIN), ("*", ORIGIN, ORIGIN), (ORIGIN, "http://other", None), ("*", "", None)]
)
async def test_a_page_of_a_configured_origin_may_read_what_is_sent_in_pieces(allowed: str, origin: str, told: str | None) -> None:
    app = web.Application(middlewares=[cors])
    app[ORIGINS] = frozenset({allowed})
    app.on_response_prepare.append(allow_origin)
    app.router.add_get("/", in_pieces)
    async with TestClient(TestServer(app)) as client, client.get("/", headers={"Origin": origin} if origin else {}) as answer:
        assert await answer.json(content_type=None) == [1, 2]
        assert answer.headers.get("Access-Control-Allow-Origin") == told
