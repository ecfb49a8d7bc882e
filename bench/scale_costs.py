"""What a rollout, a span and a token cost on this machine: real processes, few clients for the costs, other numbers for the points."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import random
import re
import sqlite3
import string
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import numpy as np

from agl_otel.queue.client import QueueClient
from agl_otel.settings import Settings
from agl_otel.types import LLM, EnqueueRolloutRequest
from agl_otel_hook import conventions
from bench import proxy as proxy_bench
from bench.claimers import Job, claimers
from bench.harness import below, cpu_seconds, free_port, process, resident_bytes
from bench.load import Address, drive
from bench.otlp import request_of, requests
from bench.scale_model import Costs

AGENT: Final = """
import time
from openai import OpenAI

OpenAI(max_retries=0).chat.completions.create(model="policy", messages=[{"role": "user", "content": "2 + 2?"}])
time.sleep(%s)
"""
FUNCTION: Final = "def agent(task):\n    return None\n"


@dataclass(frozen=True)
class Stack:
    """A queue and a collector with the embedded ClickHouse, real processes, and who claims."""

    settings: Settings
    folder: Path
    queue: int
    """Process ids."""
    collector: int
    have: Callable[[Job], Awaitable[int]]

    @property
    def queue_address(self) -> str:
        """host:port."""
        return f"127.0.0.1:{self.settings.queue_port}"

    @property
    def otlp(self) -> str:
        """The collector's HTTP address."""
        return f"http://127.0.0.1:{self.settings.otlp_http_port}"

    async def barrier(self) -> None:
        """Wait until all that was acked is stored."""
        async with aiohttp.ClientSession() as session, session.post(f"{self.otlp}/barrier") as answer:
            assert answer.status == 200, await answer.text()


@contextlib.asynccontextmanager
async def stack(folder: Path) -> AsyncGenerator[Stack]:
    """A fresh one."""
    ports = dict.fromkeys(("queue_port", "otlp_grpc_port", "otlp_http_port", "clickhouse_port", "proxy_port"), 0)
    settings = Settings.load(data_dir=folder, **ports).with_ports()
    environment = {**os.environ, **settings.environment(), "AGL_LOG_LEVEL": "ERROR"}
    async with (
        process([sys.executable, "-m", "agl_otel.queue"], environment, settings.queue_port) as queue,
        process([sys.executable, "-m", "agl_otel.collector"], environment, settings.clickhouse_port) as collector,
        claimers() as have,
    ):
        yield Stack(settings, folder, queue, collector, have)


async def timed(work: Callable[[], Awaitable[Any]], *pids: int) -> tuple[float, list[float], float]:
    """(seconds that it took, CPU seconds of each process, how many pieces of others' work wanted a core on average)."""
    before, start = [cpu_seconds(pid) for pid in pids], time.perf_counter()
    with Others() as others:
        await work()
    return time.perf_counter() - start, [cpu_seconds(pid) - had for pid, had in zip(pids, before, strict=True)], others.mean


class Others:
    """While the block runs: looks five times a second how many threads of the machine want a core that are not below this process."""

    def __init__(self) -> None:
        self._seen: list[int] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Others:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    @property
    def mean(self) -> float:
        """How many, on average."""
        return round(sum(self._seen) / max(1, len(self._seen)), 2)

    def _look(self) -> None:
        while not self._end.wait(0.2):
            running = re.search(rb"^procs_running (\d+)", Path("/proc/stat").read_bytes(), flags=re.MULTILINE)
            assert running is not None, "Linux says how many"
            self._seen.append(max(0, int(running[1]) - sum(map(_running, tree(os.getpid())))))


def _running(pid: int) -> int:
    found = 0
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += (task / "stat").read_text().rpartition(")")[2].split()[0] == "R"
    return found


def slowed(seconds: float, others: float) -> float:
    """How long so much work of one piece takes beside that of others, on the cores of this machine."""
    return seconds * max(1.0, (1 + others) / (os.cpu_count() or 1))


