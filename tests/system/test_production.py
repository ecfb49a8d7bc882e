"""Offline rollouts: a product's own traffic, adopted and trained on; and weights whose version a publisher sets at a proxy.

A product knows nothing of rollouts: it calls its model through our proxy and reports by OTLP. A whole trace becomes a rollout once it has
been quiet for a minute, so the traffic comes first, and is trained on after the other tests.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagate import inject
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from agl_otel.algorithms.grpo import tiny
from agl_otel.algorithms.grpo.algorithm import GRPO
from agl_otel.algorithms.verl.publish import Publisher, set_proxy_version
from agl_otel.algorithms.verl.spec import Spec
from agl_otel.errors import ModelServerError, UnavailableError
from agl_otel.store import LightningStore
from agl_otel.store.embedded import EmbeddedStack
from agl_otel.traces.collector_client import open_session, posting
from agl_otel_hook import conventions
from tests.environments import AbsentError, installed
from tests.model_server import ModelServer
from tests.system.stack_process import ENVIRONMENT
from tests.system.test_model_server import Server, server
from tests.system.test_wandb import WANDB

__all__ = ["server"]  # the fixture
pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]
QUIET_SECONDS = 300.0  # limit for the adoption of the traffic on a loaded machine; it takes 60


@dataclass
class Product:
    """A stack that adopts traces, and the traces of the product."""

    store: LightningStore
    traces: dict[str, float]
    """{trace id: reward}."""


@pytest.fixture(scope="module")
def product(server: Server) -> Iterator[Product]:
    settings = {"unidentified": "adopt", "upstream_url": f"{server.url}/v1"}
    store = LightningStore(source=EmbeddedStack(services=("queue", "collector", "proxy"), settings=settings))
    yield Product(store, asyncio.run(traffic(store)))
    asyncio.run(store.close())


async def traffic(store: LightningStore) -> dict[str, float]:
    """Send the product's traffic: it answers, and records its users' satisfaction in its own trace."""
    known = (await store.open()).description
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(f"{known.collectors[0]}/v1/traces")))
    tracer, made = provider.get_tracer("shop"), dict[str, float]()
    async with aiohttp.ClientSession() as session:
        for number in tiny.TRAIN_NUMBERS[:12]:
            asked = [{"role": "user", "content": tiny.question(number)}]
            with tracer.start_as_current_span("POST /chat", attributes={"gen_ai.input.messages": json.dumps(asked)}) as span:
                headers: dict[str, str] = {}
                inject(headers)
                body = {"model": "policy", "messages": asked, "logprobs": True}
                async with session.post(f"{known.proxy}/v1/chat/completions", json=body, headers=headers) as answer:
                    said = (await answer.json())["choices"][0]["message"]["content"]
                content = float(said == str(tiny.BEHAVIOURS[1](number % 10)))
                graded = {conventions.reward_name_key(0): "primary", conventions.reward_value_key(0): content}
                tracer.start_span(conventions.SPAN_ANNOTATION, attributes=graded).end()
                made[format(span.get_span_context().trace_id, "032x")] = content
    await asyncio.to_thread(provider.shutdown)
    return made


FIT = """
import json, sys
import aiohttp
import agl_otel as agl
from agl_otel.algorithms.grpo import tiny
from agl_otel.algorithms.grpo.algorithm import GRPO

async def agent(task: int, llm: agl.LLM) -> float:
    body = {"model": llm.model, "messages": [{"role": "user", "content": tiny.question(task)}]}
    async with aiohttp.ClientSession() as session, session.post(llm.endpoint.rstrip("/") + "/chat/completions", json=body) as answer:
        return float((await answer.json())["choices"][0]["message"]["content"] == str(tiny.BEHAVIOURS[1](task % 10)))

if __name__ == "__main__":
    policy, url, store, wandb = sys.argv[1:]
    sys.path.append(wandb)  # ours first: wandb brings other versions of what we use
    shown = ["wandb"] if wandb else []
    sizes = {"max_steps": 2, "prompts_per_step": 4, "group_size": 4}
    grpo = GRPO.from_options(model_dir=policy, model_server_url=url, run_dir="run", metrics=shown, **sizes)
    trainer = agl.Trainer(algorithm=grpo, store=agl.LightningStoreClient(store), strategy="cs", n_runners=2, tracer=agl.OtelTracer())
    trainer.fit(agent, list(tiny.TRAIN_NUMBERS[:8]))
    print(json.dumps([[each.step, each.rollouts, each.trajectories, each.refused, each.off_policy] for each in grpo.reports]))
