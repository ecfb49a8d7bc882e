"""Overhead of the model proxy with capture, against the model server alone, a plain pass-through and litellm's proxy.

python -m bench.proxy
python -m bench.proxy --only growth                # one of: latency, cost, rate, litellm, growth, beside

litellm is installed into its own environment, outside the project (tests/environments.py). The bars, against a pass-through without capture
where none else is named: at most 2.03 times its CPU a call (1.3 is aimed at), at most 0.68 ms added to its median call on one connection
(0.25), at most 25 us of CPU per streamed chunk, at least 10 times litellm's calls a second, and a call of a 200-turn conversation stored in
at most 1.3 times the bytes of one of 20 turns.
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
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from agl_otel.queue.client import QueueClient
from agl_otel.traces.reader import TraceReader
from agl_otel.types import LLM, EnqueueRolloutRequest
from bench.harness import (
    Turn,
    cpu_seconds,
    free_port,
    percentile,
    process,
    report,
    report_absent,
    report_against_bar,
    run_bench,
    services,
    take_turns,
)
from bench.start import ROOT, up
from tests.environments import LITELLM, AbsentError, installed

CPU, ADDED_MS, CHUNK_US, GROWTH = 2.03, 0.68, 25.0, 1.3
SHORT, LONG = 20, 200
CHUNKS = 200
PLAIN = "a pass-through that reads no answer"
PROMPT = list(range(1000, 1200))
REPLY = list(range(2000, 2050))
STORED = """
SELECT sum(byteSize(SpanAttributes, PromptTokenIds, ResponseTokenIds, ResponseLogprobs)) AS bytes
FROM otel_traces WHERE RolloutId = {rollout:String}
"""
ROLLOUTS = 10_000
PAGES = ("/rollouts", "/v1/agl/rollouts?limit=100&sort_order=desc", "/v1/agl/runs")
VIEW_SECONDS = 0.1
BODY: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "word " * 200}]}


def prompt_ids(messages: list[dict[str, str]]) -> list[int]:
    """Return one id per word of the prompts, and the sampled ids of replies."""
    if len(messages) == 1:
        return PROMPT
    parts = [REPLY if each["role"] == "assistant" else [1000 + len(word) for word in each["content"].split()] for each in messages]
    return [number for ids in parts for number in ids]


def answer(request_body: dict[str, Any]) -> dict[str, Any]:
    """Make a reply of 50 tokens to a prompt of 200 in vLLM's format."""
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": "word " * 50},
        "finish_reason": "stop",
        "logprobs": None,
    }
    whole: dict[str, Any] = {"id": "chatcmpl-1", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
    if request_body.get("logprobs"):
        choice["logprobs"] = {"content": [{"token": "word ", "logprob": -0.5, "bytes": None, "top_logprobs": []} for _ in REPLY]}
    if request_body.get("return_token_ids"):
        choice["token_ids"], whole["prompt_token_ids"] = REPLY, prompt_ids(request_body["messages"])
    return whole | {"usage": {"prompt_tokens": 200, "completion_tokens": 50, "total_tokens": 250}}


def chunk(request_body: dict[str, Any], number: int) -> bytes:
    """Make the event of one token of a stream."""
    finish = "stop" if number == CHUNKS - 1 else None
    choice: dict[str, Any] = {"index": 0, "delta": {"content": "word "}, "finish_reason": finish, "logprobs": None}
    whole: dict[str, Any] = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 0, "model": "policy", "choices": [choice]}
    if request_body.get("logprobs"):
        choice["logprobs"] = {"content": [{"token": "word ", "logprob": -0.5, "bytes": [119], "top_logprobs": []}]}
    if request_body.get("return_token_ids"):
        choice["token_ids"] = [2000]
        if number == 0:
            whole["prompt_token_ids"] = PROMPT
    return b"data: " + json.dumps(whole).encode() + b"\n\n"


async def model_server(port: int) -> None:
    """Serve a model that responds at once."""
    replies: dict[tuple[bool, bool], bytes] = {}

    async def chat(request: web.Request) -> web.StreamResponse:
        request_body = json.loads(await request.read())
        if not request_body.get("stream"):
            kind = (bool(request_body.get("logprobs")), bool(request_body.get("return_token_ids")))
            if len(request_body["messages"]) > 1 or kind not in replies:
                replies[kind] = json.dumps(answer(request_body)).encode()
            body = replies[kind]
            return web.Response(body=body, content_type="application/json")
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for number in range(CHUNKS):
            await response.write(chunk(request_body, number))
            await asyncio.sleep(0)  # sends each token as a separate chunk
        await response.write(b"data: [DONE]\n\n")
        return response

    await _serve(port, chat)


