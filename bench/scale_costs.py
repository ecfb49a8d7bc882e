"""Measure the costs of a rollout, a span and a token on this machine, in real processes with few clients."""

from __future__ import annotations

import asyncio
import os
import platform
import random
import re
import sqlite3
import string
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import aiohttp
import numpy as np

from agl_otel.queue.client import QueueClient
from agl_otel.types import LLM, EnqueueRolloutRequest
from agl_otel_hook import conventions
from bench import proxy as proxy_bench
from bench.claimers import Job, claimers
from bench.harness import Services, below, cpu_seconds, free_port, process, resident_bytes, services
from bench.load import Address, drive
from bench.otlp import request_of, requests
from bench.scale import Costs

AGENT: Final = """
import time
from openai import OpenAI

OpenAI(max_retries=0).chat.completions.create(model="policy", messages=[{"role": "user", "content": "2 + 2?"}])
time.sleep(%s)
"""
FUNCTION: Final = "def agent(task):\n    return None\n"


Submit = Callable[[Job], Awaitable[int]]
"""Runs a job in the process of claimers."""


async def cpu_of(work: Callable[[], Awaitable[Any]], pid: int) -> float:
    """Run the work; return the CPU seconds of the process during it."""
    before = cpu_seconds(pid)
    await work()
    return cpu_seconds(pid) - before


async def measure_queue(made: Services, submit: Submit, costs: dict[str, float]) -> None:
    """Measure claims and reports, single and in batches."""

    def job(task: str, rollouts: int, clients: int = 1, limit: int = 1) -> Callable[[], Awaitable[int]]:
        return lambda: submit(Job("ours", made.queue, task, rollouts, clients, limit))

    await job("fill", 500)()
    await job("complete", 500, 8)()  # warm
    database = made.settings.data_dir / "queue.db"
    had = _rollout_bytes(database)
    costs["enqueue_cpu"] = await cpu_of(job("fill", 20_000), made.pids["queue"]) / 20_000
    costs["claim_cpu"] = await cpu_of(job("complete", 1500, 8), made.pids["queue"]) / 1500
    costs["claim_batched_cpu"] = await cpu_of(job("complete", 15_000, 8, 100), made.pids["queue"]) / 15_000
    costs["rollout_bytes"] = (_rollout_bytes(database) - had) / 20_000
    costs["queue_memory"] = resident_bytes(made.pids["queue"])


async def measure_collector(made: Services, costs: dict[str, float]) -> None:
    """Measure spans in large and small requests, with and without token ids."""
    address = Address(f"{made.otlp}/v1/traces")

    async def send(spans: int, clients: int, tokens: int = 0, seconds: float = 4.0) -> tuple[int, int, float]:
        """Send a load; return (requests, spans, CPU seconds of the collector)."""
        bodies, sent = requests(spans, token_ids=tokens), 0

        async def work() -> None:
            nonlocal sent
            sent = (await asyncio.to_thread(drive, address, bodies, seconds=seconds, clients=clients)).requests
            await made.barrier()

        cpu = await cpu_of(work, made.pids["collector"])
        return sent, sent * spans, cpu

    await send(60, 4, seconds=2.0)  # warm
    costs["request_cpu"], costs["span_cpu"] = fit_costs([await send(510, 2), await send(60, 1), await send(6, 8)])
    count, spans, cpu = await send(60, 2, tokens=800)
    tokens = 20 * 1000  # of 60 spans 20 are model calls, with 800 and 200 ids
    costs["token_cpu"] = max(0.0, cpu - count * costs["request_cpu"] - spans * costs["span_cpu"]) / (count * tokens)
    costs["span_bytes"] = await _stored_bytes(made, 0) / 60
    costs["token_bytes"] = (await _stored_bytes(made, 1000) / 60 - costs["span_bytes"]) / 1000
    costs["collector_memory"] = resident_bytes(made.pids["collector"])


