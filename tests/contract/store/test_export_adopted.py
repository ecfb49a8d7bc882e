"""`agl-otel export` of adopted traffic: its rows against what the product and its model server wrote themselves."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagate import inject
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from agl_otel.cli import main
from agl_otel.collector.late_pass import ADOPTED
from agl_otel.collector.maintenance import Maintenance
from agl_otel.stack.backup import SQLITE_FILE, TRACES
from agl_otel.store import LightningStore
from agl_otel.store.embedded import EmbeddedStack
from agl_otel.traces.chdb import ChdbEngine
from agl_otel_hook import conventions
from tests.local_queue import LocalQueue, ManualClock
from tests.model_server import ModelServer, in_a_thread

Json = dict[str, Any]
IMAGE = "data:image/png;base64,iVBORw0KGgo="
TEXT: list[Json] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "which colour?"}]
PICTURE: list[Json] = [
    {"role": "user", "content": [{"type": "text", "text": "what is it?"}, {"type": "image_url", "image_url": {"url": IMAGE}}]}
]


class Model(ModelServer):
    """Never says the same twice."""

    def reply(self, messages: Sequence[Json], choice: int) -> str:  # pyright: ignore[reportIncompatibleMethodOverride] - not static
        return f"answer {len(self.requests)}"


@dataclass
class Product:
    """A store with adopted traces."""

    data_dir: Path
    said: dict[str, list[Json]] = field(default_factory=dict[str, list[Json]])
    """{rollout id: the messages of its call, with the reply}."""
    best: dict[str, str] = field(default_factory=dict[str, str])
    """{question: the rollout with the higher reward}."""
    address: str = ""


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    made = Product(tmp_path_factory.mktemp("adopted"))
    asyncio.run(use(made))
    asyncio.run(adopt(made.data_dir, len(made.said)))
    stack = EmbeddedStack(made.data_dir)
    made.address = stack.address()
    yield made
    stack.stop()


async def use(product: Product) -> None:
    """Ask each question twice, a trace each, and rate the answers in the trace."""
    model = Model()
    await model.start()
    settings = {"upstream_url": model.url}
    store = LightningStore(source=EmbeddedStack(product.data_dir, services=("queue", "collector", "proxy"), settings=settings))
    known = (await store.open()).description
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(f"{known.collectors[0]}/v1/traces")))
    tracer = provider.get_tracer("shop")
    async with aiohttp.ClientSession() as session:
        for name, asked in (("text", TEXT), ("picture", PICTURE)):
            for rating in (1.0, 0.0):
                with tracer.start_as_current_span("POST /chat", attributes={"input.value": json.dumps(asked)}) as span:
                    headers: dict[str, str] = {}
                    inject(headers)
                    body = {"model": "policy", "messages": asked, "logprobs": True}
                    async with session.post(f"{known.proxy}/v1/chat/completions", json=body, headers=headers) as answer:
                        assert answer.status == 200, await answer.text()
                        message = (await answer.json())["choices"][0]["message"]
                    graded = {conventions.reward_name_key(0): "primary", conventions.reward_value_key(0): rating}
                    tracer.start_span(conventions.SPAN_ANNOTATION, attributes=graded).end()
                    rollout_id = f"{ADOPTED}{span.get_span_context().trace_id:032x}"
                    product.said[rollout_id] = [*asked, {"role": "assistant", "content": message["content"]}]
                    product.best.setdefault(name, rollout_id)
    await asyncio.to_thread(provider.shutdown)
    await store.close()
    await model.stop()


async def adopt(data_dir: Path, traces: int) -> None:
    """Run the pass of the collector that adopts quiet traces, with a clock on which they are quiet."""
    engine = ChdbEngine(data_dir / TRACES)
    async with LocalQueue(f"sqlite:///{data_dir / SQLITE_FILE}", clock=ManualClock(time.time())) as queue:
        maintenance = Maintenance(engine, queue.client, adopt_after=60.0, clock=ManualClock(time.time() + 120))
        assert (await maintenance.run(0.0))["adopted"] == traces
        await maintenance.close()
    engine.close()


def exported(product: Product, form: str, folder: Path) -> list[Json]:
    target = folder / f"{form}.jsonl"
    with pytest.raises(SystemExit) as ended:
        main(["export", str(target), "--as", form, "--store", product.address])
    assert ended.value.code == 0
    return [json.loads(line) for line in target.read_text().splitlines()]


@pytest.mark.parametrize("form", ["trajectories", "transitions", "sft", "messages", "openai"])
def test_rows_hold_what_client_and_model_wrote(product: Product, form: str, tmp_path: Path) -> None:
    rows = exported(product, form, tmp_path)
    assert sorted((row["messages"] for row in rows), key=json.dumps) == sorted(product.said.values(), key=json.dumps)
    if form in ("trajectories", "transitions", "messages"):
        assert {row["rollout_id"]: row["images"] for row in rows} == {
            rollout_id: [IMAGE] if IMAGE in json.dumps(said) else [] for rollout_id, said in product.said.items()
        }


@pytest.mark.parametrize("form", ["dpo", "openai_dpo"])
def test_pairs_hold_what_client_and_model_wrote(product: Product, form: str, tmp_path: Path) -> None:
    rows = exported(product, form, tmp_path)
    if form == "openai_dpo":
        rows = [
            {"prompt": row["input"]["messages"], "chosen": row["preferred_output"], "rejected": row["non_preferred_output"]} for row in rows
        ]
    best, worst = [*product.best.values()], [each for each in product.said if each not in product.best.values()]
    assert sorted(({name: row[name] for name in ("prompt", "chosen", "rejected")} for row in rows), key=json.dumps) == sorted(
        (
            {"prompt": product.said[good][:-1], "chosen": product.said[good][-1:], "rejected": product.said[poor][-1:]}
            for good, poor in zip(best, worst, strict=True)
        ),
        key=json.dumps,
    )


def test_a_judge_makes_rewards_of_adopted_traces(product: Product, tmp_path: Path) -> None:
    """It agrees with the ratings in the traces, and sees what client and model wrote, without the images."""
    best = [json.dumps(product.said[each][-1]) for each in product.best.values()]

    def label(messages: Sequence[Json], _: int) -> str:
        label = "good" if any(each in messages[1]["content"] for each in best) else "bad"
        return json.dumps({"reason": "as rated", "label": label})

    async def put() -> None:
        async with LightningStore(product.address) as store:
            await store.put_rubric("rated", "good = 1\nbad = 0")

    asyncio.run(put())
    with in_a_thread(ModelServer()) as judge, pytest.raises(SystemExit) as ended:
        judge.reply = label  # type: ignore[method-assign]
        main(["judge", "--rubric", "rated", "--model", "m", "--endpoint", judge.url, "--limit", "9", "--store", product.address])
    assert ended.value.code == 0 and len(judge.requests) == len(product.said) == 4
    for request in judge.requests:
        shown = request["messages"][1]["content"]
        assert "which colour?" in shown or ("what is it?" in shown and '"left_out": true' in shown and "iVBOR" not in shown)
    target = tmp_path / "good.jsonl"
    with pytest.raises(SystemExit):
        main(["export", str(target), "--as", "openai", "--reward-source", "judge:m", "--min-reward", "1", "--store", product.address])
    rows = [json.loads(line)["messages"] for line in target.read_text().splitlines()]
    assert sorted(rows, key=json.dumps) == sorted((product.said[each] for each in product.best.values()), key=json.dumps)
