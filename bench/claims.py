"""How fast rollouts are claimed and completed, against Agent Lightning 0.3 where it is given, else an empty gRPC call.

python -m bench.claims                                          # the share of the floor: an empty call to the same kind of server
python -m bench.claims --agentlightning-python VENV/bin/python  # pip install agentlightning==0.3.0 into that environment

One rollout is one claim and one report of success; both are on the disk, synced, when they are answered (0.3 keeps them in memory). The
clients are a process of their own (claimers.py). Batches are compared with single claims of 64 clients, and with 0.3's own batches. The
queue runs on SQLite, and on PostgreSQL where psycopg and a server's programs are installed.
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
from bench.claimers import Job, claimers
from bench.harness import Turn, cpu_seconds, free_port, process, report, take_turns
from tests.postgres_server import NoPostgresError, Postgres

Have = Callable[[Job], Awaitable[int]]


@dataclass(frozen=True)
class Shape:
    """A way to claim: how many clients, how many rollouts a call, how many in a turn; and what it is compared with."""

    name: str
    clients: int
    limit: int
    rollouts: int
    baseline_clients: int
    baseline_limit: int
    baseline_rollouts: int


SHAPES: Final = (
    Shape("single, 8 clients", 8, 1, 1500, 8, 1, 500),
    Shape("single, 64 clients", 64, 1, 2000, 64, 1, 500),
    Shape("batches of 100, 8 clients, against 64 single", 8, 100, 20_000, 64, 1, 500),
    Shape("batches of 100, 8 clients, against batches", 8, 100, 20_000, 8, 100, 800),
)


@dataclass(frozen=True)
class Server:
    """A queue that runs: its engine, address, and all processes that work for it."""

    engine: str
    address: str
    pid: int
    database: Postgres | None

    def cpu_seconds(self) -> tuple[float, float]:
        """CPU time of the queue, and of its database server where that is a process of its own."""
        return cpu_seconds(self.pid), sum(map(_spent, self.database.pids())) if self.database else 0.0


def _spent(pid: int) -> float:
    try:
        return cpu_seconds(pid)
    except FileNotFoundError:  # a worker process of the database that ended meanwhile
        return 0.0


def turn_of(have: Have, kind: str, address: str, clients: int, limit: int, rollouts: int, spent: Callable[[], None] = lambda: None) -> Turn:
    """Fill the queue, then claim and complete all of it; answers rollouts a second (the filling is not counted)."""

    async def turn() -> float:
        if kind == "nothing":
            task = "empty"
        else:
            await have(Job(kind, address, "fill", rollouts))
            task = "complete"
        spent()
        start = time.perf_counter()
        done = await have(Job("ours" if kind == "nothing" else kind, address, task, rollouts, clients, limit))
        rate = done / (time.perf_counter() - start)
        spent()
        return rate

    return turn


async def contest(have: Have, server: Server, shape: Shape, kind: str, other: str, rounds: int) -> None:
    """One shape at one server; prints the line."""
    marks: list[tuple[float, float]] = []
    ours = turn_of(have, "ours", server.address, shape.clients, shape.limit, shape.rollouts, lambda: marks.append(server.cpu_seconds()))
    theirs = turn_of(have, kind, other, shape.baseline_clients, shape.baseline_limit, shape.baseline_rollouts)
    result = await take_turns(ours, theirs, rounds=rounds)
    turns = list(zip(marks[2::2], marks[3::2], strict=True))  # after the unmeasured one
    queue, database = (sum(after[i] - before[i] for before, after in turns) / len(turns) / shape.rollouts * 1e6 for i in (0, 1))
    more = {"queue_cpu_us": round(queue), "load_average": round(os.getloadavg()[0], 1)}
    if server.database is not None:
        more["database_cpu_us"] = round(database)
    against = "agentlightning 0.3 (in memory)" if kind == "agentlightning" else "an empty gRPC call"
    report("claims", f"{server.engine}: claim and complete, {shape.name}", "rollouts/s", result, against=against, **more)


@contextlib.contextmanager
def databases(folder: str, engines: str) -> Generator[list[tuple[str, str, Postgres | None]]]:
    """(engine, url, its server) of those that there are here and that are asked for."""
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
    """Queues, one on each engine."""
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
    """Start the servers, let them take turns, print the results."""
    other = free_port()
    kind = "agentlightning" if options.agentlightning_python else "nothing"
    if options.agentlightning_python:
        script = str(Path(options.agentlightning_python).parent / "agl")
        command = [script, "store", "--port", str(other), "--host", "127.0.0.1", "--log-level", "ERROR"]
    else:
        command = [sys.executable, "-m", "bench.claims", "--serve-nothing", str(other)]
    async with servers(options.engines) as queues, process(command, os.environ, other), claimers() as have:
        for server in queues:
            for shape in SHAPES:
                if options.only in shape.name:
                    await contest(have, server, shape, kind, f"127.0.0.1:{other}", options.rounds)


class Nothing:
    """A servicer whose every call answers at once with nothing."""

    async def Claim(self, request: pb.ClaimRequest, context: object) -> pb.Rollouts:  # noqa: N802 - the wire's name
        """Nothing."""
        return pb.Rollouts()

    def __getattr__(self, name: str) -> Callable[..., Awaitable[pb.Rollouts]]:
        return self.Claim


async def serve_nothing(port: int) -> None:
    """The floor: the same kind of server without a queue behind it."""
    server = grpc.aio.server(options=OPTIONS)
    queue_pb2_grpc.add_QueueServicer_to_server(Nothing(), server)  # pyright: ignore[reportArgumentType] - answers whatever is asked
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agentlightning-python", default="", help="an interpreter that has agentlightning==0.3.0")
    parser.add_argument("--engines", default="sqlite,postgresql", help="of the queue")
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve-nothing", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    asyncio.run(serve_nothing(options.serve_nothing) if options.serve_nothing else compare(options))


if __name__ == "__main__":
    main()
