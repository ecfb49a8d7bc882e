"""What the model proxy adds to a call, with capture, against the model server alone, a plain pass-through and litellm's proxy.

python -m bench.proxy
python -m bench.proxy --litellm-python PYTHON     # a Python with litellm[proxy] in an environment of its own
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from agl_otel.queue.client import QueueClient
from agl_otel.settings import Settings
from agl_otel.types import LLM, EnqueueRolloutRequest
from bench.harness import Contest, Turn, cpu_seconds, free_port, process, report, take_turns

CHUNKS = 200
PROMPT = list(range(1000, 1200))
REPLY = list(range(2000, 2050))
BODY: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "word " * 200}]}


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """A reply of 50 tokens to a prompt of 200, as vLLM writes it."""
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": "word " * 50},
        "finish_reason": "stop",
        "logprobs": None,
    }
    whole: dict[str, Any] = {"id": "chatcmpl-1", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
    if asked.get("logprobs"):
        choice["logprobs"] = {"content": [{"token": "word ", "logprob": -0.5, "bytes": None, "top_logprobs": []} for _ in REPLY]}
    if asked.get("return_token_ids"):
        choice["token_ids"], whole["prompt_token_ids"] = REPLY, PROMPT
    return whole | {"usage": {"prompt_tokens": 200, "completion_tokens": 50, "total_tokens": 250}}


def chunk(asked: dict[str, Any], number: int) -> bytes:
    """One token of a stream."""
    finish = "stop" if number == CHUNKS - 1 else None
    choice: dict[str, Any] = {"index": 0, "delta": {"content": "word "}, "finish_reason": finish, "logprobs": None}
    whole: dict[str, Any] = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 0, "model": "policy", "choices": [choice]}
    if asked.get("logprobs"):
        choice["logprobs"] = {"content": [{"token": "word ", "logprob": -0.5, "bytes": [119], "top_logprobs": []}]}
    if asked.get("return_token_ids"):
        choice["token_ids"] = [2000]
        if number == 0:
            whole["prompt_token_ids"] = PROMPT
    return b"data: " + json.dumps(whole).encode() + b"\n\n"


async def model_server(port: int) -> None:
    """A model that needs no time."""
    replies: dict[tuple[bool, bool], bytes] = {}

    async def chat(request: web.Request) -> web.StreamResponse:
        asked = json.loads(await request.read())
        if not asked.get("stream"):
            kind = (bool(asked.get("logprobs")), bool(asked.get("return_token_ids")))
            body = replies.setdefault(kind, json.dumps(answer(asked)).encode())
            return web.Response(body=body, content_type="application/json")
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for number in range(CHUNKS):
            await response.write(chunk(asked, number))
            await asyncio.sleep(0)  # one piece on the wire for each token
        await response.write(b"data: [DONE]\n\n")
        return response

    await _serve(port, chat)


async def pass_through(port: int, url: str) -> None:
    """The baseline: the same server and client library, asking for the same, bytes in and bytes out, nothing read."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def chat(request: web.Request) -> web.StreamResponse:
            asked = {**json.loads(await request.read()), "logprobs": True, "return_token_ids": True}
            async with session.post(f"{url}/chat/completions", data=json.dumps(asked).encode()) as response:
                if response.content_type != "text/event-stream":
                    return web.Response(body=await response.read(), content_type="application/json")
                out = web.StreamResponse(headers={"content-type": "text/event-stream"})
                await out.prepare(request)
                async for piece in response.content.iter_any():
                    await out.write(piece)
                return out

        await _serve(port, chat)


async def _serve(port: int, chat: Any) -> None:
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=1024).start()
    await asyncio.Event().wait()


async def send(url: str, *, count: int, clients: int, stream: bool = False) -> list[float]:
    """Make `count` calls by `clients` concurrent clients; the seconds that each took."""
    numbers, took = iter(range(count)), []
    body = json.dumps({**BODY, "stream": stream}).encode()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def client() -> None:
            for _ in numbers:
                start = time.perf_counter()
                async with session.post(f"{url}/chat/completions", data=body, headers={"content-type": "application/json"}) as response:
                    assert response.status == 200, await response.text()
                    await response.read()
                took.append(time.perf_counter() - start)

        await asyncio.gather(*(client() for _ in range(clients)))
    return took


def latency(url: str, count: int) -> Turn:
    """The median of one connection, in milliseconds."""

    async def turn() -> float:
        return statistics.median(await send(url, count=count, clients=1)) * 1e3

    return turn


def rate(url: str, count: int, clients: int = 16) -> Turn:
    """Calls a second."""

    async def turn() -> float:
        start = time.perf_counter()
        await send(url, count=count, clients=clients)
        return count / (time.perf_counter() - start)

    return turn


