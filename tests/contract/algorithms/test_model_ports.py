"""Ports of model servers: access to this package's, to the proxy of vLLM, and to those that a run starts on a cluster; a full disk."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from agl_otel.algorithms.grpo.model_port import require_key
from agl_otel.algorithms.grpo.policy import load_policy
from agl_otel.algorithms.grpo.sampler import Engine, Record
from agl_otel.algorithms.grpo.server import make_app
from agl_otel.algorithms.grpo.vllm import Front
from agl_otel.errors import SettingsError
from agl_otel.net.auth import model_server_key
from agl_otel.net.http_server import listen, make_runner
from agl_otel.service.processes import Process
from tests.small_disk import no_file_over

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


async def test_how_many_calls_are_being_answered_is_told(tiny_policy: Path) -> None:
    """Also while one is sampled, and after one that failed: by it a server that is replaced is ended when it answers nobody."""
    body = {"messages": [{"role": "user", "content": "1"}], "max_tokens": 8}
    async with Engine(load_policy(tiny_policy)) as engine, serving(make_app(engine)) as url, aiohttp.ClientSession() as session:

        async def come_to(count: int) -> None:
            while True:
                async with session.get(f"{url}/health") as answer:
                    if (await answer.json())["answering"] == count:
                        return
                await asyncio.sleep(0.01)

        before = engine.submit
        go = asyncio.Event()

        async def held(job: Any) -> Any:
            await go.wait()
            return await before(job)

        engine.submit = held
        calls = [asyncio.create_task(session.post(f"{url}/v1/chat/completions", json=body)) for _ in range(3)]
        async with session.post(f"{url}/v1/chat/completions", json={}) as refused:
            assert refused.status == 400
        await come_to(3)
        go.set()
        assert [answer.status for answer in await asyncio.gather(*calls)] == [200] * 3
        await come_to(0)


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
        for given in ("", "Bearer", f"Bearer {KEY}x", "Bearer s3cret", f"Basic {KEY}"):
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


async def test_json_that_is_nested_too_deeply_is_the_callers_mistake(tiny_policy: Path) -> None:
    body = b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    async with Engine(load_policy(tiny_policy)) as engine, serving(make_app(engine)) as url, aiohttp.ClientSession() as session:
        for path in POSTS:
            async with session.post(f"{url}{path}", data=body, headers={"Content-Type": "application/json"}) as answer:
                assert answer.status == 400 and "not JSON that can be read" in await answer.text()


async def asked(url: str, **more: Any) -> tuple[int, str]:
    body = {"messages": [{"role": "user", "content": "digit 437"}], "max_tokens": 4, **more}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/chat/completions", json=body) as answer:
        return answer.status, await answer.text()


async def test_a_call_whose_sample_cannot_be_recorded_fails_with_the_file_and_the_remedy(tiny_policy: Path) -> None:
    """The record is evidence: what it lacks is not given out. /dev/full is a disk without room."""
    record = Record(Path("/dev/full"))
    async with Engine(load_policy(tiny_policy), record=record) as engine, serving(make_app(engine)) as url:
        status, text = await asked(url)
        error = json.loads(text)["error"]
        assert (status, error["type"]) == (507, "server_error")
        assert "the model server's record /dev/full cannot be written, its disk is full" in error["message"]
        assert "make room" in error["message"]
        status, text = await asked(url, stream=True)
        last = text.strip().splitlines()[-1]
        assert status == 200 and json.loads(last.removeprefix("data: "))["error"] == error, "a stream has begun by then"
        engine.record = None
        assert (await asked(url))[0] == 200
    record.close()


async def test_a_record_has_whole_lines_after_a_disk_was_full(tiny_policy: Path, tmp_path: Path) -> None:
    record = Record(path := tmp_path / "record.jsonl")
    async with Engine(load_policy(tiny_policy), record=record) as engine, serving(make_app(engine)) as url:
        assert (await asked(url))[0] == 200
        with no_file_over(path.stat().st_size + 10):
            status, text = await asked(url, n=2)
            assert status == 503 and f"{path} cannot be written: File too large" in text
        first = json.loads((await asked(url))[1])
    record.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 2 and lines[1]["id"] == first["id"]
