"""TLS and client certificates on both OTLP ports, with certificates created by the openssl command."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import aiohttp
import grpc
import grpc.aio
import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcSpans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpSpans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter

from agl_otel.collector.grpc_port import METHODS
from agl_otel.errors import SettingsError
from agl_otel.net.tls import Tls
from agl_otel_hook import conventions
from tests.authority import Authority

from .otlp import request_of, span
from .stack import Stack, new_stack, until

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl command makes the certificates")
HEADERS = {"Content-Type": "application/x-protobuf"}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


async def start(stack: Stack, authority: Authority, *, mutual: bool = False, token: str = "") -> None:
    update = {"tls_cert": authority.path("server.pem"), "tls_key": authority.path("server.key")}
    update |= {"tls_client_ca": authority.path("ca.pem")} if mutual else {}
    stack.settings = stack.settings.model_copy(update={**update, "token": type(stack.settings.token)(token)})
    process = stack.spawn("collector")

    async def healthy() -> bool:
        assert process.poll() is None, stack.log.read_text()
        try:
            async with aiohttp.ClientSession() as session, session.get(f"{https(stack)}/health", ssl=authority.context()) as response:
                return response.status == 200
        except aiohttp.ClientConnectionError:
            return False

    await until(healthy, bool)


def https(stack: Stack) -> str:
    return stack.http.replace("http:", "https:")


@pytest.fixture(scope="module")
def tls_stack(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[Stack]:
    with closing(new_stack(tmp_path_factory.mktemp("tls"))) as made:
        asyncio.run(start(made, authority, token="sesame"))
        yield made


@pytest.fixture(scope="module")
def mutual_stack(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[Stack]:
    with closing(new_stack(tmp_path_factory.mktemp("mutual"))) as made:
        asyncio.run(start(made, authority, mutual=True))
        yield made


@pytest.fixture(autouse=True)
def no_bundle_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """`requests`, which the SDK's HTTP exporter sends with, holds these variables above the exporter's own certificate."""
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)


def export(exporter: SpanExporter) -> None:
    provider = TracerProvider(resource=Resource({conventions.ROLLOUT_ID: "ro-tls"}), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    provider.get_tracer("t").start_span("work").end()
    provider.shutdown()


async def spans_taken(stack: Stack, authority: Authority, *, client: bool = False, token: str = "") -> int:
    headers = {"Authorization": f"Bearer {token}"}
    context = authority.context(client=client)
    async with aiohttp.ClientSession(headers=headers) as session, session.get(f"{https(stack)}/status", ssl=context) as response:
        points = (await response.json())["metrics"]["agl.collector.accepted"]
    return next(point["value"] for point in points if point["attributes"]["signal"] == "traces")


async def test_the_sdks_exporters_connect_with_tls_and_token(tls_stack: Stack, authority: Authority) -> None:
    headers = {"authorization": "Bearer sesame"}
    before = await spans_taken(tls_stack, authority, token="sesame")
    await asyncio.to_thread(export, GrpcSpans(endpoint=f"https://{tls_stack.grpc}", credentials=authority.credentials(), headers=headers))
    await asyncio.to_thread(
        export, HttpSpans(endpoint=f"{https(tls_stack)}/v1/traces", certificate_file=authority.path("ca.pem"), headers=headers)
    )
    assert await spans_taken(tls_stack, authority, token="sesame") == before + 2


async def test_a_client_without_tls_gets_no_answer(tls_stack: Stack) -> None:
    async with aiohttp.ClientSession() as session:
        for url in (f"{tls_stack.http}/v1/traces", f"{tls_stack.http}/health", f"{tls_stack.sql}/ping"):
            with pytest.raises(aiohttp.ClientConnectionError):
                await session.post(url, data=b"x" * 200_000, headers=HEADERS)
    async with grpc.aio.insecure_channel(tls_stack.grpc) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await channel.unary_unary(METHODS[0], request_serializer=None, response_deserializer=None)(b"", timeout=300)
        assert failure.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "Traceback" not in tls_stack.log.read_text()


async def test_a_bad_token_is_refused_over_tls_and_health_needs_none(tls_stack: Stack, authority: Authority) -> None:
    body = request_of([span()]).SerializeToString()
    async with aiohttp.ClientSession(headers={"Authorization": "Bearer wrong"}) as session:
        async with session.post(f"{https(tls_stack)}/v1/traces", data=body, headers=HEADERS, ssl=authority.context()) as response:
            assert response.status == 401
            assert "AGL_TOKEN" in await response.text()
        async with session.get(f"{https(tls_stack)}/health", ssl=authority.context()) as response:
            assert response.status == 200
        async with session.get(f"{https(tls_stack)}/metrics", ssl=authority.context()) as response:
            assert response.status == 401
    async with grpc.aio.secure_channel(tls_stack.grpc, authority.credentials()) as channel:
        call = channel.unary_unary(METHODS[0], request_serializer=None, response_deserializer=None)
        with pytest.raises(grpc.aio.AioRpcError, match="AGL_TOKEN") as failure:
            await call(body, metadata=(("authorization", "Bearer wrong"),))
        assert failure.value.code() == grpc.StatusCode.UNAUTHENTICATED


async def test_client_certificates_are_required_and_checked(mutual_stack: Stack, authority: Authority, tmp_path: Path) -> None:
    before = await spans_taken(mutual_stack, authority, client=True)
    with_certificate = GrpcSpans(endpoint=f"https://{mutual_stack.grpc}", credentials=authority.credentials(client=True))
    await asyncio.to_thread(export, with_certificate)
    over_http = HttpSpans(
        endpoint=f"{https(mutual_stack)}/v1/traces",
        certificate_file=authority.path("ca.pem"),
        client_certificate_file=authority.path("client.pem"),
        client_key_file=authority.path("client.key"),
    )
    await asyncio.to_thread(export, over_http)
    assert await spans_taken(mutual_stack, authority, client=True) == before + 2
    body = request_of([span()]).SerializeToString()
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{https(mutual_stack)}/v1/traces", data=body, headers=HEADERS, ssl=authority.context()) as response:
            assert response.status == 401
            assert "AGL_TLS_CLIENT_CA" in await response.text()
        async with session.get(f"{https(mutual_stack)}/health", ssl=authority.context()) as response:
            assert response.status == 200
        untrusted = authority.context()
        other = await asyncio.to_thread(Authority, tmp_path / "other")
        untrusted.load_cert_chain(other.path("client.pem"), other.path("client.key"))
        with pytest.raises(aiohttp.ClientConnectionError):
            await session.post(f"{https(mutual_stack)}/v1/traces", data=body, headers=HEADERS, ssl=untrusted)
    async with grpc.aio.secure_channel(mutual_stack.grpc, authority.credentials()) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await channel.unary_unary(METHODS[0], request_serializer=None, response_deserializer=None)(body, timeout=300)
        assert failure.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_silent_and_broken_connections_do_no_harm(tls_stack: Stack, authority: Authority) -> None:
    port = tls_stack.settings.otlp_http_port
    silent = await asyncio.open_connection("127.0.0.1", port)
    for greeting in (b"", b"\x16", b"\x16\x03\x01garbage" * 10):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(greeting)
        writer.close()
    assert await spans_taken(tls_stack, authority, token="sesame") >= 0
    silent[1].close()


async def test_sigterm_ends_a_tls_collector(own_stack: Stack, authority: Authority) -> None:
    await start(own_stack, authority)
    assert await own_stack.end("collector") == 0


def test_wrong_certificate_files_are_settings_errors(own_stack: Stack, authority: Authority, tmp_path: Path) -> None:
    (tmp_path / "empty.pem").write_text("")
    good = {"tls_cert": authority.path("server.pem"), "tls_key": authority.path("server.key")}
    wrong = {
        "AGL_TLS_KEY": {"tls_cert": authority.path("server.pem")},
        "AGL_TLS_CERT": {**good, "tls_cert": str(tmp_path / "none.pem")},
        "cannot be used": {**good, "tls_key": authority.path("client.key")},
        "AGL_TLS_CLIENT_CA": {"tls_client_ca": authority.path("ca.pem")},
        "empty.pem": {**good, "tls_client_ca": str(tmp_path / "empty.pem")},
    }
    for message, update in wrong.items():
        with pytest.raises(SettingsError, match=message):
            Tls.load(own_stack.settings.model_copy(update=update))
    assert Tls.load(own_stack.settings) is None
