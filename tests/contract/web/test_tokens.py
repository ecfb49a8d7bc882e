"""Scoped, expiring tokens at the ports of queue, web and Jaeger's storage (the collector's: test_service.py)."""

from __future__ import annotations

import contextlib
import io
import re
import time
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from aiohttp.test_utils import TestClient, TestServer

from agl_otel.errors import AglError
from agl_otel.net.auth import SCOPES, Subject, feedback_key, scoped_token
from agl_otel.queue.client import QueueClient, Witness
from agl_otel.store import LightningStore
from agl_otel.text import LEFT_OUT
from agl_otel.types import LLM, PromptTemplate
from agl_otel.web.app import TABLE, build_app
from agl_otel.web.feedback import Limits
from agl_otel.web.jaeger.service import READER, JaegerServer
from agl_otel.web.rest import ROUTES
from agl_otel.web.reviews import REVIEWS
from agl_otel.web.routes import PREFIX
from agl_otel.web.views import SERVED, VIEWS
from tests.local_queue import LocalQueue

TOKEN = "s3cret"
LATER = time.time() + 7 * 86_400  # also where the whole run takes hours
RESOURCES = [
    PREFIX + route.path
    for route in (*VIEWS, *ROUTES)
    if route.method == "GET" and route.path.startswith("/resources") and route.path != SERVED
]


def of(*scopes: str, until: float = LATER) -> str:
    return scoped_token(TOKEN, scopes, until)


async def test_the_queue_accepts_its_scope_and_explains_other_refusals(tmp_path: Path) -> None:
    async with LocalQueue(f"sqlite:///{tmp_path / 'queue.db'}", token=TOKEN) as queue:
        address = queue.server.service.address
        async with QueueClient(address, token=of("queue")) as client:
            assert (await client.statistics())["total_rollouts"] == 0
        for token, says in (("", "wants a token"), (of("web"), "not for queue"), (of("queue", until=1.0), "expired at")):
            async with QueueClient(address, token=token) as client:
                with pytest.raises(AglError, match=says):
                    await client.statistics()


async def test_only_the_stacks_own_token_registers_addresses(tmp_path: Path) -> None:
    """Readers, runners and the CLI send the stack's token to registered addresses."""
    async with LocalQueue(f"sqlite:///{tmp_path / 'queue.db'}", token=TOKEN) as queue:
        address = queue.server.service.address
        async with QueueClient(address, token=of(*SCOPES)) as client:
            for call in (
                client.announce("collector", "mine", {"collector_http": "http://127.0.0.1:1", "clickhouse": "http://127.0.0.1:1"}),
                client.announce("collector", "theirs", {}, gone=True),
                client.witness([Witness("ro-1", "at-1", "0123456789abcdef", "http://127.0.0.1:1")]),
            ):
                with pytest.raises(AglError, match="stack's token itself"):
                    await call
            described = await client.describe()
            assert (described.collectors, described.clickhouses) == ([], [])
        async with QueueClient(address, token=TOKEN) as client:
            await client.witness([Witness("ro-1", "at-1", "0123456789abcdef", "http://127.0.0.1:1")])
            assert (await client.announce("collector", "ours", {"collector_http": "http://127.0.0.1:2"})).collectors == [
                "http://127.0.0.1:2"
            ]


async def test_the_web_service_accepts_its_scope_and_metrics_theirs(tmp_path: Path) -> None:
    async with LocalQueue(f"sqlite:///{tmp_path / 'queue.db'}", token=TOKEN) as queue:
        store = LightningStore(queue.server.service.address, token=TOKEN)
        async with store, TestClient(TestServer(build_app(store, TOKEN))) as client:

            async def ask(path: str, token: str) -> tuple[int, str]:
                async with client.get(path, headers={"Authorization": f"Bearer {token}"}) as answer:
                    return answer.status, await answer.text()

            assert (await ask("/v1/agl/describe", of("web")))[0] == 200 == (await ask("/metrics?relay=0", of("metrics")))[0]
            for token, says in (
                ("wrong", "a bearer token is needed"),
                (of("metrics"), "not for web"),
                (of("web", until=1.0), "expired at"),
            ):
                status, text = await ask("/v1/agl/describe", token)
                assert status == 401 and says in text