def cost(url: str, pid: int, count: int, *, stream: bool) -> Turn:
    """Microseconds of the proxy's CPU for each call, or each chunk of a streamed one; its export thread included."""

    async def turn() -> float:
        before = cpu_seconds(pid)
        await send(url, count=count, clients=4, stream=stream)
        return (cpu_seconds(pid) - before) / (count * (CHUNKS if stream else 1)) * 1e6

    return turn


@contextlib.asynccontextmanager
async def stack(directory: Path, upstream: str) -> AsyncGenerator[tuple[str, int]]:
    """Queue, collector and proxy; answers the base URL of an attempt, and the proxy's pid."""
    ports = dict.fromkeys(("queue_port", "otlp_grpc_port", "otlp_http_port", "clickhouse_port", "proxy_port"), 0)
    settings = Settings.load(data_dir=directory, **ports).with_ports()
    environment = {**os.environ, **settings.environment()}
    async with contextlib.AsyncExitStack() as held:
        await held.enter_async_context(process([sys.executable, "-m", "agl_otel.queue"], environment, settings.queue_port))
        await held.enter_async_context(process([sys.executable, "-m", "agl_otel.collector"], environment, settings.clickhouse_port))
        pid = await held.enter_async_context(process([sys.executable, "-m", "agl_otel.proxy"], environment, settings.proxy_port))
        async with QueueClient(f"127.0.0.1:{settings.queue_port}") as queue:
            update = await queue.put_resources({"llm": LLM(endpoint=upstream, model="policy")})
            (started,) = await queue.start([EnqueueRolloutRequest(input=1, resources_id=update.resources_id)])
        attempt = f"/rollout/{started.rollout_id}/attempt/{started.attempt.attempt_id}/v1"
        yield f"http://127.0.0.1:{settings.proxy_port}{attempt}", pid


@contextlib.asynccontextmanager
async def litellm(python: str, directory: Path, upstream: str) -> AsyncGenerator[str]:
    """litellm's proxy before the same model server; answers its base URL."""
    port = free_port()
    entry = {"model_name": "policy", "litellm_params": {"model": "hosted_vllm/policy", "api_base": upstream, "api_key": "x"}}
    config = directory / "litellm.json"
    config.write_text(json.dumps({"model_list": [entry]}))  # JSON is YAML
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"}
    command = [
        python,
        "-c",
        "from litellm import run_server; run_server()",
        "--config",
        str(config),
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
    ]
    async with process(command, environment, port, start_seconds=300.0):  # litellm imports for a minute on a busy machine
        yield f"http://127.0.0.1:{port}/v1"


async def main(arguments: argparse.Namespace) -> None:
    """Every comparison."""
    count, rounds = arguments.calls, arguments.rounds
    async with contextlib.AsyncExitStack() as held:
        directory = Path(held.enter_context(tempfile.TemporaryDirectory()))
        model_port, plain_port = free_port(), free_port()
        upstream, plain = f"http://127.0.0.1:{model_port}/v1", f"http://127.0.0.1:{plain_port}/v1"
        this = [sys.executable, "-m", "bench.proxy"]
        await held.enter_async_context(process([*this, "--model", str(model_port)], dict(os.environ), model_port))
        plain_pid = await held.enter_async_context(
            process([*this, "--pass-through", str(plain_port), "--upstream", upstream], dict(os.environ), plain_port)
        )
        ours, pid = await held.enter_async_context(stack(directory, upstream))
        contest = await take_turns(latency(ours, count), latency(upstream, count), rounds=rounds)
        added = Contest([a - b for a, b in zip(*contest, strict=True)], contest.baseline)
        report("proxy", "added to p50, one connection", "ms", added, against="the model server alone")
        against = "a pass-through that reads nothing"
        for name, unit, stream in (("CPU a call", "us/call", False), ("CPU a streamed chunk", "us/chunk", True)):
            size = max(count // 10, 20) if stream else count
            contest = await take_turns(cost(ours, pid, size, stream=stream), cost(plain, plain_pid, size, stream=stream), rounds=rounds)
            report("proxy", name, unit, contest, against=against)
        report(
            "proxy", "calls, 16 clients", "calls/s", await take_turns(rate(ours, count), rate(plain, count), rounds=rounds), against=against
        )
        if arguments.litellm_python:
            other = await held.enter_async_context(litellm(arguments.litellm_python, directory, upstream))
            contest = await take_turns(rate(ours, count), rate(other, max(count // 5, 20)), rounds=rounds)
            report("proxy", "calls, 16 clients", "calls/s", contest, against="litellm's proxy")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=500, help="calls a turn (a tenth of them streamed)")
    parser.add_argument("--litellm-python", default="", help="the interpreter of an environment that has litellm[proxy]")
    parser.add_argument("--model", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--pass-through", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--upstream", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.model:
        asyncio.run(model_server(given.model))
    elif given.pass_through:
        asyncio.run(pass_through(given.pass_through, given.upstream))
    else:
        asyncio.run(main(given))
