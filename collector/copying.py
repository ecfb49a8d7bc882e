"""`POST /copy`: stream a snapshot of all traces of the embedded ClickHouse, for a backup while the stack runs.

Only the collector has the embedded ClickHouse open, so it reads; the client, which needs the token, writes the files. The response is a
stream of frames: a line of JSON, then the number of bytes that it names. Ingest continues meanwhile; merges, and deletions with them,
wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from aiohttp import web

from agl_otel.errors import InUseError
from agl_otel.traces.collector_client import COPY_SECONDS
from agl_otel.traces.opened import TraceStore
from agl_otel.traces.transfer import snapshot, tables


class Copying:
    """Copies of one engine, one at a time."""

    def __init__(self, engine: TraceStore) -> None:
        self._engine = engine
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="copy")  # a reading connection is bound to its thread

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """POST /copy. Raises InUseError while another copy is made."""
        if self._turn.locked():
            raise InUseError("a copy is being made already: wait for its end")
        async with self._turn:
            frames = _frames(self._engine)
            answer = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
            await answer.prepare(request)
            try:
                with contextlib.suppress(ConnectionError):  # the client has disconnected
                    async with asyncio.timeout(COPY_SECONDS):
                        while (frame := await self._in_thread(next, frames, None)) is not None:
                            await answer.write(frame)
                    await answer.write_eof()
            finally:
                await self._in_thread(frames.close)
            return answer

    async def _in_thread(self, work: Any, *given: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *given)


def _frames(engine: TraceStore) -> Any:
    """Yield the bytes to send: for each table its name, then its chunks; last an end frame, without which a copy is incomplete."""

    def frames() -> Iterator[bytes]:
        for table in tables(engine):
            yield _line({"table": table})
            for chunk in snapshot(engine, table):
                described = {**asdict(chunk.content), "total": chunk.total, "bytes": len(chunk.blocks)}
                yield _line(described) + chunk.blocks
        yield _line({"end": True})

    return frames()


def _line(content: dict[str, Any]) -> bytes:
    return json.dumps(content).encode() + b"\n"