@pytest.mark.full
async def test_health_names_services_that_are_down_only_to_token_holders(tmp_path: Path) -> None:
    running = contextlib.AsyncExitStack()
    queue = await running.enter_async_context(LocalQueue(f"sqlite:///{tmp_path / 'queue.db'}", token=TOKEN))
    store = LightningStore(queue.server.service.address, token=TOKEN)
    async with store, TestClient(TestServer(build_app(store, TOKEN))) as client:
        await running.aclose()
        for path in ("/health", "/v1/agl/health"):
            for given in ("", "wrong", of("collector"), TOKEN, of("view")):
                async with client.get(path, headers={"Authorization": f"Bearer {given}"}) as answer:
                    details = {"down": ["queue"]} if given in (TOKEN, of("view")) else {}
                    assert (answer.status, await answer.json()) == (200, {"status": "degraded", **details})


async def test_a_view_token_reads_everything_and_changes_nothing(tmp_path: Path) -> None:
    async with LocalQueue(f"sqlite:///{tmp_path / 'queue.db'}", token=TOKEN) as queue:
        store = LightningStore(queue.server.service.address, token=TOKEN)
        async with store, TestClient(TestServer(build_app(store, TOKEN))) as client:
            headers = {"Authorization": f"Bearer {of('view')}"}
            open_to_it = {
                "/rollouts/search",
                "/rollouts/{rollout_id}/attempts/search",
                "/spans/search",
                "/workers/search",
                "/waits/rollouts",
            }
            open_to_it |= {"/rollouts/figures", "/rollouts/outputs", "/sql"}
            for route in TABLE:
                path = PREFIX + re.sub(r"{\w+}", "some", route.path)
                async with client.request(route.method, path, json={} if route.method == "POST" else None, headers=headers) as answer:
                    refused = answer.status == 401 and "not for web" in await answer.text()
                assert refused == (route.method == "POST" and route.path not in open_to_it), route
            for path in ("/v1/traces", "/v1/agl/nothing"):
                async with client.post(path, headers=headers) as answer:
                    assert answer.status == 401
            async with client.get("/v1/agl/describe", headers=headers) as answer:
                assert answer.status == 200


async def test_a_products_token_gets_prompts_and_opens_nothing_else(tmp_path: Path) -> None:
    async with LocalQueue(f"sqlite:///{tmp_path / 'queue.db'}", token=TOKEN) as queue:
        store = LightningStore(queue.server.service.address, token=TOKEN)
        async with store, TestClient(TestServer(build_app(store, TOKEN))) as client:
            await store.publish({"p": PromptTemplate(template="be kind", engine="f-string")}, resources_id="production")
            headers = {"Authorization": f"Bearer {of('prompts')}"}
            for route in TABLE:
                path = PREFIX + re.sub(r"{\w+}", "some", route.path)
                async with client.request(route.method, path, json={} if route.method == "POST" else None, headers=headers) as answer:
                    text = await answer.text()
                    is_open = route.path == SERVED or path == f"{PREFIX}/health"
                    assert is_open or (answer.status == 401 and "this token is for prompts" in text), route
            async with client.get(PREFIX + SERVED, params={"conversation_id": "a"}, headers=headers) as answer:
                assert (await answer.json())["prompts"]["p"]["template"] == "be kind"
            async with client.post(PREFIX + SERVED, params={"conversation_id": "a"}, headers=headers) as answer:
                assert answer.status in (401, 405)