async def measure_queue(made: Stack, costs: dict[str, float], points: list[dict[str, Any]]) -> None:
    """Claims and reports: alone, in batches, and the point of 64 clients."""
    own = _child_pids("bench.claimers")
    clients = own[-1]

    def job(task: str, rollouts: int, clients: int = 1, limit: int = 1) -> Callable[[], Awaitable[int]]:
        return lambda: made.have(Job("ours", made.queue_address, task, rollouts, clients, limit))

    await job("fill", 500)()
    await job("complete", 500, 8)()  # warm
    database, had = made.folder / "queue.db", 0
    with contextlib.suppress(FileNotFoundError):
        had = _rollout_bytes(database)
    _, [cpu], _ = await timed(job("fill", 20_000), made.queue)
    costs["enqueue_cpu"] = cpu / 20_000
    _, [queue, client], _ = await timed(job("complete", 1500, 8), made.queue, clients)
    costs["claim_cpu"], costs["claim_client_cpu"] = queue / 1500, client / 1500
    seconds, _, others = await timed(job("complete", 200, 1), made.queue)
    costs["queue_wait"] = max(0.0, seconds / 200 - slowed(costs["claim_cpu"] + costs["claim_client_cpu"], others)) / 2
    seconds, [queue], others = await timed(job("complete", 15_000, 8, 100), made.queue)
    costs["claim_batched_cpu"] = queue / 15_000
    points.append(
        _point("claims", 15_000 / seconds / 100, others=others, clients=8, batch=100, unit="batches of 100 claimed and reported a second")
    )
    await job("fill", 2000)()
    for count in (8, 64):
        seconds, _, others = await timed(job("complete", 2000, count), made.queue)
        points.append(
            _point("claims", 2000 / seconds, others=others, clients=count, batch=1, unit="rollouts claimed and reported a second")
        )
        await job("fill", 2000)()
    costs["rollout_bytes"] = (_rollout_bytes(database) - had) / 26_500
    costs["queue_memory"] = resident_bytes(made.queue)


async def measure_collector(made: Stack, costs: dict[str, float], points: list[dict[str, Any]]) -> None:
    """Spans in large and small requests, with and without token ids; the point is a size between."""
    address = Address(f"{made.otlp}/v1/traces")

    async def send(spans: int, clients: int, tokens: int = 0, seconds: float = 4.0) -> tuple[float, float, float, int, float]:
        """(requests a second, CPU of the collector for each, of the client for each, requests, others' work)."""
        bodies = requests(spans, token_ids=tokens)
        own = time.process_time()
        sent: Any = None

        async def work() -> None:
            nonlocal sent
            sent = await asyncio.to_thread(drive, address, bodies, seconds=seconds, clients=clients)
            await made.barrier()

        took, [cpu], others = await timed(work, made.collector)
        fits.append((sent.requests, sent.requests * spans, cpu))
        return sent.requests / took, cpu / sent.requests, (time.process_time() - own) / sent.requests, sent.requests, others

    fits: list[tuple[int, int, float]] = []  # of each run: requests, spans, CPU
    await send(60, 4, seconds=2.0)  # warm
    fits.clear()
    await send(510, 2)
    await send(60, 1)
    rate, _, client, _, others = await send(6, 8)
    costs["span_client_cpu"] = client
    costs["request_cpu"], costs["span_cpu"] = fitted(fits)
    points.append(_point("spans", rate, others=others, clients=8, spans=6, unit="requests of 6 spans a second"))
    alone, _, _, _, others = await send(60, 1)
    costs["ack_wait"] = max(0.0, 1 / alone - slowed(costs["request_cpu"] + 60 * costs["span_cpu"] + client, others))
    rate, _, _, _, others = await send(60, 4)
    points.append(_point("spans", rate, others=others, clients=4, spans=60, unit="requests of 60 spans a second"))
    tokens = 20 * 1000  # of 60 spans 20 are model calls, with 800 and 200 ids
    _, with_tokens, _, _, _ = await send(60, 2, tokens=800)
    costs["token_cpu"] = max(0.0, with_tokens - costs["request_cpu"] - 60 * costs["span_cpu"]) / tokens
    costs["span_bytes"] = await _stored_bytes(made, 0) / 60
    costs["token_bytes"] = (await _stored_bytes(made, 1000) / 60 - costs["span_bytes"]) / 1000
    costs["collector_memory"] = resident_bytes(made.collector)
    seconds, _, others = await timed(
        lambda: made.have(Job("ours", made.queue_address, "trace", 1500, 32, collector=f"{made.otlp}/v1/traces")), made.queue
    )
    points.append(
        _point(
            "rollouts", 1500 / seconds, others=others, clients=32, spans=4, unit="rollouts claimed, sent 4 spans of, and reported a second"
        )
    )


