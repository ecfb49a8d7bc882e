"""A model server that answers with a redirect: it is not followed, and the agent's error names its origin."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from agl_otel.proxy.dialects import DIALECTS
from agl_otel.proxy.upstream import FixedUpstreams, Upstream
from agl_otel_hook import conventions
from tests.contract.proxy.stand import HELLO, SCOPE, Stand, proxy
from tests.otlp_receiver import OtlpReceiver

PROMPT = "a secret of the prompt"
KEY = "key-of-the-provider"


class Lure:
    """A server of another origin: `url`, and the requests that reached it."""

    def __init__(self) -> None:
        self.came: list[tuple[str, str, str]] = []
        self.status = 307
        self.location: str | None = None
        self._runners: list[web.AppRunner] = []

    async def start(self) -> None:
        self.url = await self._serve(self._take)
        self.upstream = f"{await self._serve(self._redirect)}/v1"

    async def _serve(self, handle: Any) -> str:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(app, access_log=None)
        self._runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def _take(self, request: web.Request) -> web.Response:
        self.came.append((request.method, request.path, await request.text()))
        return web.json_response({"stolen": True})

    async def _redirect(self, _: web.Request) -> web.Response:
        headers = {"Location": f"{self.url}/inside?token=x" if self.location is None else self.location}
        return web.Response(status=self.status, headers={name: value for name, value in headers.items() if value})

    async def stop(self) -> None:
        for runner in self._runners:
            await runner.cleanup()


@pytest.fixture
async def lure() -> AsyncIterator[Lure]:
    lure = Lure()
    await lure.start()
    yield lure
    await lure.stop()


@pytest.fixture
async def stand(receiver: OtlpReceiver, lure: Lure) -> AsyncIterator[Stand]:
    async with proxy(receiver, FixedUpstreams(Upstream(lure.upstream, api_key=KEY))) as stand:
        yield stand


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("path", [*DIALECTS, "messages/count_tokens"])
async def test_a_redirect_is_an_error_that_names_its_origin(stand: Stand, lure: Lure, path: str, status: int) -> None:
    lure.status = status
    body = {"model": "m", "messages": [{"role": "user", "content": PROMPT}], "prompt": PROMPT, "input": PROMPT, "max_tokens": 1}
    answered, answer, headers = await stand.post(f"{SCOPE}/v1/{path}", body)
    assert (answered, answer["error"]["code"]) == (502, "redirect")
    assert f"redirects to {lure.url}," in answer["error"]["message"] and "token=x" not in json.dumps(answer)
    assert "location" not in headers and lure.came == []


async def test_the_list_of_models_follows_no_redirect(stand: Stand, lure: Lure) -> None:
    async with aiohttp.ClientSession() as session, session.get(f"{stand.url}{SCOPE}/v1/models", allow_redirects=False) as answer:
        assert answer.status == 502 and lure.url in (await answer.json())["error"]["message"]
    assert lure.came == []


async def test_a_redirected_call_is_recorded_with_the_reason_and_not_retried(receiver: OtlpReceiver, lure: Lure) -> None:
    async with proxy(receiver, FixedUpstreams(Upstream(lure.upstream), Upstream(lure.upstream + "/"))) as stand:
        status, _, _ = await stand.post(f"{SCOPE}/v1/chat/completions", {"model": "m", "messages": HELLO})
        (span,) = await stand.calls()
    assert status == 502 and span.error and lure.came == []
    assert span.attributes[conventions.LLM_INCOMPLETE] == "upstream_redirect" and conventions.LLM_TRIES not in span.attributes


@pytest.mark.parametrize(
    ("location", "words"),
    [
        ("/elsewhere", "redirects to another path of its own"),
        ("", "HTTP 307 without a location"),
        ("javascript:alert(1)", "HTTP 307 without a location"),
        ("http://[", "HTTP 307 without a location"),
        ("//other.example/x", "redirects to http://other.example,"),
        ("https://user:word@other.example:8443/x", "redirects to https://other.example:8443,"),
    ],
)
async def test_what_a_redirect_names_is_shown_as_an_origin_only(stand: Stand, lure: Lure, location: str, words: str) -> None:
    lure.location = location
    status, answer, _ = await stand.post(f"{SCOPE}/v1/chat/completions", {"model": "m", "messages": HELLO})
    assert status == 502 and words in answer["error"]["message"] and "word" not in answer["error"]["message"].replace(words, "")
