"""Whether the model server of a trial can be reached: each situation, its text and its remedy."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from aiohttp import web

from agl_otel.cli.findings import State
from agl_otel.cli.model_server_check import Answer, ModelServer, ask_for_models, find_model_server, model_server_finding
from agl_otel.settings import Settings, free_port

HERE = ModelServer("http://gpu:8000/v1", "OPENAI_BASE_URL", "sk-secret", "OPENAI_API_KEY")
KEYLESS = ModelServer("https://api.openai.com/v1", "OpenAI's, for neither OPENAI_BASE_URL nor AGL_UPSTREAM_URL is set")
MEND = "start the model server, or correct its address (OPENAI_BASE_URL)"

CASES: dict[str, tuple[ModelServer, Answer, State, str, str]] = {
    "it lists its models": (HERE, Answer(200, "{}"), "good", "http://gpu:8000/v1 (OPENAI_BASE_URL)", ""),
    "it has no list of models": (HERE, Answer(404, "Not Found"), "good", "http://gpu:8000/v1 (OPENAI_BASE_URL)", ""),
    "it does not answer": (
        HERE,
        Answer(0, "it did not answer within 10 s"),
        "wrong",
        "http://gpu:8000/v1 cannot be reached: it did not answer within 10 s",
        MEND,
    ),
    "its key is wrong": (
        HERE,
        Answer(401, "invalid api key"),
        "wrong",
        "http://gpu:8000/v1 answers HTTP 401: the key in OPENAI_API_KEY is refused: invalid api key",
        "set OPENAI_API_KEY to a key of this server, or correct its address (OPENAI_BASE_URL)",
    ),
    "there is no key": (
        KEYLESS,
        Answer(401, "no key"),
        "wrong",
        "https://api.openai.com/v1 answers HTTP 401: there is no key: OPENAI_API_KEY and AGL_UPSTREAM_KEY are not set: no key",
        "set OPENAI_API_KEY to a key of this server, or correct its address "
        "(OpenAI's, for neither OPENAI_BASE_URL nor AGL_UPSTREAM_URL is set)",
    ),
    "its key may not list models": (
        HERE,
        Answer(403, "missing scope"),
        "advice",
        "http://gpu:8000/v1 (OPENAI_BASE_URL); with the key in OPENAI_API_KEY it shows no models: HTTP 403: missing scope",
        "if its calls fail, too, use another key",
    ),
    "it is starting": (
        HERE,
        Answer(503, "loading"),
        "wrong",
        "http://gpu:8000/v1 answers HTTP 503: loading",
        f"wait until it is up, or see its log; {MEND}",
    ),
    "a running stack has none": (
        ModelServer("http://127.0.0.1:4000/v1", "AGL_UPSTREAM_URL of the stack at 127.0.0.1:4747", by_proxy=True),
        Answer(404, "this call names no rollout: use the base URL that the runner gives"),
        "wrong",
        "there is none: AGL_UPSTREAM_URL of the stack at 127.0.0.1:4747 is not set",
        "start that stack with AGL_UPSTREAM_URL (and AGL_UPSTREAM_KEY), or give OPENAI_BASE_URL to this command",
    ),
    "the proxy of a running stack does not reach it": (
        ModelServer("http://127.0.0.1:4000/v1", "AGL_UPSTREAM_URL of the stack at 127.0.0.1:4747", by_proxy=True),
        Answer(502, "the model server http://gpu:8000/v1 cannot be reached or broke off: refused"),
        "wrong",
        "the model server http://gpu:8000/v1 cannot be reached or broke off: refused",
        "start the model server, or correct its address (AGL_UPSTREAM_URL of the stack at 127.0.0.1:4747)",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_an_answer_is_explained(case: str) -> None:
    server, answer, state, detail, remedy = CASES[case]
    found = model_server_finding(server, answer)
    assert (found.state, found.detail, found.remedy) == (state, detail, remedy)
    assert "sk-secret" not in f"{found}{server}"


async def test_what_is_not_reached_is_named_with_the_whole_reason() -> None:
    async def told(url: str, seconds: float = 10.0) -> str:
        answer = await ask_for_models(ModelServer(url, "here"), seconds=seconds)
        assert answer.status == 0
        return answer.text

    port = free_port()
    assert await told(f"http://127.0.0.1:{port}/v1") == f"Connection refused: [Errno 111] Connect call failed ('127.0.0.1', {port})"
    assert (await told("http://no-such-host.invalid/v1")).startswith("there is no host 'no-such-host.invalid': ")
    assert await told("gpu:8000/v1") == "this is no http:// or https:// address"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert await told(f"http://127.0.0.1:{silent.getsockname()[1]}/v1", seconds=0.1) == "it did not answer within 0.1 s"


async def test_it_is_asked_with_the_key_and_no_redirect_is_followed() -> None:
    asked: list[str] = []

    async def models(request: web.Request) -> web.Response:
        asked.append(request.headers["authorization"])
        return web.json_response({"data": []})

    async def forbidden(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "no such key"}}, status=401)

    async def moved(_: web.Request) -> web.Response:
        return web.Response(status=308, headers={"location": "https://elsewhere.example/models"})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_get("/moved/models", moved)
    app.router.add_get("/closed/models", forbidden)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    base = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        assert (await ask_for_models(ModelServer(f"{base}/v1/", "here", "sk-1", "there"))).status == 200
        answer = await ask_for_models(ModelServer(f"{base}/moved", "here", "sk-1", "there"))
        assert await ask_for_models(ModelServer(f"{base}/closed", "here")) == Answer(401, "no such key")
    finally:
        await runner.cleanup()
    assert asked == ["Bearer sk-1"]
    assert answer.status == 0 and "redirects to https://elsewhere.example" in answer.text


def test_the_settings_that_its_address_and_key_come_from_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "AGL_UPSTREAM_URL", "AGL_UPSTREAM_KEY", "AGL_STORE"):
        monkeypatch.delenv(name, raising=False)

    def found() -> tuple[str, str, str, str]:
        server = asyncio.run(find_model_server(Settings.load(data_dir=tmp_path / "data")))
        return server.base_url, server.came_from, server.key, server.key_from

    assert found() == (KEYLESS.base_url, KEYLESS.came_from, "", "")
    (tmp_path / "agl.toml").write_text('upstream_url = "http://file:1/v1"\nupstream_key = "k"\n')
    assert found() == ("http://file:1/v1", "upstream_url in agl.toml", "k", "upstream_key in agl.toml")
    monkeypatch.setenv("AGL_UPSTREAM_URL", "http://variable:1/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
    assert found() == ("http://variable:1/v1", "AGL_UPSTREAM_URL", "k", "upstream_key in agl.toml")
    (tmp_path / "agl.toml").write_text("")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://sdk:1/v1")
    assert found() == ("http://sdk:1/v1", "OPENAI_BASE_URL", "sk-1", "OPENAI_API_KEY")
