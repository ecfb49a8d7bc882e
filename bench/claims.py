"""Rate of claiming and completing rollouts, against Agent Lightning 0.3 if it is given, else against an empty gRPC call.

python -m bench.claims                                          # the baseline is an empty call to the same kind of server
python -m bench.claims --agentlightning-python VENV/bin/python  # pip install agentlightning==0.3.0 into that environment

One rollout is one claim and one report of success, both synced to disk before the response (0.3 keeps them in memory). The clients run in
a separate process (claimers.py). Batches are compared with single claims of 64 clients, and with 0.3's own batches. The queue runs on
SQLite, and on PostgreSQL if psycopg and a server are installed. With 0.3 there is also its own benchmark shape: 32 runners that export
four spans of 32 attributes between claim and report.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc.aio

from agl_otel.queue.proto import queue_pb2 as pb
from agl_otel.queue.proto import queue_pb2_grpc
from agl_otel.queue.server import OPTIONS
from bench.claimers import ATTRIBUTES, SPANS, Job, claimers
from bench.harness import Turn, cpu_seconds, free_port, process, report, services, take_turns
from tests.postgres_server import NoPostgresError, Postgres

RUNNERS: Final = 32
WITH_SPANS: Final = f"{RUNNERS} runners: claim, {SPANS} spans of {ATTRIBUTES} attributes, report"
Submit = Callable[[Job], Awaitable[int]]


@dataclass(frozen=True)
class Shape:
    """Numbers of clients, rollouts per call (`limit`) and rollouts per turn, of ours and of the baseline."""

    name: str
    clients: int
    limit: int
    rollouts: int
    baseline_clients: int
    baseline_limit: int
    baseline_rollouts: int
    labelled: bool = False
    """Whether our rollouts are claimed by their labels."""


SHAPES: Final = (
    Shape("single, 8 clients", 8, 1, 1500, 8, 1, 500),
    Shape("single, 64 clients", 64, 1, 2000, 64, 1, 500),
    Shape("batches of 100, 8 clients, against 64 single", 8, 100, 20_000, 64, 1, 500),
    Shape("batches of 100, 8 clients, against batches", 8, 100, 20_000, 8, 100, 800),
    Shape("batches of 100 by labels, 8 clients, against batches", 8, 100, 20_000, 8, 100, 800, labelled=True),
)


@dataclass(frozen=True)
class Server:
    """A running queue with its engine, address and processes."""

    engine: str
    address: str
    pid: int
    database: Postgres | None

    def cpu_seconds(self) -> tuple[float, float]:
        """Return the CPU seconds of the queue, and of its database server if it has one."""
        return cpu_seconds(self.pid), sum(map(_spent, self.database.pids())) if self.database else 0.0


def _spent(pid: int) -> float:
    try:
        return cpu_seconds(pid)
    except OSError:  # a worker process of the database that has ended
        return 0.0


def turn_of(submit: Submit, job: Job, mark: Callable[[], None] = lambda: None) -> Turn:
    """Make a turn that fills the queue (unmeasured), then runs `job`, calling `mark` before and after; it measures rollouts a second."""

    async def turn() -> float:
        if job.task != "empty":
            await submit(Job(job.kind, job.address, "fill", job.rollouts, labelled=job.labelled))
        mark()
        start = time.perf_counter()
        done = await submit(job)
        rate = done / (time.perf_counter() - start)
        mark()
        return rate

    return turn


async def contest(submit: Submit, server: Server, shape: Shape, kind: str, other: str, rounds: int) -> None:
    """Compare one shape on one server; print the result."""
    marks: list[tuple[float, float]] = []
    job = Job("ours", server.address, "complete", shape.rollouts, shape.clients, shape.limit, labelled=shape.labelled)
    task = "complete" if kind == "agentlightning" else "empty"
    baseline = Job(
        kind if kind == "agentlightning" else "ours",
        other,
        task,
        shape.baseline_rollouts,
        shape.baseline_clients,
        shape.baseline_limit,
    )
    ours = turn_of(submit, job, lambda: marks.append(server.cpu_seconds()))
    result = await take_turns(ours, turn_of(submit, baseline), rounds=rounds)
    turns = list(zip(marks[2::2], marks[3::2], strict=True))  # without the unmeasured one
    queue, database = (sum(after[i] - before[i] for before, after in turns) / len(turns) / shape.rollouts * 1e6 for i in (0, 1))
    more = {"queue_cpu_us": round(queue), "load_average": round(os.getloadavg()[0], 1)}
    if server.database is not None:
        more["database_cpu_us"] = round(database)
    against = "agentlightning 0.3 (in memory)" if kind == "agentlightning" else "an empty gRPC call"
    report("claims", f"{server.engine}: claim and complete, {shape.name}", "rollouts/s", result, against=against, **more)


async def contest_with_spans(submit: Submit, other: str, rounds: int) -> None:
    """Compare with Agent Lightning 0.3 in its own benchmark shape, and print the result."""
    with tempfile.TemporaryDirectory(prefix="agl-bench-") as folder:
        async with services(Path(folder), "queue", "collector") as made:
            turns = (
                turn_of(submit, Job(kind, address, "trace", 500, RUNNERS, collector=f"{collector}/v1/traces"))
                for kind, address, collector in (("ours", made.queue, made.otlp), ("agentlightning", other, f"http://{other}"))
            )
            result = await take_turns(*turns, rounds=rounds)
    against, load = "agentlightning 0.3 (in memory)", round(os.getloadavg()[0], 1)
    report("claims", WITH_SPANS, "rollouts/s", result, against=against, load_average=load)


@contextlib.contextmanager
def databases(folder: str, engines: str) -> Generator[list[tuple[str, str, Postgres | None]]]:
    """Start the requested and installed databases; yield (engine, url, server or None) of each."""
    urls: list[tuple[str, str, Postgres | None]] = [("sqlite", f"sqlite:///{folder}/queue.db", None)] if "sqlite" in engines else []
    if "postgresql" not in engines:
        yield urls
        return
    try:
        if importlib.util.find_spec("psycopg") is None:
            raise NoPostgresError("psycopg is missing: pip install 'agl-otel[postgres]'")
        server = Postgres(durable=True)
    except NoPostgresError as error:
        print(f"without PostgreSQL: {error}", file=sys.stderr)
        yield urls
        return
    try:
        server.start()
        yield [*urls, ("postgresql", server.url(), server)]
    finally:
        server.close()


@contextlib.asynccontextmanager
async def servers(engines: str) -> AsyncGenerator[list[Server]]:
    """Run a queue on each engine."""
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="agl-bench-"))
        found: list[Server] = []
        for engine, url, database in stack.enter_context(databases(folder, engines)):
            port = free_port()
            settings = {"AGL_QUEUE_PORT": str(port), "AGL_QUEUE_URL": url, "AGL_LOG_LEVEL": "ERROR", "AGL_DATA_DIR": folder}
            command = [sys.executable, "-m", "agl_otel.queue"]
            pid = await stack.enter_async_context(process(command, {**os.environ, **settings}, port))
            found.append(Server(engine, f"127.0.0.1:{port}", pid, database))
        yield found


async def compare(options: argparse.Namespace) -> None:
    """Start the servers, compare them, print the results."""
    other = free_port()
    kind = "agentlightning" if options.agentlightning_python else "nothing"
    if options.agentlightning_python:
        script = str(Path(options.agentlightning_python).parent / "agl")
        command = [script, "store", "--port", str(other), "--host", "127.0.0.1", "--log-level", "ERROR"]
    else:
        command = [sys.executable, "-m", "bench.claims", "--serve-nothing", str(other)]
    async with servers(options.engines) as queues, process(command, os.environ, other), claimers() as submit:
        for server in queues:
            for shape in SHAPES:
                if options.only in shape.name:
                    await contest(submit, server, shape, kind, f"127.0.0.1:{other}", options.rounds)
        if kind == "agentlightning" and options.only in WITH_SPANS:
            await contest_with_spans(submit, f"127.0.0.1:{other}", options.rounds)


class EmptyServicer:
    """A servicer whose every method returns an empty message at once."""

    async def Claim(self, request: pb.ClaimRequest, context: object) -> pb.Rollouts:  # noqa: N802 - the wire's name
        """Return no rollouts."""
        return pb.Rollouts()

    def __getattr__(self, name: str) -> Callable[..., Awaitable[pb.Rollouts]]:
        return self.Claim


async def serve_nothing(port: int) -> None:
    """Serve the baseline: the same kind of server without a queue behind it."""
    server = grpc.aio.server(options=OPTIONS)
    queue_pb2_grpc.add_QueueServicer_to_server(EmptyServicer(), server)  # pyright: ignore[reportArgumentType] - __getattr__ has all methods
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agentlightning-python", default="", help="an interpreter that has agentlightning==0.3.0")
    parser.add_argument("--engines", default="sqlite,postgresql", help="engines of the queue")
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve-nothing", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    asyncio.run(serve_nothing(options.serve_nothing) if options.serve_nothing else compare(options))


if __name__ == "__main__":
    main()