async def test_a_reviewers_token_reads_everything_and_sends_feedback(tmp_path: Path) -> None:
    async with LocalQueue(f"sqlite:///{tmp_path / 'queue.db'}", token=TOKEN) as queue:
        store = LightningStore(queue.server.service.address, token=TOKEN)
        async with store, TestClient(TestServer(build_app(store, TOKEN))) as client:
            headers = {"Authorization": f"Bearer {of('view', 'feedback')}"}
            async with client.get(f"{PREFIX}/reviews/rubrics", headers=headers) as answer:
                assert (answer.status, await answer.json()) == (200, [])
            for path, status in (("/feedback", 404), ("/reviews/rubrics", 401), ("/resources", 401)):
                async with client.post(PREFIX + path, json={"value": 1, "rollout_id": "ro-1"}, headers=headers) as answer:
                    assert answer.status == status, path


async def test_a_feedback_token_sends_feedback_and_opens_nothing_else(tmp_path: Path) -> None:
    async with LocalQueue(f"sqlite:///{tmp_path / 'queue.db'}", token=TOKEN) as queue:
        store = LightningStore(queue.server.service.address, token=TOKEN)
        async with store, TestClient(TestServer(build_app(store, TOKEN, feedback_per_minute=4))) as client:
            keys = [of("feedback"), feedback_key(TOKEN, Subject("response", "chatcmpl-1"), LATER)]
            for key in keys:
                headers = {"Authorization": f"Bearer {key}"}
                for route in (*VIEWS, *ROUTES, *REVIEWS):
                    path = PREFIX + re.sub(r"{\w+}", "some", route.path)
                    async with client.request(route.method, path, json={} if route.method == "POST" else None, headers=headers) as answer:
                        assert answer.status in (200, 401) and (answer.status == 401 or path == f"{PREFIX}/health"), route
                async with client.get(f"{PREFIX}/feedback", headers=headers) as answer:
                    assert answer.status == 401

            async def send(key: str, **body: Any) -> tuple[int, str]:
                async with client.post(f"{PREFIX}/feedback", json=body, headers={"Authorization": f"Bearer {key}"}) as answer:
                    return answer.status, await answer.text()

            for key, body, status, says in (
                (of("feedback"), {"value": 1, "rollout_id": "ro-1"}, 404, "ro-1"),
                *[(of("feedback"), {"value": 1}, 400, "name one of")] * 8,
                (keys[1], {"value": "good"}, 400, "value"),
                (keys[1], {"value": 1, "response_id": "chatcmpl-2"}, 403, "chatcmpl-1"),
                (keys[1], {"value": 1, "source": "ann"}, 403, "source 'user'"),
                (keys[1], {"value": 1e8}, 400, "rewards from -1 to 1"),
                (keys[1], {"value": 1}, 429, "(AGL_FEEDBACK_PER_MINUTE): try again in"),
                (feedback_key(TOKEN, Subject("response", "x"), 1.0), {"value": 1}, 401, "expired at"),
                (feedback_key("another", Subject("response", "x"), LATER), {"value": 1}, 401, "agl-otel token --for feedback"),
                (feedback_key(TOKEN, Subject("response", "x"), LATER), {"value": 1, "rollout_id": "ro-1"}, 403, "leave out rollout_id"),
                (of("feedback"), {"value": "0.5", "rollout_id": "ro-1"}, 400, "and no text"),
                (of("view"), {"value": 1}, 401, "not for web"),
                (TOKEN, {"value": 1, "rollout_id": "ro-1"}, 404, "ro-1"),
            ):
                found, text = await send(key, **body)
                assert found == status and says in text, (key, body, text)
            async with client.post(
                f"{PREFIX}/feedback", data=io.BytesIO(b"x" * (2 << 20)), headers={"Authorization": f"Bearer {keys[1]}"}
            ) as answer:
                assert answer.status == 413


def test_a_token_that_is_bound_to_nothing_sends_for_many_users() -> None:
    limits = Limits(6)
    assert [limits.wait_seconds("a user's") > 0 for _ in range(7)] == [False] * 6 + [True]
    assert sum(limits.wait_seconds("a program's", users=100) == 0 for _ in range(1000)) >= 600


