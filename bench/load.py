"""Send OTLP requests from threads over plain sockets or gRPC with little CPU, which the load shares with the measured service."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import grpc

from bench.harness import percentile

EXPORT: Final = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
ANSWER_SECONDS: Final = 120.0
Send = Callable[[bytes], None]


class Address(NamedTuple):
    """Destination: `http` is the full URL for traces, `grpc` host:port; `headers` are sent over HTTP only."""

    http: str = ""
    grpc: str = ""
    headers: tuple[tuple[str, str], ...] = ()


@dataclass
class Sent:
    """Result of a load."""

    requests: int = 0
    seconds: float = 0.0
    waits: list[float] = field(default_factory=list[float])
    """Seconds from each request to its acknowledgement."""

    def wait(self, share: float) -> float:
        """Return the quantile `share` of the waits, in seconds."""
        return percentile(self.waits, share)


def drive(
    address: Address, bodies: Iterator[bytes], *, seconds: float, clients: int, requests_per_second: float = 0.0, limit: int = 0
) -> Sent:
    """Send for `seconds` from `clients` threads, in closed loops or at a fixed total rate; at most `limit` requests (0: no limit).

    Raises RuntimeError if a request is not accepted.
    """
    sent, lock, start = Sent(), threading.Lock(), time.perf_counter()
    errors: list[BaseException] = []

    def take() -> tuple[bytes, float] | None:
        with lock:
            number, now = sent.requests, time.perf_counter()
            due = start + number / requests_per_second if requests_per_second else now
            if errors or max(now, due) - start > seconds or (limit and number >= limit):
                return None
            sent.requests += 1
            return next(bodies), due

    def client() -> None:
        try:
            send = _http(address) if address.http else _grpc(address)
            while (item := take()) is not None:
                body, due = item
                if (early := due - time.perf_counter()) > 0:
                    time.sleep(early)
                send(body)
                sent.waits.append(time.perf_counter() - due)  # from its due time, so that queueing behind slow responses counts
        except BaseException as error:  # noqa: BLE001 - re-raised in the calling thread
            errors.append(error)

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sent.seconds = time.perf_counter() - start
    if errors:
        raise RuntimeError(f"the load on {address.http or address.grpc} failed: {errors[0]}") from errors[0]
    return sent


def _grpc(address: Address) -> Send:
    channel = grpc.insecure_channel(address.grpc, options=[("grpc.use_local_subchannel_pool", 1)])
    call = channel.unary_unary(EXPORT, request_serializer=None, response_deserializer=None)

    def send(body: bytes) -> None:
        call(body, timeout=ANSWER_SECONDS)

    return send


def _http(address: Address) -> Send:
    url = urlsplit(address.http)
    connection = socket.create_connection((url.hostname, url.port), ANSWER_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    extra = "".join(f"{name}: {value}\r\n" for name, value in address.headers)
    head = f"POST {url.path} HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/x-protobuf\r\n{extra}Content-Length: "

    def send(body: bytes) -> None:
        connection.sendall(f"{head}{len(body)}\r\n\r\n".encode() + body)
        answer = b""
        while (end := answer.find(b"\r\n\r\n")) < 0:
            answer += _more(connection)
        lines = answer[:end].decode("latin-1").lower().split("\r\n")
        length = next((int(line.partition(":")[2]) for line in lines if line.startswith("content-length:")), 0)
        while len(answer) < end + 4 + length:
            answer += _more(connection)
        if " 200 " not in f"{lines[0]} ":
            raise RuntimeError(answer[:500].decode(errors="replace"))

    return send


def _more(connection: socket.socket) -> bytes:
    if data := connection.recv(65536):
        return data
    raise RuntimeError("the server closed the connection")