async def measure_proxy(made: Services, costs: dict[str, float]) -> None:
    """Measure model calls, streamed and not; then the runner, whose agents call the same model."""
    port = free_port()
    async with (
        process([sys.executable, "-m", "bench.proxy", "--model", str(port)], dict(os.environ), port),
        process([sys.executable, "-m", "agl_otel.proxy"], made.environment, made.settings.proxy_port) as pid,
        QueueClient(made.queue) as queue,
    ):
        update = await queue.put_resources({"llm": LLM(endpoint=f"http://127.0.0.1:{port}/v1", model="policy")})
        (begun,) = await queue.start([EnqueueRolloutRequest(input=1, resources_id=update.resources_id)])
        url = f"{made.proxy}/rollout/{begun.rollout_id}/attempt/{begun.attempt.attempt_id}/v1"
        await proxy_bench.send(url, count=200, clients=4)  # warm
        costs["call_cpu"] = await cpu_of(lambda: proxy_bench.send(url, count=800, clients=2), pid) / 800
        streamed = await cpu_of(lambda: proxy_bench.send(url, count=60, clients=2, stream=True), pid) / 60
        costs["chunk_cpu"] = max(0.0, streamed - costs["call_cpu"]) / proxy_bench.CHUNKS
        costs["proxy_memory"] = resident_bytes(pid)
        await measure_runners(made, costs, f"http://127.0.0.1:{port}/v1")


async def measure_runners(made: Services, costs: dict[str, float], model: str) -> None:
    """Measure attempts of a warm command and of a function, in sequence, and the private memory of waiting agents."""
    folder = made.settings.data_dir / "agents"
    folder.mkdir()
    (folder / "agent.py").write_text(AGENT % 0)
    (folder / "waits.py").write_text(AGENT % 600)
    (folder / "function.py").write_text(FUNCTION)
    program = [sys.executable, "-m", "agl_otel.runner", "--store", made.queue]

    async def play(arguments: Sequence[str], rollouts: int) -> float:
        """Run rollouts; return the CPU seconds per rollout of a runner and its descendants, without the runner's start."""
        async with QueueClient(made.queue, timeout_seconds=120) as queue:
            update = await queue.put_resources({"llm": LLM(endpoint=model, model="policy")})
            child = await asyncio.create_subprocess_exec(
                *program, *arguments, env=made.environment, cwd=folder, stdout=asyncio.subprocess.DEVNULL
            )
            try:
                for count in (4, rollouts):
                    had = tree_cpu(child.pid)
                    tasks = [EnqueueRolloutRequest(input={"n": n}, resources_id=update.resources_id) for n in range(count)]
                    ids = [each.rollout_id for each in await queue.enqueue(tasks)]
                    async for done in queue.wait(ids, timeout_seconds=300):
                        assert all(each.status == "succeeded" for each in done), done
                used = tree_cpu(child.pid) - had
                if not costs.get("runner_memory"):
                    costs["runner_memory"] = sum(resident_bytes(pid) for pid in tree(child.pid))
            finally:
                child.terminate()
                await child.wait()
        return used / rollouts

    await _drained(made)
    costs["function_cpu"] = await play(["--function", "function.py:agent", "--concurrency", "1"], 100)
    costs.pop("runner_memory")
    costs["start_cpu"] = await play(["--warm", "--concurrency", "1", "--", sys.executable, "agent.py"], 30)
    eight = [*program, "--warm", "--concurrency", "8", "--", sys.executable, "waits.py"]
    costs["agent_memory"] = await _agent_memory(made, eight, folder, model)


async def _drained(made: Services) -> None:
    """Delete the rollouts that earlier measurements left in the queue."""
    async with QueueClient(made.queue) as queue:
        while waiting := await queue.query_rollouts(status_in=["queuing"], limit=500):
            await queue.delete([each.rollout_id for each in waiting])


async def _agent_memory(made: Services, command: Sequence[str], folder: Path, model: str) -> float:
    async with QueueClient(made.queue) as queue:
        update = await queue.put_resources({"llm": LLM(endpoint=model, model="policy")})
        child = await asyncio.create_subprocess_exec(*command, env=made.environment, cwd=folder, stdout=asyncio.subprocess.DEVNULL)
        try:
            await queue.enqueue([EnqueueRolloutRequest(input={"n": n}, resources_id=update.resources_id) for n in range(8)])
            deadline = time.monotonic() + 120
            while len(await queue.query_rollouts(status_in=["running"])) < 8:
                assert time.monotonic() < deadline, "eight agents do not run"
                await asyncio.sleep(0.2)
            await asyncio.sleep(2)  # they have called the model by now
            agents = max((_children(pid) for pid in tree(child.pid)), key=len)  # the children of the warm parent
            return sum(map(_private_bytes, agents)) / len(agents)
        finally:
            child.terminate()
            await child.wait()


def tree(pid: int) -> list[int]:
    """List a process and its descendants."""
    return [pid, *below(pid)]


