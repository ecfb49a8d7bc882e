"""Plays attacks against one port of a running stack, and says what was broken.

Whatever comes, a service answers with a status that is no fault of its own (not 500, not UNKNOWN or INTERNAL) or hangs up; it does not end,
it writes no traceback, its memory stays below MEMORY_BYTES, and it serves the next honest client.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import grpc
import grpc.aio
from yarl import URL

from agl_otel.net.http_server import listens
from tests.fuzz.attacks import call_body, raw_http, raw_http2, well_formed
from tests.fuzz.targets import Target

MEMORY_BYTES: Final = 3 << 30  # of any service; the collector holds ClickHouse
SERVE_SECONDS: Final = 60.0
ANSWER_SECONDS: Final = 20.0
ROUND: Final = 12  # attacks at once
HELD: Final = 150  # connections that are kept open and get a byte now and then
CALM_SECONDS: Final = 0.2
FAULTS: Final = frozenset({grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL})
KNOWN: Final = b"_server_main_loop"  # a path that is no UTF-8 ended grpcio's server, with a traceback; grpc_port.py listens again
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Findings:
    """What came of it."""

    sent: int = 0
    answers: Counter[str] = field(default_factory=Counter[str])
    problems: list[str] = field(default_factory=list[str])
    peak_bytes: dict[str, int] = field(default_factory=dict[str, int])


class Fuzzer:
    """Attacks `target` of the stack in `data`; `pids` are its services."""

    def __init__(self, target: Target, pids: Mapping[str, int], logs: Path, seed: int) -> None:
        self.target, self.pids, self.logs = target, pids, logs
        self.chance = random.Random(f"{seed} {target.name}")
        self.found = Findings()
        self._held: list[asyncio.StreamWriter] = []
        self._read = {path: path.stat().st_size for path in logs.glob("*.log")}

    async def play(self, *, rounds: int = 0, seconds: float = 0.0) -> Findings:
        """So many rounds, or so long; stops at the first problem."""
        until = time.monotonic() + seconds
        done = 0
        timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
        async with (
            aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as session,
            grpc.aio.insecure_channel(self.target.address) as channel,
        ):
            while (done < rounds or time.monotonic() < until) and not self.found.problems:
                attacks = [asyncio.create_task(self._attack(session, channel)) for _ in range(ROUND)]
                await self._calm(session, attacks)
                await asyncio.gather(*attacks)
                await self._hold()
                await self._look()
                done += 1
        for writer in self._held:
            writer.transport.abort()
        await self._look()
        return self.found

    async def _calm(self, session: aiohttp.ClientSession, attacks: Sequence[asyncio.Task[None]]) -> None:
        """Until they have ended, undo what keeps them waiting and is allowed to do so."""
        while self.target.calm and (await asyncio.wait(attacks, timeout=CALM_SECONDS))[1]:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                async with session.post(self.target.calm):
                    pass

    async def _attack(self, session: aiohttp.ClientSession, channel: grpc.aio.Channel) -> None:
        self.found.sent += 1
        if self.chance.random() < 0.4:
            await self._raw(
                raw_http(self.target.routes, self.chance) if self.target.routes else raw_http2(list(self.target.methods), self.chance)
            )
        elif self.target.routes:
            await self._request(session)
        else:
            await self._call(channel)

    async def _request(self, session: aiohttp.ClientSession) -> None:
        method, path, headers, body = well_formed(self.chance.choice(self.target.routes), self.chance)
        url = URL(f"http://{self.target.address}{path}", encoded=True)
        try:
            async with session.request(method, url, headers=headers, data=body) as answer:
                text = await answer.content.read(1 << 20)
                self.found.answers[str(answer.status)] += 1
                if answer.status == 500 and b"DB::Exception" not in text:
                    self.found.problems.append(f"{method} {path[:300]} {headers} {body[:300]!r} was answered 500: {text[:300]!r}")
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            self.found.answers[type(error).__name__] += 1

    async def _call(self, channel: grpc.aio.Channel) -> None:
        method = self.chance.choice(list(self.target.methods))
        request, stream = self.target.methods[method]
        body = call_body(request, self.chance)
        try:
            if stream:
                calling: Any = channel.unary_stream(method, None, None)(body, timeout=1)
                async for _ in calling:
                    break
                calling.cancel()
            else:
                await channel.unary_unary(method, None, None)(body, timeout=1)
            self.found.answers["OK"] += 1
        except grpc.aio.AioRpcError as error:
            self.found.answers[error.code().name] += 1
            if error.code() in FAULTS:
                self.found.problems.append(f"{method} {body.hex()[:600]} was answered {error.code().name}: {error.details()}")

    async def _raw(self, data: bytes) -> None:
        try:
            reader, writer = await self._connect()
            writer.write(data)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.chance.choice([0.02, 0.1, 0.5])):
                    await writer.drain()
                    answer = await reader.read(1 << 16)
                    self.found.answers[f"raw {answer[9:12].decode(errors='replace')}" if answer.startswith(b"HTTP/1.1 ") else "raw"] += 1
                    if answer.startswith(b"HTTP/1.1 500") and b"DB::Exception" not in answer:
                        self.found.problems.append(f"{data[:600]!r} was answered {answer[:300]!r}")
            writer.transport.abort()
        except OSError as error:
            self.found.answers[type(error).__name__] += 1

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = self.target.address.rpartition(":")
        return await asyncio.open_connection(host, int(port))

    async def _hold(self) -> None:
        """Slowloris: connections that begin a request and never come to its end."""
        with contextlib.suppress(OSError):
            _, writer = await self._connect()
            writer.write(raw_http(self.target.routes, self.chance)[:40] if self.target.routes else b"PRI * HTTP/2.0\r\n\r\nSM")
            self._held.append(writer)
        for writer in self._held:
            if not writer.is_closing():
                writer.write(b"a")
        while len(self._held) > HELD:
            self._held.pop(0).transport.abort()

    async def _look(self) -> None:
        """Are the services there, small, quiet, and of use to others?"""
        for name, pid in self.pids.items():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                used = _resident(pid)
                self.found.peak_bytes[name] = max(used, self.found.peak_bytes.get(name, 0))
                if used > MEMORY_BYTES:
                    self.found.problems.append(f"{name} holds {used >> 20} MiB")
                continue
            self.found.problems.append(f"{name} (process {pid}) has ended")
        for path in self.logs.glob("*.log"):
            with path.open("rb") as log:
                log.seek(self._read.get(path, 0))
                new = log.read()
            self._read[path] = self._read.get(path, 0) + len(new)
            for word in (b"Traceback", b"Unhandled", b"never retrieved"):
                if word in new and KNOWN not in new:
                    self.found.problems.append(
                        f"{path.name}: {new[max(0, new.index(word) - 300) : new.index(word) + 2500].decode(errors='replace')}"
                    )
                    break
        if not await asyncio.to_thread(self._serves):
            self.found.problems.append(f"{self.target.name} does not serve others within {SERVE_SECONDS:.0f} s")

    def _serves(self) -> bool:
        if not self.target.health:
            return asyncio.run(self._listens_again())
        with contextlib.suppress(OSError), urllib.request.urlopen(self.target.health, timeout=SERVE_SECONDS) as answer:
            return answer.status == 200
        return False

    async def _listens_again(self) -> bool:
        until = time.monotonic() + SERVE_SECONDS
        while not (found := await listens(self.target.address)) and time.monotonic() < until:  # noqa: ASYNC110 - another process tells nobody
            await asyncio.sleep(0.1)
        return found


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