async def pass_through(port: int, url: str) -> None:
    """Serve the baseline: a server and client of aiohttp's, the same upstream requests, and answers forwarded unparsed."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def chat(request: web.Request) -> web.StreamResponse:
            request_body = {**json.loads(await request.read()), "logprobs": True, "return_token_ids": True}
            async with session.post(f"{url}/chat/completions", data=json.dumps(request_body).encode()) as response:
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
    """Make `count` calls from `clients` concurrent clients; return the seconds of each call."""
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
    """Make a turn that measures the median milliseconds of a call on one connection."""

    async def turn() -> float:
        return statistics.median(await send(url, count=count, clients=1)) * 1e3

    return turn


def rate(url: str, count: int, clients: int = 16) -> Turn:
    """Make a turn that measures calls a second."""

    async def turn() -> float:
        start = time.perf_counter()
        await send(url, count=count, clients=clients)
        return count / (time.perf_counter() - start)

    return turn


def cost(url: str, pid: int, count: int, *, stream: bool) -> Turn:
    """Make a turn that measures the process's CPU microseconds per call, or per streamed chunk, including its export thread."""

    async def turn() -> float:
        before = cpu_seconds(pid)
        await send(url, count=count, clients=4, stream=stream)
        return (cpu_seconds(pid) - before) / (count * (CHUNKS if stream else 1)) * 1e6

    return turn


@dataclass
class Servers:
    """Base URLs of the model server, the pass-through and our proxy (for one attempt), and the pids of the latter two."""

    upstream: str
    plain: str
    plain_pid: int
    ours: str
    pid: int
    attempt: Callable[[], Awaitable[str]]
    """Starts an attempt; returns its base URL."""
    stored: Callable[[str], Awaitable[int]]
    """Returns the bytes of the stored spans of the attempt with this base URL."""


@contextlib.asynccontextmanager
async def stack(directory: Path, upstream: str, plain: str, plain_pid: int) -> AsyncGenerator[Servers]:
    """Run queue, collector and proxy."""
    async with (
        services(directory, "queue", "collector", "proxy") as made,
        QueueClient(made.queue) as queue,
        TraceReader(made.clickhouse) as reader,
    ):
        update = await queue.put_resources({"llm": LLM(endpoint=upstream, model="policy")})

        async def attempt() -> str:
            (started,) = await queue.start([EnqueueRolloutRequest(input=1, resources_id=update.resources_id)])
            return f"{made.proxy}/rollout/{started.rollout_id}/attempt/{started.attempt.attempt_id}/v1"

        async def stored(url: str) -> int:
            async with aiohttp.ClientSession() as session, session.post(f"{url.removesuffix('/v1')}/close") as response:
                assert response.status == 200, await response.text()
            await made.barrier()
            (row,) = await reader.query(STORED, params={"rollout": url.split("/")[4]})
            return int(row["bytes"])

        yield Servers(upstream, plain, plain_pid, await attempt(), made.pids["proxy"], attempt, stored)


@contextlib.asynccontextmanager
async def litellm(python: str, directory: Path, upstream: str) -> AsyncGenerator[str]:
    """Run litellm's proxy in front of the same model server; yield its base URL."""
    port = free_port()
    entry = {"model_name": "policy", "litellm_params": {"model": "hosted_vllm/policy", "api_base": upstream, "api_key": "x"}}
    config = directory / "litellm.json"
    config.write_text(json.dumps({"model_list": [entry]}))  # JSON is YAML
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"}
    environment["LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY"] = "true"  # it serves only this benchmark, on 127.0.0.1
    command = [python, "-c", "from litellm import run_server; run_server()"]
    command += ["--config", str(config), "--port", str(port), "--host", "127.0.0.1"]
    async with process(command, environment, port, start_seconds=300.0):  # its imports take a minute on a busy machine
        yield f"http://127.0.0.1:{port}/v1"


async def latencies(servers: Servers, count: int, rounds: int) -> None:
    """Measure the latency that our proxy adds to the pass-through's on one connection, and both to the model server's."""
    metric = "p50, one connection"
    for name, url in ((metric, servers.ours), (f"{metric}, {PLAIN}", servers.plain)):
        contest = await take_turns(latency(url, count), latency(servers.upstream, count), rounds=rounds)
        report("proxy", name, "ms", contest, against="no proxy")
    contest = await take_turns(latency(servers.ours, count), latency(servers.plain, count), rounds=rounds)
    added = statistics.median(ours - plain for ours, plain in zip(*contest, strict=True))
    report_against_bar("proxy", f"added to {metric}, of {PLAIN}", added, "ms", ADDED_MS)