async def test_jaegers_storage_refuses_callers_without_a_token() -> None:
    server = JaegerServer(LightningStore("127.0.0.1:1"), TOKEN)
    await server.start("127.0.0.1", 0)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            for token, code, says in (
                ("", grpc.StatusCode.UNAUTHENTICATED, "authorization: Bearer TOKEN"),
                ("wrong", grpc.StatusCode.UNAUTHENTICATED, "authorization: Bearer TOKEN"),
                (of("web", until=1.0), grpc.StatusCode.UNAUTHENTICATED, "expired at"),
                (TOKEN, grpc.StatusCode.UNIMPLEMENTED, ""),
                (of("web"), grpc.StatusCode.UNIMPLEMENTED, ""),
                (of("view"), grpc.StatusCode.UNIMPLEMENTED, ""),
            ):
                metadata = (("authorization", f"Bearer {token}"),) if token else ()
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await channel.unary_unary(f"/{READER}/NoSuchMethod", bytes, bytes)(b"", metadata=metadata)
                assert refused.value.code() is code and says in (refused.value.details() or "")
                if not token:
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await channel.unary_unary(f"/{READER}/GetServices", bytes, bytes)(b"")
                    assert refused.value.code() is code
    finally:
        await server.stop(0)


async def test_a_providers_key_is_never_returned_over_rest(tmp_path: Path) -> None:
    """This holds for every token: agents get a key from their runner, and the proxy adds the provider's."""
    llm: dict[str, Any] = {"resource_type": "llm", "endpoint": "http://me:pa55word@m/v1", "model": "x", "api_key": "sk-0123456789"}
    llm["sampling_parameters"] = {"temperature": 0.5, "extra_headers": {"authorization": "Bearer abcdefgh12345"}}
    prompt = {"resource_type": "prompt_template", "template": "say sk-not-a-key-0123456789", "engine": "f-string"}
    async with LocalQueue(f"sqlite:///{tmp_path / 'queue.db'}", token=TOKEN) as queue:
        store = LightningStore(queue.server.service.address, token=TOKEN)
        async with store, TestClient(TestServer(build_app(store, TOKEN))) as client:
            headers = {"Authorization": f"Bearer {TOKEN}"}
            given = {"resources": {"m": llm, "p": prompt}}
            async with client.post("/v1/agl/resources/rs-1", json=given, headers=headers) as answer:
                texts = [await answer.text()]
            reads = [path.replace("{resources_id}", "rs-1").replace("{version}", "1") for path in RESOURCES]
            assert len(reads) >= 5
            for path in reads:
                for token in (TOKEN, of("view"), of("web")):
                    async with client.get(path, headers={"Authorization": f"Bearer {token}"}) as answer:
                        assert answer.status == 200, path
                        texts.append(await answer.text())
            for text in texts:
                for secret in ("sk-0123456789", "pa55word", "abcdefgh12345"):
                    assert secret not in text
                assert "@m/v1" in text and "0.5" in text and "say sk-not-a-key-0123456789" in text, "the rest is shown as it is"
            kept = await store.get_resources_by_id("rs-1")
            assert kept is not None and kept.resources["m"].model_dump()["api_key"] == "sk-0123456789", "runners have it"
            shown = {"resources": {"m": {**llm, "api_key": LEFT_OUT}}}
            async with client.post("/v1/agl/resources/rs-1", json=shown, headers=headers) as answer:
                assert answer.status == 400 and "give the key" in await answer.text(), "what was shown is no key"


async def test_a_token_for_the_queue_reads_no_providers_key(tmp_path: Path) -> None:
    async with LocalQueue(f"sqlite:///{tmp_path / 'queue.db'}", token=TOKEN) as queue:
        address = queue.server.service.address
        async with QueueClient(address, token=TOKEN) as runner, QueueClient(address, token=of("queue")) as other:
            await runner.put_resources({"m": LLM(endpoint="http://m/v1", model="x", api_key="sk-0123456789")}, resources_id="rs-1")
            for client, key in ((runner, "sk-0123456789"), (other, LEFT_OUT)):
                for found in (await client.get_resources("rs-1"), (await client.query_resources())[0]):
                    assert found is not None and found.resources["m"].model_dump()["api_key"] == key