def _children(pid: int) -> list[int]:
    return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]


def tree_cpu(pid: int) -> float:
    """Return the CPU seconds of a process and its descendants, including those that have ended."""
    total = 0.0
    for each in tree(pid):
        fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        total += sum(int(field) for field in fields[11:15]) / 100.0
    return total


def _private_bytes(pid: int) -> int:
    found = re.findall(r"^Private_\w+:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), flags=re.MULTILINE)
    return sum(map(int, found)) * 1024


def _rollout_bytes(database: Path) -> int:
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as opened:
        (pages,), (size,) = opened.execute("PRAGMA page_count").fetchone(), opened.execute("PRAGMA page_size").fetchone()
    opened.close()
    return int(pages) * int(size)


def fit_costs(runs: Sequence[tuple[int, int, float]]) -> tuple[float, float]:
    """Fit the CPU seconds of a request and of a span to runs of (requests, spans, CPU seconds), by least squares of relative errors."""
    counts, cpu = np.array([run[:2] for run in runs], float), np.array([run[2] for run in runs])
    request, span = np.linalg.lstsq(counts / cpu[:, None], np.ones(len(runs)), rcond=None)[0]
    return float(request), float(span)


async def _stored_bytes(made: Services, tokens: int, count: int = 60) -> float:
    """Return the stored bytes per request of 60 spans, each with 1.5 KB of random words and so many token ids, a fifth of them sampled."""
    chance = random.Random(tokens)
    vocabulary = ["".join(chance.choices(string.ascii_lowercase, k=chance.randint(2, 9))) for _ in range(5000)]
    had = _traces_bytes(made)
    async with aiohttp.ClientSession() as session:
        for number in range(count):
            spans = [_new_span(chance, vocabulary, tokens) for _ in range(60)]
            body = request_of(spans, {conventions.ROLLOUT_ID: f"ro-disk-{tokens}-{number}", conventions.ATTEMPT_ID: "at-1"})
            async with session.post(f"{made.otlp}/v1/traces", data=body, headers={"Content-Type": "application/x-protobuf"}) as answer:
                assert answer.status == 200, await answer.text()
    await made.barrier()
    return (_traces_bytes(made) - had) / count


def _new_span(chance: random.Random, vocabulary: Sequence[str], tokens: int) -> dict[str, Any]:
    prompt, reply = (" ".join(chance.choices(vocabulary, k=words)) for words in (130, 70))  # some 900 and 500 characters
    attributes: dict[str, Any] = {"gen_ai.input.messages": prompt, "gen_ai.output.messages": reply, "gen_ai.request.model": "policy"}
    if sampled := tokens // 5:
        attributes |= {
            conventions.LLM_PROMPT_TOKEN_IDS: chance.choices(range(150_000), k=tokens - sampled),
            conventions.LLM_RESPONSE_TOKEN_IDS: chance.choices(range(150_000), k=sampled),
            conventions.LLM_RESPONSE_LOGPROBS: [-chance.random() for _ in range(sampled)],
        }
    ids = {"trace_id": f"{chance.getrandbits(128):032x}", "span_id": f"{chance.getrandbits(64):016x}"}
    return {"name": conventions.SPAN_LLM, **ids, "attributes": attributes}


def _traces_bytes(made: Services) -> int:
    """Return the size of active parts on disk."""
    return _query_int(made, "SELECT sum(bytes_on_disk) FROM system.parts WHERE active AND database = 'otel'")


def _query_int(made: Services, sql: str) -> int:
    body = f"{sql} FORMAT TabSeparated".encode()
    with urllib.request.urlopen(f"http://127.0.0.1:{made.settings.clickhouse_port}/", data=body, timeout=60) as answer:
        return int(answer.read())


async def measure() -> dict[str, Any]:
    """Measure the costs of this machine; return them with the conditions."""
    costs: dict[str, float] = {}
    before = round(os.getloadavg()[0], 1)
    with tempfile.TemporaryDirectory(prefix="agl-bench-") as folder:
        async with services(Path(folder), "queue", "collector") as made, claimers() as submit:
            await measure_queue(made, submit, costs)
            await measure_collector(made, costs)
            await measure_proxy(made, costs)
    conditions = {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_average_before": before,
        "on": time.strftime("%Y-%m-%d"),
    }
    rounded = {each.name: float(f"{costs[each.name]:.4g}") for each in fields(Costs)}
    return {"conditions": conditions, "costs": rounded}
