"""One connection to a model server, and the answer that comes over it: HTTP/1.1 as RFC 9112 frames it, in whatever pieces it arrives."""

from __future__ import annotations

import asyncio
import zlib
from typing import Any, Final

from multidict import CIMultiDict

MAX_HEAD_BYTES: Final = 128 << 10
MAX_LINE_BYTES: Final = 16 << 10  # of a chunk's size, with what may stand behind it, and of a trailer
HIGH_WATER_BYTES: Final = 512 << 10  # more than this waiting to be read, and the server is made to wait
_NO_BODY: Final = frozenset({204, 304})
_INFLATED: Final = frozenset({"gzip", "x-gzip", "deflate"})


class BrokenOffError(OSError):
    """The connection ended, or what came over it is not HTTP."""


class Answer:
    """Status and headers, and the body as it comes. Made by `Connection.begin`."""

    def __init__(self, connection: Connection, silence_seconds: float) -> None:
        self.status = 0
        self.headers: CIMultiDict[str] = CIMultiDict()
        self._connection = connection
        self._silence_seconds = silence_seconds
        self._pieces: list[bytes] = []
        self._size = 0
        self._ended = False
        self._error: OSError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._whole = False
        self._since = 0.0
        self._inflate: Any = None
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(silence_seconds, self._silent)

    @property
    def content_type(self) -> str:
        """In lower case, without parameters; empty where there is none."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    async def head(self) -> None:
        """Return when status and headers are here."""
        while not self.status:
            await self._wait()

    async def read(self) -> bytes:
        """All of the body that has not been read yet."""
        self._whole = True
        self._connection.resume()
        while not self._ended:
            await self._wait()
        return self._taken()

    async def readany(self) -> bytes:
        """What of the body has come; empty at its end."""
        while not self._pieces and not self._ended:
            await self._wait()
        if self._size > HIGH_WATER_BYTES:
            self._connection.resume()
        return self._taken()

    def put(self, piece: bytes) -> None:
        """A piece of the body has come."""
        if self._inflate is not None:
            try:
                piece = self._inflate.decompress(piece)
            except zlib.error as error:
                self.fail(BrokenOffError(f"the body is not compressed as its header says: {error}"))
                return
        if piece:
            self._pieces.append(piece)
            self._size += len(piece)
            self._wake()
            if self._size > HIGH_WATER_BYTES and not self._whole:
                self._connection.pause()

    def start(self, status: int, headers: CIMultiDict[str]) -> None:
        """The head has come. Raises BrokenOffError for an encoding that was not asked for."""
        encoding = headers.get("content-encoding", "identity").lower()
        if encoding in _INFLATED:
            self._inflate = zlib.decompressobj(zlib.MAX_WBITS | 32)
        elif encoding != "identity":
            raise BrokenOffError(f"the body is encoded as {encoding[:40]}, which was not asked for")
        self.status, self.headers = status, headers
        self._wake()

    def end(self) -> None:
        """The body is complete."""
        self._ended = True
        self._timer.cancel()
        self._wake()

    def fail(self, error: OSError) -> None:
        """There will be no more."""
        if not self._ended and self._error is None:
            self._error = error
            self._timer.cancel()
            self._wake()

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return self._ended or self._error is not None

    def _taken(self) -> bytes:
        pieces, self._pieces, self._size = self._pieces, [], 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._since = self._loop.time()
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        if self._error is not None and not self._pieces:
            raise self._error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _silent(self) -> None:
        """The timer: nothing waited for, or not for long enough, and it starts again."""
        waited = self._loop.time() - self._since if self._waiter is not None else 0.0
        if waited >= self._silence_seconds:
            self.fail(TimeoutError(f"nothing came for {self._silence_seconds:g} s"))
        else:
            self._timer = self._loop.call_later(self._silence_seconds - waited, self._silent)


class Connection(asyncio.Protocol):
    """One call at a time: `begin`, `write`, then the answer fills itself. `held` is the set that it is in while it is open."""

    def __init__(self, held: set[Connection]) -> None:
        self._held = held
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self._buffer = b""
        self._at = 0
        """How much of the buffer is done with: it is cut once for all that came together."""
        self._step = self._read_head
        self._left = 0
        self._keep = False
        self._paused = False
        self._drain: asyncio.Event | None = None

    def begin(self, silence_seconds: float) -> Answer:
        """The answer to the request that is written next."""
        self._answer = answer = Answer(self, silence_seconds)
        self._step, self._keep = self._read_head, False
        return answer

    @property
    def is_open(self) -> bool:
        """Whether it can be written to."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_reusable(self) -> bool:
        """Whether the answer has come to its end, and another request may follow."""
        return self._keep and self._answer is None and self._at == len(self._buffer) and self.is_open

    def write(self, data: bytes) -> None:
        """Send. Where the connection has ended, the answer says so."""
        if self._transport is not None:
            self._transport.write(data)

    async def drained(self, silence_seconds: float) -> None:
        """Return when more may be written, or the answer is over already. Raises TimeoutError where the server reads nothing that long."""
        if self._drain is not None and self._answer is not None and not self._answer.is_over:
            async with asyncio.timeout(silence_seconds):
                await self._drain.wait()
        await asyncio.sleep(0)  # other calls get their turn

    def pause(self) -> None:
        """Read no more."""
        if not self._paused and self.is_open and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self._paused:
            self._paused = False
            if self.is_open and self._transport is not None:
                self._transport.resume_reading()

    def abort(self) -> None:
        """Close, now."""
        if self._transport is not None:
            self._transport.abort()
        self._fail(BrokenOffError("the call was given up"))

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open (asyncio calls this, and all below)."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._held.add(self)

    def pause_writing(self) -> None:
        """The peer does not read."""
        self._drain = asyncio.Event()

    def resume_writing(self) -> None:
        """The peer reads on."""
        if self._drain is not None:
            self._drain.set()
            self._drain = None

    def data_received(self, data: bytes) -> None:
        """Bytes of the answer."""
        answer = self._answer
        if answer is None:  # nobody asked: what comes now would be taken for the next answer
            self._keep = False
            self.abort()
            return
        self._buffer = self._buffer[self._at :] + data if self._at < len(self._buffer) else data
        self._at = 0
        try:
            while self._step(answer):
                pass
        except BrokenOffError as error:
            self._fail(error)
            self.abort()

    def eof_received(self) -> bool:
        """The server sends no more; asyncio closes the connection then."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended."""
        self._held.discard(self)
        self.resume_writing()
        if self._answer is not None and self._step == self._read_to_end and exc is None:
            self._end(self._answer)
        self._fail(BrokenOffError(f"the connection ended before the answer did{f': {exc!r}' if exc else ''}"))

    def _fail(self, error: BrokenOffError) -> None:
        if self._answer is not None:
            self._answer.fail(error)
            self._answer = None

    def _end(self, answer: Answer) -> None:
        self._answer = None
        self.resume()
        answer.end()

    # --- the steps; each takes what it can from the buffer, and says whether to go on ---

    def _read_head(self, answer: Answer) -> bool:
        end = self._buffer.find(b"\r\n\r\n", self._at)
        if end < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise BrokenOffError("the head of the answer is too long")
            return False
        lines = self._buffer[self._at : end].decode("utf-8", "surrogateescape").split("\r\n")
        self._at = end + 4
        protocol, _, rest = lines[0].partition(" ")
        if not protocol.startswith("HTTP/1.") or not (rest[:3].isascii() and rest[:3].isdecimal()):
            raise BrokenOffError(f"this is no HTTP/1.1: {lines[0][:80]!r}")
        status = int(rest[:3])
        if status < 200:
            return True
        headers: CIMultiDict[str] = CIMultiDict()
        for line in lines[1:]:
            name, colon, value = line.partition(":")
            if not colon:
                raise BrokenOffError(f"this is no header: {line[:80]!r}")
            headers.add(name, value.strip(" \t"))
        connection = headers.get("connection", "").lower()
        self._keep = "close" not in connection and (protocol != "HTTP/1.0" or "keep-alive" in connection)
        self._frame(status, headers)
        answer.start(status, headers)
        return True

    def _frame(self, status: int, headers: CIMultiDict[str]) -> None:
        """How the end of the body is known."""
        length = headers.get("content-length")
        if status in _NO_BODY:
            self._step, self._left = self._read_length, 0
        elif headers.get("transfer-encoding", "").lower().rpartition(",")[2].strip() == "chunked":
            self._step = self._read_size
        elif length is not None:
            if not (length.isascii() and length.isdecimal()):
                raise BrokenOffError(f"this is no length: {length[:40]!r}")
            self._step, self._left = self._read_length, int(length)
        else:
            self._step, self._keep = self._read_to_end, False

    def _read_length(self, answer: Answer) -> bool:
        """The rest of a body whose length is known."""
        self._read_left(answer)
        if not self._left:
            self._end(answer)
        return False

    def _read_to_end(self, answer: Answer) -> bool:
        if data := self._buffer[self._at :]:
            self._at = len(self._buffer)
            answer.put(data)
        return False

    def _read_size(self, answer: Answer) -> bool:
        """The line before a chunk; 0 ends the body."""
        line = self._line()
        if line is None:
            return False
        try:
            self._left = int(line.partition(b";")[0].strip(b" \t"), 16)
        except ValueError:
            self._left = -1
        if self._left < 0 or line[:1] in b"+-_":
            raise BrokenOffError(f"this is no chunk of a body: {line[:40]!r}")
        self._step = self._read_chunk if self._left else self._read_trailers
        return True

    def _read_chunk(self, answer: Answer) -> bool:
        self._read_left(answer)
        if self._left or len(self._buffer) < self._at + 2:
            return False
        if not self._buffer.startswith(b"\r\n", self._at):
            raise BrokenOffError("a chunk of the body is longer than it says")
        self._at += 2
        self._step = self._read_size
        return True

    def _read_trailers(self, answer: Answer) -> bool:
        line = self._line()
        if line is None:
            return False
        if not line:
            self._end(answer)
        return bool(line)

    def _read_left(self, answer: Answer) -> None:
        """Pass on what there is of the `_left` bytes."""
        if self._left and self._at < len(self._buffer):
            piece = self._buffer[self._at : self._at + self._left]
            self._at += len(piece)
            self._left -= len(piece)
            answer.put(piece)

    def _line(self) -> bytes | None:
        end = self._buffer.find(b"\r\n", self._at)
        if end < 0:
            if len(self._buffer) - self._at > MAX_LINE_BYTES:
                raise BrokenOffError("a line between the chunks of the body is too long")
            return None
        line = self._buffer[self._at : end]
        self._at = end + 2
        return line
