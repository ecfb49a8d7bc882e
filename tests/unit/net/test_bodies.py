"""Slow bodies time out; the bytes of bodies are counted, in any thread, and released."""

from __future__ import annotations

import asyncio
import gzip
from concurrent.futures import ThreadPoolExecutor

import pytest
from aiohttp import web

from agl_otel.errors import AglError, EncodingError, TooLargeError, UnavailableError, http_status
from agl_otel.net.bodies import Bodies
from agl_otel.net.in_flight import InFlight
from tests.unit.net.test_http_server import HEAD, PATIENCE_SECONDS, SHORT_SECONDS, connection, serving, until_closed


class Echo:
    """A server that answers with the body."""

    def __init__(self) -> None:
        self.bodies = Bodies(InFlight(1 << 20), 1 << 20, seconds=SHORT_SECONDS)
        self.go = asyncio.Event()
        self.go.set()

    async def __call__(self, request: web.Request) -> web.Response:
        with self.bodies.in_flight.growing() as hold:
            try:
                body = await self.bodies.read(request, hold)
            except AglError as error:
                return web.Response(status=http_status(error), text=str(error))
            await self.go.wait()
            return web.Response(body=body)


@pytest.mark.parametrize("drip", [b"", b"x"], ids=["stalled", "a byte now and then"])
async def test_a_body_that_does_not_arrive_times_out_and_is_released(drip: bytes) -> None:
    echo = Echo()
    async with serving(echo.__call__) as port, connection(port) as (reader, writer):
        writer.write(HEAD % 1_000_000 + b"begin")
        answer = await until_closed(reader, writer, drip)
    assert answer.startswith(b"HTTP/1.1 503") and b"did not come within" in answer
    assert echo.bodies.in_flight.bytes == 0


async def test_a_received_body_stays_reserved_while_it_is_processed() -> None:
    echo = Echo()
    echo.go.clear()
    async with serving(echo.__call__) as port, connection(port) as (reader, writer):
        writer.write(HEAD % 2)
        await writer.drain()
        writer.write(b"hi")
        async with connection(port) as (idle, idle_writer):
            await until_closed(idle, idle_writer)
        assert echo.bodies.in_flight.bytes == 2
        echo.go.set()
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("encoding", [b"zstd", b"gzip", b"deflate"])
async def test_a_body_that_does_not_match_its_encoding_is_a_400_without_a_traceback(
    encoding: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(Echo().__call__) as port, connection(port) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nHost: here\r\nContent-Encoding: %s\r\nContent-Length: 5\r\n\r\nhello" % encoding)
        answer = await until_closed(reader, writer)
    assert answer.startswith(b"HTTP/1.1 400") and encoding in answer
    assert not caplog.records


@pytest.mark.parametrize(("size", "status"), [(1 << 20, 200), ((1 << 20) + 1, 413)])
async def test_a_compressed_body_may_decompress_up_to_the_limit(size: int, status: int) -> None:
    body = gzip.compress(bytes(size))
    async with serving(Echo().__call__) as port, connection(port) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nHost: here\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        assert (await until_closed(reader, writer)).startswith(b"HTTP/1.1 %d" % status)


def test_an_unknown_encoding_and_an_oversized_body_have_their_own_status() -> None:
    assert (http_status(TooLargeError("")), http_status(EncodingError(""))) == (413, 415)


def test_bytes_in_flight_are_bounded_but_one_request_always_fits() -> None:
    flight = InFlight(10)
    flight.reserve(50)
    with pytest.raises(UnavailableError, match="AGL_MAX_IN_FLIGHT_BYTES"):
        flight.reserve(1)
    assert flight.bytes == 50
    flight.release(50)
    flight.reserve(4)
    flight.reserve(6)
    assert flight.bytes == 10
    flight.release(10)
    assert (flight.bytes, flight.refused) == (0, 1)


def test_pieces_are_reserved_as_they_arrive_and_released_together() -> None:
    flight = InFlight(10)
    with flight.growing() as slow:
        assert flight.bytes == 0
        slow(4)
        flight.reserve(6)
        with pytest.raises(UnavailableError):
            slow(1)
        flight.release(6)
        slow(7)  # alone it may have more than there is
        assert flight.bytes == 11
    assert (flight.bytes, flight.refused) == (0, 1)


def test_a_thread_that_outlives_its_request_reserves_nothing() -> None:
    flight = InFlight(10)
    with flight.growing() as hold:
        hold(4)
    with ThreadPoolExecutor(1) as threads, pytest.raises(UnavailableError):
        threads.submit(hold, 4).result()
    assert flight.bytes == 0