async def measure_proxy(made: Stack, costs: dict[str, float], points: list[dict[str, Any]]) -> None:
    """Model calls, whole and streamed."""
    port, settings = free_port(), made.settings
    environment = {**os.environ, **settings.environment(), "AGL_LOG_LEVEL": "ERROR"}
    async with (
        process([sys.executable, "-m", "bench.proxy", "--model", str(port)], dict(os.environ), port) as model,
        process([sys.executable, "-m", "agl_otel.proxy"], environment, settings.proxy_port) as pid,
        QueueClient(made.queue_address) as queue,
    ):
        update = await queue.put_resources({"llm": LLM(endpoint=f"http://127.0.0.1:{port}/v1", model="policy")})
        (begun,) = await queue.start([EnqueueRolloutRequest(input=1, resources_id=update.resources_id)])
        url = f"http://127.0.0.1:{settings.proxy_port}/rollout/{begun.rollout_id}/attempt/{begun.attempt.attempt_id}/v1"
        await proxy_bench.send(url, count=200, clients=4)
        own = time.process_time()
        _, [call, served], _ = await timed(lambda: proxy_bench.send(url, count=800, clients=2), pid, model)
        costs["call_cpu"], costs["call_client_cpu"] = call / 800, (served + time.process_time() - own) / 800
        _, [streamed], _ = await timed(lambda: proxy_bench.send(url, count=60, clients=2, stream=True), pid)
        costs["chunk_cpu"] = max(0.0, streamed / 60 - costs["call_cpu"]) / proxy_bench.CHUNKS
        seconds, _, others = await timed(lambda: proxy_bench.send(url, count=1500, clients=16), pid)
        points.append(_point("calls", 1500 / seconds, others=others, clients=16, client_cores=2, unit="model calls a second"))
        costs["proxy_memory"] = resident_bytes(pid)
        await measure_runners(made, costs, f"http://127.0.0.1:{port}/v1")


async def measure_runners(made: Stack, costs: dict[str, float], model: str) -> None:
    """Attempts of a warm command and of a function, one after the other; what agents that wait have for themselves."""
    folder = made.folder / "agents"
    folder.mkdir()
    (folder / "agent.py").write_text(AGENT % 0)
    (folder / "waits.py").write_text(AGENT % 600)
    (folder / "function.py").write_text(FUNCTION)
    environment = {**os.environ, **made.settings.environment(), "AGL_LOG_LEVEL": "ERROR"}
    program = [sys.executable, "-m", "agl_otel.runner", "--store", made.queue_address]

    async def play(arguments: Sequence[str], rollouts: int) -> float:
        """CPU seconds of a runner and of all that it started, for each rollout, its start left out."""
        async with QueueClient(made.queue_address, timeout_seconds=120) as queue:
            update = await queue.put_resources({"llm": LLM(endpoint=model, model="policy")})
            child = await asyncio.create_subprocess_exec(
                *program, *arguments, env=environment, cwd=folder, stdout=asyncio.subprocess.DEVNULL
            )
            try:
                for count in (4, rollouts):
                    had = tree_cpu(child.pid)
                    asked = [EnqueueRolloutRequest(input={"n": n}, resources_id=update.resources_id) for n in range(count)]
                    ids = [each.rollout_id for each in await queue.enqueue(asked)]
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
    costs["agent_memory"] = await _agent_memory(made, eight, environment, folder, model)


async def _drained(made: Stack) -> None:
    """The queue of the earlier measurements is empty."""
    async with QueueClient(made.queue_address) as queue:
        while waiting := await queue.query_rollouts(status_in=["queuing"], limit=500):
            await queue.delete([each.rollout_id for each in waiting])


async def _agent_memory(made: Stack, command: Sequence[str], environment: dict[str, str], folder: Path, model: str) -> float:
    async with QueueClient(made.queue_address) as queue:
        update = await queue.put_resources({"llm": LLM(endpoint=model, model="policy")})
        child = await asyncio.create_subprocess_exec(*command, env=environment, cwd=folder, stdout=asyncio.subprocess.DEVNULL)
        try:
            await queue.enqueue([EnqueueRolloutRequest(input={"n": n}, resources_id=update.resources_id) for n in range(8)])
            deadline = time.monotonic() + 120
            while len(await queue.query_rollouts(status_in=["running"])) < 8:
                assert time.monotonic() < deadline, "eight agents do not run"
                await asyncio.sleep(0.2)
            await asyncio.sleep(2)  # they have called the model by now
            agents = max((_children(pid) for pid in tree(child.pid)), key=len)  # those of the warm parent
            return sum(map(_private_bytes, agents)) / len(agents)
        finally:
            child.terminate()
            await child.wait()


