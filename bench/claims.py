"""How fast rollouts are claimed, against Agent Lightning 0.3 where an interpreter that has it is given, else against an empty gRPC call.

python bench/claims.py                                          # the share of the floor: an empty call to the same kind of server
python bench/claims.py --agentlightning-python VENV/bin/python  # pip install agentlightning==0.3.0 into that environment

The queue runs on SQLite, and on PostgreSQL where psycopg and a server's programs are installed; both sync every commit to the disk.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio

from agl_otel.queue.calls import Calls, new_request_id
from agl_otel.queue.postgres_server import NoPostgresError, Postgres
from agl_otel.queue.proto import queue_pb2 as pb
from agl_otel.queue.proto import queue_pb2_grpc
from agl_otel.queue.server import OPTIONS
from bench.harness import Turn, cpu_seconds, free_port, process, report, take_turns

INPUT = json.dumps({"question": "x" * 200})


async def spread(calls: int, clients: int, one: Callable[[int], Awaitable[None]]) -> float:
    """Make `calls` calls by `clients` concurrent clients; answers calls a second."""
    numbers = iter(range(calls))

    async def client(index: int) -> None:
        for _ in numbers:
            await one(index)

    start = time.perf_counter()
    await asyncio.gather(*(client(index) for index in range(clients)))
    return calls / (time.perf_counter() - start)


def claim_turn(clients: Sequence[Calls], calls: int, limit: int) -> Turn:
    """Fill the queue, then claim all of it, `limit` a call; answers rollouts a second (the filling is not counted)."""

    async def fill(_: int) -> None:
        request = pb.EnqueueRequest(rollouts=[pb.NewRollout(input_json=INPUT)] * 500, request_id=new_request_id())
        await clients[0].call("Enqueue", request, pb.Rollouts)

    async def claim(index: int) -> None:
        request = pb.ClaimRequest(limit=limit, worker_id=f"w{index}", request_id=new_request_id())
        assert len((await clients[index].call("Claim", request, pb.Rollouts)).rollouts) == limit

    async def turn() -> float:
        await spread(-(-calls * limit // 500), 1, fill)
        return await spread(calls, len(clients), claim) * limit

    return turn


def empty_turn(clients: Sequence[Calls], calls: int) -> Turn:
    """Calls that do nothing; answers calls a second."""

    async def call(index: int) -> None:
        await clients[index].call("Claim", pb.ClaimRequest(limit=1, request_id=new_request_id()), pb.Rollouts)

    return lambda: spread(calls, len(clients), call)


def agentlightning_turn(session: aiohttp.ClientSession, url: str, clients: int, calls: int, limit: int) -> Turn:
    """The same work at Agent Lightning's store, over its HTTP interface."""

    async def post(path: str, body: Any) -> Any:
        async with session.post(f"{url}/v1/agl/queues/rollouts/{path}", json=body) as answer:
            answer.raise_for_status()
            return await answer.json()

    async def fill(_: int) -> None:
        await post("enqueue", {"rollouts": [{"input": json.loads(INPUT)}] * 500})

    async def claim(index: int) -> None:
        assert len(await post("dequeue", {"limit": limit, "worker_id": f"w{index}"})) == limit

    async def turn() -> float:
        await spread(-(-calls * limit // 500), 1, fill)
        return await spread(calls, clients, claim) * limit

    return turn


@contextlib.contextmanager
def databases(folder: str) -> Generator[list[tuple[str, str]]]:
    """(engine, url) of those that there are here."""
    urls = [("sqlite", f"sqlite:///{folder}/queue.db")]
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
        yield [*urls, ("postgresql", server.url())]
    finally:
        server.close()


async def compare(options: argparse.Namespace) -> None:
    """Start the servers, let them take turns, print the results."""
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="agl-bench-"))
        other = free_port()
        queues: list[tuple[str, int, int]] = []
        for engine, url in stack.enter_context(databases(folder)):
            port = free_port()
            environment = {
                **os.environ,
                "AGL_QUEUE_PORT": str(port),
                "AGL_QUEUE_URL": url,
                "AGL_LOG_LEVEL": "ERROR",
                "AGL_DATA_DIR": folder,
            }
            queues.append(
                (engine, port, await stack.enter_async_context(process([sys.executable, "-m", "agl_otel.queue"], environment, port)))
            )

        async def connect(target: int, count: int) -> list[Calls]:
            clients = [Calls(f"127.0.0.1:{target}", token="", timeout_seconds=60, retry_seconds=0) for _ in range(count)]
            for client in clients:
                stack.push_async_callback(client.close)
            return clients

        async def baseline(clients: int, calls: int, limit: int) -> Turn:
            if options.agentlightning_python:
                return agentlightning_turn(session, f"http://127.0.0.1:{other}", clients, calls, limit)
            return empty_turn(await connect(other, clients), calls)

        session = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        if options.agentlightning_python:
            against = "agentlightning 0.3 (in memory)"
            script = str(Path(options.agentlightning_python).parent / "agl")
            command = [script, "store", "--port", str(other), "--host", "127.0.0.1", "--log-level", "ERROR"]
        else:
            against = "an empty gRPC call"
            command = [sys.executable, __file__, "--serve-nothing", str(other)]
        await stack.enter_async_context(process(command, os.environ, other))
        for (engine, port, pid), (metric, clients, calls, limit) in itertools.product(
            queues, (("single", 8, options.calls, 1), ("single", 64, options.calls, 1), ("batches of 100", 8, options.calls // 20, 100))
        ):
            before = cpu_seconds(pid)
            contest = await take_turns(
                claim_turn(await connect(port, clients), calls, limit), await baseline(clients, calls, limit), rounds=options.rounds
            )
            spent = (cpu_seconds(pid) - before) / (calls * limit * (options.rounds + 1)) * 1e6
            report(
                "claims",
                f"{engine}: {metric}, {clients} clients",
                "rollouts/s",
                contest,
                against=against,
                server_cpu_us_with_enqueue=round(spent),
            )


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
    parser.add_argument("--calls", type=int, default=2000, help="calls in one turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve-nothing", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    asyncio.run(serve_nothing(options.serve_nothing) if options.serve_nothing else compare(options))


if __name__ == "__main__":
    main()