"""


def test_grpo_trains_with_runners_in_separate_processes(product: Product, server: Server, tmp_path: Path) -> None:
    """Trainer.fit under the strategy `cs`, with an agent defined in `__main__`, and with the real W&B, offline, if installed."""
    try:
        wandb = str(next((installed("wandb", WANDB) / "lib").glob("python3*/site-packages")))
    except AbsentError:
        wandb = ""
    (tmp_path / "main.py").write_text(FIT)

    async def address() -> str:
        return str((await product.store.open()).description.queue)

    command = [sys.executable, "main.py", str(server.folder), server.url, asyncio.run(address()), wandb]
    given = {**ENVIRONMENT, "AGL_MANAGED_STORE": "0", "WANDB_MODE": "offline", "WANDB_SILENT": "true", "HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=given, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    reports = json.loads(done.stdout.splitlines()[-1])
    assert reports == [[1, 16, 16, {}, 0], [2, 16, 16, {}, 0]]
    assert (tmp_path / "run" / "checkpoints" / "step-000002").is_dir()
    if wandb:
        assert json.loads((tmp_path / "run" / "wandb.json").read_text())["row"] == 4
        (sent,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
        assert b"logprob_drift" in sent.read_bytes()


async def test_a_publisher_sets_the_weights_version_that_the_model_server_does_not_report(product: Product) -> None:
    model = ModelServer()
    await model.start()
    try:
        spec = Spec(store="", run_id="verl-told", start=1, reports_version=False)
        publisher = Publisher(product.store, spec, {"train": {"temperature": 1.0}, "val": {"temperature": 0.0}})
        assert await publisher.publish([model.url.removeprefix("http://").removesuffix("/v1")], step=7) == "1"
        begun = await product.store.start_rollout("task", resources_id=spec.resources_id("train"))
        url = f"{product.store.description.proxy}/rollout/{begun.rollout_id}/attempt/{begun.attempt.attempt_id}/v1/chat/completions"
        async with aiohttp.ClientSession() as session:
            async with session.post(url, json={"messages": [{"role": "user", "content": "hi"}]}) as answer:
                assert answer.status == 200
            await session.post(f"{url.partition('/v1/')[0]}/close")
            await product.store.update_attempt(begun.rollout_id, begun.attempt.attempt_id, status="succeeded")
            assert (await product.store.traces([begun.rollout_id])).calls.model_version == ["7"]
            with pytest.raises(UnavailableError, match=r"the proxy http://127\.0\.0\.1:1 is unreachable and has not got weights version 8"):
                await set_proxy_version(session, "http://127.0.0.1:1", "8", "")
            with pytest.raises(ModelServerError, match="did not take weights version 8: HTTP 404"):
                await set_proxy_version(session, model.url, "8", "")
            await set_proxy_version(session, product.store.description.proxy or "", "", "")  # the other tests' server reports it itself
    finally:
        await model.stop()


async def test_a_products_own_traffic_is_adopted_and_trains_a_step(product: Product, server: Server, tmp_path: Path) -> None:
    store, contents = (await product.store.open()), product.traces
    assert 0 < sum(contents.values()) < len(contents), "there is something to learn"
    adopted = 0.0
    async with asyncio.timeout(QUIET_SECONDS), open_session("") as session:
        while adopted < len(contents):
            async with posting(session, f"{store.description.collectors[0]}/maintain", body={"since": 0}, seconds=60.0) as answer:
                adopted += (await answer.json())["adopted"]
            await asyncio.sleep(1.0)
    grpo = GRPO.from_options(
        model_dir=server.folder, model_server_url=server.url, run_dir=tmp_path / "run", offline_mode="production", importance_cap=2.0,
        updates_per_step=1, max_steps=3, metrics=[],
    )  # fmt: skip
    (report,) = await grpo.train(store, [])
    assert set(report.rollout_ids) == {f"ro-trace-{trace}" for trace in contents}
    assert (report.refused, report.trajectories, report.next_version) == ({}, len(contents), "2")
    assert (await store.traces(report.rollout_ids)).calls.call.tolist() == [1] * len(contents), "nobody numbered them when they were made"
    assert report.reward_mean == pytest.approx(sum(contents.values()) / len(contents))
    inputs: list[Any] = [rollout.input for rollout in await store.query_rollouts(mode_in=["production"])]
    assert all(isinstance(each, list) and each[0]["role"] == "user" for each in inputs)
