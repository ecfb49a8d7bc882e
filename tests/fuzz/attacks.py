# ruff: noqa: E501 - tables of bytes
"""What is thrown at a port: bytes that are no protocol, protocols that lie, and well-formed requests with the strangest values."""

from __future__ import annotations

import gzip
import json
import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from tests.chaos.clients import HTTP2, frame, grpc_head

WORDS: Final = (
    "", "x", "ro-1", "at-1", "../../etc/passwd", "%00", "\x00", "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"), "ä" * 300, "a" * 5000, "'; --",
    "{{7*7}}", "$(id)", "<script>", "\x1b[31m", "null", "NaN", "1e999", "-1", "18446744073709551616", "2026-01-01T00:00:00Z", "*", "%", "\u202e", "://", "[::1]",
)  # fmt: skip
NUMBERS: Final = (0, 1, -1, 2**31 - 1, 2**31, -(2**31), 2**63 - 1, -(2**63), 2**64 - 1, 10**400, 0.5, 1e308, -1e308)
HEADERS: Final = (
    b"Content-Length: -1", b"Content-Length: 99999999999999999999", b"Content-Length: 5\r\nContent-Length: 6", b"Content-Length: 0x10", b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: chunked, chunked", b"Transfer-Encoding: gzip, chunked", b"Expect: 100-continue", b"Upgrade: websocket\r\nConnection: Upgrade", b"Content-Encoding: gzip",
    b"Content-Encoding: zstd", b"Content-Encoding: br", b"Content-Type: multipart/form-data; boundary=x", b"Content-Type: \xff\xfe", b"Authorization: Bearer \xff", b"Authorization: Basic !!!",
    b"Cookie: " + b"a" * 9000, b"X: " + b"y" * 70_000, b"Range: bytes=0-18446744073709551615", b"Host: a\r\nHost: b", b"Origin: \x00", b": empty", b" folded: x", b"A\x00B: c", b"Connection: close, keep-alive",
    b"traceparent: 00-zz-zz-01", b"baggage: =;,=;" + b",k=v" * 500, b"Accept-Encoding: *;q=-1", b"If-None-Match: " + b'"x",' * 500,
)  # fmt: skip


def mutated(data: bytes, chance: random.Random) -> bytes:
    """`data` with a few bytes changed, missing, doubled or cut."""
    made = bytearray(data)
    for _ in range(chance.randint(1, 6)):
        place = chance.randrange(len(made) + 1)
        match chance.randrange(5):
            case 0 if made:
                made[place % len(made)] = chance.randrange(256)
            case 1:
                del made[place : place + chance.randint(1, 9)]
            case 2:
                made[place:place] = made[: chance.randrange(len(made) + 1)][:200]
            case 3:
                made[place:place] = chance.randbytes(chance.randint(1, 20))
            case _:
                del made[place:]
    return bytes(made)


def value(chance: random.Random, depth: int = 0) -> Any:
    """Any JSON."""
    match chance.randrange(9 if depth < 3 else 5):
        case 0 | 1:
            return chance.choice(WORDS)
        case 2 | 3:
            return chance.choice(NUMBERS)
        case 4:
            return chance.choice([None, True, False, [], {}])
        case 5 | 6:
            return [value(chance, depth + 1) for _ in range(chance.randint(0, 4))]
        case _:
            return {chance.choice(WORDS): value(chance, depth + 1) for _ in range(chance.randint(0, 4))}


@dataclass(frozen=True)
class Route:
    """A request that a service knows: its fields, for bodies that come far."""

    method: str
    path: str
    fields: tuple[str, ...] = ()
    content_type: str = "application/json"
    body: bytes = b""


def json_body(route: Route, chance: random.Random) -> bytes:
    """A body for a route: some of its fields with any values, or no JSON at all."""
    match chance.randrange(10):
        case 0:
            return b"[" * chance.choice([10, 5000, 100_000])
        case 1:
            return b'{"a":' * chance.choice([10, 5000, 100_000])
        case 2:
            return chance.randbytes(chance.randint(0, 300))
        case 3:
            return json.dumps(value(chance)).encode()
        case _:
            names = chance.sample(route.fields, chance.randint(0, len(route.fields)))
            return json.dumps({name: value(chance) for name in names}).encode()


def well_formed(route: Route, chance: random.Random) -> tuple[str, str, dict[str, str], bytes]:
    """(method, path, headers, body) of a request that HTTP has nothing against."""
    from urllib.parse import quote

    path = "/".join(quote(chance.choice(WORDS), safe="") if part.startswith("{") else part for part in route.path.split("/"))
    if route.method == "GET" and chance.random() < 0.6:
        names = list(route.fields) or ["query", "limit", "offset", "sort_by"]
        path += "?" + "&".join(f"{quote(chance.choice(names))}={quote(str(value(chance))[:300])}" for _ in range(chance.randint(1, 5)))
    body = b""
    if route.method != "GET":
        body = mutated(route.body, chance) if route.body and chance.random() < 0.8 else json_body(route, chance)
    headers = {"Content-Type": chance.choice([route.content_type] * 6 + ["text/plain", "application/x-protobuf", "multipart/form-data"])}
    if body and chance.random() < 0.1:
        headers["Content-Encoding"] = "gzip"
        body = gzip.compress(bytes(chance.choice([10, 300 << 20])) if chance.random() < 0.1 else body, 1)
    return route.method, path, headers, body