def tree(pid: int) -> list[int]:
    """A process and all below it."""
    return [pid, *below(pid)]


def _children(pid: int) -> list[int]:
    return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]


def tree_cpu(pid: int) -> float:
    """CPU seconds of a process, of those below it, and of those of them that have ended."""
    total = 0.0
    for each in tree(pid):
        fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        total += sum(int(field) for field in fields[11:15]) / 100.0
    return total


def _private_bytes(pid: int) -> int:
    found = re.findall(r"^Private_\w+:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), flags=re.MULTILINE)
    return sum(map(int, found)) * 1024


def _child_pids(word: str) -> list[int]:
    return [pid for pid in tree(os.getpid()) if word in Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")]


def _rollout_bytes(database: Path) -> int:
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as opened:
        (pages,), (size,) = opened.execute("PRAGMA page_count").fetchone(), opened.execute("PRAGMA page_size").fetchone()
    opened.close()
    return int(pages) * int(size)


def fitted(runs: Sequence[tuple[int, int, float]]) -> tuple[float, float]:
    """CPU seconds of a request and of a span in it that explain the CPU of runs of (requests, spans), each run's within the same share."""
    counts, cpu = np.array([run[:2] for run in runs], float), np.array([run[2] for run in runs])
    request, span = np.linalg.lstsq(counts / cpu[:, None], np.ones(len(runs)), rcond=None)[0]
    return float(request), float(span)


async def _stored_bytes(made: Stack, tokens: int, count: int = 60) -> float:
    """On disk, of spans of 1.5 KB of words nobody has said before, with so many random token ids each, a fifth of them sampled."""
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
    said = [" ".join(chance.choices(vocabulary, k=words)) for words in (130, 70)]  # some 900 and 500 characters
    attributes: dict[str, Any] = {"gen_ai.input.messages": said[0], "gen_ai.output.messages": said[1], "gen_ai.request.model": "policy"}
    if sampled := tokens // 5:
        attributes |= {
            conventions.LLM_PROMPT_TOKEN_IDS: chance.choices(range(150_000), k=tokens - sampled),
            conventions.LLM_RESPONSE_TOKEN_IDS: chance.choices(range(150_000), k=sampled),
            conventions.LLM_RESPONSE_LOGPROBS: [-chance.random() for _ in range(sampled)],
        }
    ids = {"trace_id": f"{chance.getrandbits(128):032x}", "span_id": f"{chance.getrandbits(64):016x}"}
    return {"name": conventions.SPAN_LLM, **ids, "attributes": attributes}


def _traces_bytes(made: Stack) -> int:
    """Of active parts, as ClickHouse counts them."""
    return _asked(made, "SELECT sum(bytes_on_disk) FROM system.parts WHERE active AND database = 'otel'")


def _asked(made: Stack, sql: str) -> int:
    body = f"{sql} FORMAT TabSeparated".encode()
    with urllib.request.urlopen(f"http://127.0.0.1:{made.settings.clickhouse_port}/", data=body, timeout=60) as answer:
        return int(answer.read())


def _point(shape: str, value: float, *, unit: str, **more: object) -> dict[str, Any]:
    return {"shape": shape, **more, "measured": round(value, 1), "unit": unit, "load_average": round(os.getloadavg()[0], 1)}


async def measure() -> dict[str, Any]:
    """Costs and points of this machine."""
    costs: dict[str, float] = {}
    points: list[dict[str, Any]] = []
    before = round(os.getloadavg()[0], 1)
    with tempfile.TemporaryDirectory(prefix="agl-bench-") as folder:
        async with stack(Path(folder)) as made:
            for part in (measure_queue, measure_collector, measure_proxy):
                await part(made, costs, points)
    conditions = {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_average_before": before,
        "on": time.strftime("%Y-%m-%d"),
    }
    rounded = {name: float(f"{value:.4g}") for name, value in costs.items()}
    return {"conditions": conditions, "costs": asdict(Costs(**rounded)), "points": points}
