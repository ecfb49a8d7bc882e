"""Access control of model servers: this package's, the proxy of vLLM, and those that a run starts on a cluster."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from agl_otel.algorithms.grpo.model_port import require_key
from agl_otel.algorithms.grpo.policy import load_policy
from agl_otel.algorithms.grpo.sampler import Engine
from agl_otel.algorithms.grpo.server import make_app
from agl_otel.algorithms.grpo.vllm import Front
from agl_otel.errors import SettingsError
from agl_otel.net.auth import model_server_key
from agl_otel.net.http_server import listen, make_runner
from agl_otel.service.processes import Process

PLAIN = {"Content-Type": "text/plain"}
KEY = model_server_key("s3cret")
POSTS = ("/weights", "/v1/chat/completions")
NAMES = {
    "127.0.0.1:1": True,
    "[::1]": True,
    "localhost": True,
    "192.0.2.7": True,
    "stack.test:9": True,
    "evil.example": False,
    "[evil": False,
}
"""{Host header: whether it is accepted}."""


@asynccontextmanager
async def serving(app: web.Application) -> AsyncGenerator[str]:
    runner = make_runner(app)
    await runner.setup()
    try:
        yield f"http://127.0.0.1:{await listen(runner, '127.0.0.1', 0, None)}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def both(tiny_policy: Path) -> AsyncGenerator[list[str]]:
    """Run this package's server, and the proxy of a vLLM that does not run."""
    front = Front(Process("vLLM", ["true"], log=Path(os.devnull)), "http://127.0.0.1:9", "0", name="policy")
    async with Engine(load_policy(tiny_policy)) as engine, serving(make_app(engine)) as ours, serving(front.app()) as over_vllm:
        yield [ours, over_vllm]


async def status(method: str, url: str, **headers: str) -> int:
    body = b"{}" if method == "POST" else None
    async with aiohttp.ClientSession() as session, session.request(method, url, data=body, headers={**PLAIN, **headers}) as answer:
        return answer.status


async def test_weights_are_refused_for_foreign_hosts_and_origins(tiny_policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_ALLOWED_HOSTS", "stack.test")
    monkeypatch.setenv("AGL_TOKEN", "s3cret")  # not required by these servers; hosts and origins are checked nevertheless
    async with both(tiny_policy) as urls:
        for url in urls:
            for host, answered in NAMES.items():
                assert (await status("POST", f"{url}/weights", Host=host) == 403) is not answered, (url, host)
                assert (await status("GET", f"{url}/health", Host=host) == 403) is not answered, (url, host)
            for origin in ("http://evil.example", "null", "http://127.0.0.1:1"):
                for path in POSTS:
                    assert await status("POST", url + path, Origin=origin) == 403, (url, path, origin)
            assert await status("POST", f"{url}/weights", Origin=url) == 400


async def test_a_server_with_a_key_requires_it_and_refuses_weights(tiny_policy: Path) -> None:
    async with Engine(load_policy(tiny_policy)) as engine, serving(make_app(engine, host="192.0.2.7", key=KEY, loads=False)) as url:
        for given in ("", "Bearer", f"Bearer {KEY}x", "Bearer s3cret", KEY):
            for method, path in (("GET", "/v1/models"), ("GET", "/health"), ("POST", "/v1/chat/completions"), ("POST", "/weights")):
                assert await status(method, url + path, Authorization=given) == 401, (path, given)
        assert await status("GET", f"{url}/v1/models", Authorization=f"Bearer {KEY}", Host="node.cluster") == 200
        assert await status("POST", f"{url}/v1/chat/completions", Authorization=f"Bearer {KEY}", Origin="http://evil.example") == 403
        assert await status("POST", f"{url}/weights", Authorization=f"Bearer {KEY}") == 404


def test_a_model_server_without_a_key_listens_on_loopback_only() -> None:
    require_key("127.0.0.1", "")
    require_key("192.0.2.7", KEY)
    with pytest.raises(SettingsError, match="AGL_TOKEN"):
        require_key("192.0.2.7", "")
    assert model_server_key("") == "" and model_server_key("a") != model_server_key("b")