def raw_http(routes: Sequence[Route], chance: random.Random) -> bytes:
    """Bytes for a connection to an HTTP port."""
    route = chance.choice(routes)
    method = chance.choice([route.method] * 5 + ["TRACE", "CONNECT", "PROPFIND", "G\x00T", "get", "A" * 3000]).encode()
    path = chance.choice(
        [route.path] * 5 + ["*", "http://other/", "/../..", "/" + "a" * 20_000, "/%ff%fe", "/\xff", "", "//", "/?" + "&" * 3000]
    )
    body = route.body or json_body(route, chance)
    lines = [
        method
        + b" "
        + path.encode("latin-1", "replace")
        + b" "
        + chance.choice([b"HTTP/1.1"] * 6 + [b"HTTP/9.9", b"HTTP/1.0", b"", b"HTCPCP/1.0"])
    ]
    lines += [b"Host: localhost", b"Content-Type: " + route.content_type.encode(), *chance.sample(HEADERS, chance.randint(0, 3))]
    if chance.random() < 0.05:
        lines += [b"X-%d: %d" % (number, number) for number in range(3000)]
    if chance.random() < 0.6:
        lines.append(b"Content-Length: %d" % (len(body) + chance.choice([0, 0, 0, -1, 5])))
    whole = b"\r\n".join([*lines, b"", b""]) + chance.choice(
        [body, b"5\r\nhello\r\n0\r\n\r\n", b"ffffffffffffffff\r\nx", b"-5\r\nhello", b"5;" + b"x" * 20_000]
    )
    match chance.randrange(8):
        case 0:
            return chance.randbytes(chance.randint(1, 2000))
        case 1:
            return mutated(whole, chance)
        case 2:
            return whole * chance.randint(2, 60)
        case 3:
            return whole[: chance.randrange(len(whole))]
        case 4:
            return HTTP2
        case 5:
            return b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(500)
        case _:
            return whole


def filled(descriptor: Descriptor, chance: random.Random, depth: int = 0) -> Message:
    """A message with some fields set to anything that they may hold."""
    message = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if chance.random() < 0.5 or depth > 3:
            continue
        made = [_field(field, chance, depth) for _ in range(chance.randint(1, 3) if field.is_repeated else 1)]
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            continue
        try:
            if field.is_repeated:
                getattr(message, field.name).extend(made)
            elif field.message_type is not None:
                getattr(message, field.name).CopyFrom(made[0])
            else:
                setattr(message, field.name, made[0])
        except (ValueError, TypeError):  # a number too large for its field, a text that is no UTF-8
            continue
    return message


def _field(field: FieldDescriptor, chance: random.Random, depth: int) -> Any:
    if field.message_type is not None:
        return filled(field.message_type, chance, depth + 1)
    if field.enum_type is not None:
        return chance.choice([0, 1, 2, 3, 99, -1])
    if field.type == FieldDescriptor.TYPE_STRING:
        return chance.choice(WORDS) if chance.random() < 0.8 else json.dumps(value(chance))
    if field.type == FieldDescriptor.TYPE_BYTES:
        return chance.randbytes(chance.randint(0, 40))
    if field.type == FieldDescriptor.TYPE_BOOL:
        return chance.random() < 0.5
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return chance.choice([0.0, -1.0, 1e300, float("nan"), float("inf"), 0.001])
    return chance.choice([0, 1, -1, 5, 2**31 - 1, -(2**31), 2**63 - 1])


def call_body(descriptor: Descriptor, chance: random.Random) -> bytes:
    """The bytes of a gRPC request: a strange message, one with damage, or no message."""
    whole = filled(descriptor, chance).SerializeToString()
    return chance.choice([lambda: whole, lambda: whole, lambda: mutated(whole, chance), lambda: chance.randbytes(chance.randint(0, 300))])()


def raw_http2(methods: Sequence[str], chance: random.Random) -> bytes:
    """Bytes for a connection to a gRPC port."""
    method = chance.choice(methods)
    makers: list[Callable[[], bytes]] = [
        lambda: chance.randbytes(chance.randint(1, 3000)),
        lambda: HTTP2 + b"".join(frame(chance.randrange(14), chance.randrange(256), chance.choice([0, 1, 2, 3, 2**31 - 1]), chance.randbytes(chance.randint(0, 60))) for _ in range(30)),
        lambda: HTTP2 + b"".join(_numbered(grpc_head(method), 2 * n + 1) + frame(3, 0, 2 * n + 1, struct.pack(">I", 8)) for n in range(400)),  # rapid reset
        lambda: HTTP2 + frame(1, 0, 1, b"") + b"".join(frame(9, 0, 1, b"\x00\x01x\x01y") for _ in range(5000)),  # CONTINUATION without an end
        lambda: HTTP2 + frame(4, 0, 0, struct.pack(">HI", 4, 2**31)) + frame(8, 0, 0, struct.pack(">I", 2**31 - 1)) * 3,
        lambda: HTTP2 + frame(6, 0, 0, b"pingpong") * 3000,
        lambda: HTTP2 + frame(4, 0, 0, struct.pack(">HI", 5, 16_384) * 10) * 1000,
        lambda: HTTP2 + grpc_head(method) + frame(0, 1, 1, struct.pack(">BI", chance.randrange(3), chance.choice([0, 5, 2**32 - 1])) + b"hello"),
        lambda: HTTP2 + grpc_head("/no.such.Service/Method") + frame(0, 1, 1, b"\0\0\0\0\0"),
        lambda: HTTP2 + grpc_head("/\udcff/x") + frame(0, 1, 1, b"\0\0\0\0\0"),
        lambda: mutated(HTTP2 + grpc_head(method) + frame(0, 1, 1, b"\0\0\0\0\x05hello"), chance),
        lambda: b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        lambda: HTTP2 + frame(2**7, 0, 2**31 - 1, b"x" * 16_384) * 20,
    ]  # fmt: skip
    return chance.choice(makers)()


def _numbered(data: bytes, stream: int) -> bytes:
    """A frame with another stream's number."""
    return data[:5] + struct.pack(">I", stream) + data[9:]