async def costs(servers: Servers, count: int, rounds: int) -> None:
    """Measure the CPU of the proxy's process, including export."""
    for name, unit, stream in (("CPU a call", "us/call", False), ("CPU a streamed chunk", "us/chunk", True)):
        size = max(count // 5, 20) if stream else count
        ours, theirs = cost(servers.ours, servers.pid, size, stream=stream), cost(servers.plain, servers.plain_pid, size, stream=stream)
        contest = await take_turns(ours, theirs, rounds=rounds)
        report("proxy", name, unit, contest, against=PLAIN)
        if stream:
            report_against_bar("proxy", name, statistics.median(contest.ours), unit, CHUNK_US)
        else:
            report_against_bar("proxy", f"{name}, of {PLAIN}", contest.ratio, "ratio", CPU)


async def rates(servers: Servers, count: int, rounds: int) -> None:
    """Measure calls a second of 16 clients; all processes share this machine."""
    contest = await take_turns(rate(servers.ours, count), rate(servers.plain, count), rounds=rounds)
    report("proxy", "calls, 16 clients", "calls/s", contest, against=PLAIN)


async def growth(servers: Servers, *_: int) -> None:
    """Measure the stored bytes per turn of a conversation of 200 turns against one of 20."""
    sizes: list[float] = []
    for turns in (SHORT, LONG):
        url = await servers.attempt()
        messages: list[dict[str, str]] = [{"role": "system", "content": "word " * 200}]
        async with aiohttp.ClientSession() as session:
            for turn in range(turns):
                messages.append({"role": "user", "content": f"{turn} " + "word " * 50})
                async with session.post(f"{url}/chat/completions", json={"model": "policy", "messages": messages}) as response:
                    answered = json.loads(await response.read())
                messages.append({"role": "assistant", "content": answered["choices"][0]["message"]["content"]})
        sizes.append(await servers.stored(url) / turns)
    more = {"bytes_of_20": round(sizes[0]), "bytes_of_200": round(sizes[1])}
    report_against_bar("proxy", "stored bytes a turn, 200 turns against 20", sizes[1] / sizes[0], "ratio", GROWTH, **more)


async def beside(servers: Servers, count: int, rounds: int) -> None:
    """Measure the latency of calls while somebody loads the dashboard's pages of 10,000 rollouts, ten times a second."""
    with up(ROOT) as started:
        async with QueueClient(started.address, timeout_seconds=120) as queue, aiohttp.ClientSession() as session:
            update = await queue.put_resources({"llm": LLM(endpoint=servers.upstream, model="policy")})
            task = EnqueueRolloutRequest(input=1, resources_id=update.resources_id)
            await queue.enqueue([task] * ROLLOUTS)
            (one,) = await queue.start([task])
            addresses = await queue.describe()
            url = f"{addresses.proxy}/rollout/{one.rollout_id}/attempt/{one.attempt.attempt_id}/v1"

            async def view() -> None:
                while True:
                    for page in PAGES:
                        async with session.get(f"{addresses.web}{page}") as answer:
                            assert answer.status == 200, await answer.text()
                            await answer.read()
                    await asyncio.sleep(VIEW_SECONDS)

            async def viewed() -> float:
                viewing = asyncio.create_task(view())
                try:
                    return await alone()
                finally:
                    viewing.cancel()
                    await asyncio.gather(viewing, return_exceptions=True)

            async def alone() -> float:
                return percentile(await send(url, count=count, clients=1), 0.99) * 1e3

            contest = await take_turns(viewed, alone, rounds=rounds)
            report("proxy", "p99, one connection, beside a viewer of the dashboard", "ms", contest, against="no viewer")


PARTS = {"latency": latencies, "cost": costs, "rate": rates, "growth": growth, "beside": beside}


async def main(arguments: argparse.Namespace) -> None:
    """Run all comparisons, or the requested one."""
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
        servers = await held.enter_async_context(stack(directory, upstream, plain, plain_pid))
        for name, part in PARTS.items():
            if arguments.only in ("", name):
                await part(servers, count, rounds)
        if arguments.only in ("", "litellm"):
            try:
                python = arguments.litellm_python or str(installed("litellm", LITELLM) / "bin" / "python")
                other = await held.enter_async_context(litellm(python, directory, upstream))
            except (AbsentError, RuntimeError) as reason:
                report_absent("proxy", "calls, 16 clients", "calls/s", str(reason))
            else:
                contest = await take_turns(rate(servers.ours, count), rate(other, max(count // 5, 20)), rounds=rounds)
                report("proxy", "calls, 16 clients", "calls/s", contest, against="litellm's proxy")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=500, help="calls a turn (a tenth of them streamed)")
    parser.add_argument("--only", default="", choices=["", *PARTS, "litellm"], help="one comparison; all by default")
    parser.add_argument("--litellm-python", default="", help="an interpreter that has litellm[proxy]")
    parser.add_argument("--model", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--pass-through", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--upstream", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.model:
        asyncio.run(model_server(given.model))
    elif given.pass_through:
        asyncio.run(pass_through(given.pass_through, given.upstream))
    else:
        run_bench(main(given))
