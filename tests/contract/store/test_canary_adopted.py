"""Calls of no rollout by a canary and by the LLM that it stands beside, as they are stored and adopted."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import aiohttp
import pytest
from opentelemetry import baggage, trace
from opentelemetry.propagate import inject
from opentelemetry.sdk.trace import TracerProvider

from agl_otel.collector.late_pass import CONVERSATION
from agl_otel.collector.maintenance import Maintenance
from agl_otel.proxy.canary import drawn
from agl_otel.stack.backup import SQLITE_FILE, TRACES
from agl_otel.store import LightningStore
from agl_otel.store.embedded import EmbeddedStack
from agl_otel.traces.chdb import ChdbEngine
from agl_otel.types import LLM
from agl_otel_hook import conventions
from tests.local_queue import LocalQueue, ManualClock
from tests.model_server import ModelServer

pytestmark = pytest.mark.full
TALKS = [f"talk {number}" for number in range(6)]
TURNS = 3


async def talk(data_dir: Path) -> None:
    """Have each conversation in turns of a trace each: half of them name it by baggage, half by the header."""
    servers = ModelServer(), ModelServer()
    for server in servers:
        await server.start()
    store = LightningStore(source=EmbeddedStack(data_dir, services=("queue", "collector", "proxy")))
    main, canary = (LLM(endpoint=server.url, model="policy") for server in servers)
    await store.publish({"main": main, "next": canary.model_copy(update={"share": 0.5})}, resources_id="production", aside=True)
    known = (await store.open()).description
    tracer = TracerProvider().get_tracer("shop")
    async with aiohttp.ClientSession() as session:
        for turn in range(TURNS):
            for number, name in enumerate(TALKS):
                headers: dict[str, str] = {}
                with tracer.start_as_current_span("POST /chat") as span:
                    context = trace.set_span_in_context(span)
                    inject(headers, baggage.set_baggage(conventions.CONVERSATION_ID, name, context) if number % 2 else context)
                if not number % 2:
                    headers[conventions.HEADER_CONVERSATION_ID] = name
                body = {"model": "policy", "messages": [{"role": "user", "content": f"{name}, turn {turn}"}]}
                async with session.post(f"{known.proxy}/v1/chat/completions", json=body, headers=headers) as answer:
                    assert answer.status == 200, await answer.text()
    await store.close()
    for server in servers:
        await server.stop()


async def adopt(data_dir: Path) -> int:
    engine = ChdbEngine(data_dir / TRACES)
    async with LocalQueue(f"sqlite:///{data_dir / SQLITE_FILE}", clock=ManualClock(time.time())) as queue:
        maintenance = Maintenance(engine, queue.client, adopt_after=60.0, clock=ManualClock(time.time() + 120))
        adopted = (await maintenance.run(0.0))["adopted"]
        await maintenance.close()
    engine.close()
    return int(adopted)


def test_the_turns_of_a_conversation_are_one_rollout_of_one_arm(tmp_path: Path) -> None:
    asyncio.run(talk(tmp_path))
    assert asyncio.run(adopt(tmp_path)) == len(TALKS)
    engine = ChdbEngine(tmp_path / TRACES)
    found = engine.select(
        "SELECT ConversationId, any(RolloutId), uniqExact(RolloutId), groupUniqArray(SpanAttributes['agentlightning.llm.arm']), count() "
        f"FROM otel.otel_traces WHERE SpanName = '{conventions.SPAN_LLM}' AND RolloutId != '' GROUP BY ConversationId ORDER BY 1"
    )
    engine.close()
    rows = [tuple(row) for row in found]
    arms = {name: "next" if drawn("next", name) < 0.5 else "main" for name in TALKS}
    assert [(row[0], row[2:]) for row in rows] == [(name, (1, [arms[name]], TURNS)) for name in TALKS]
    assert all(str(row[1]).startswith(CONVERSATION) for row in rows) and {*arms.values()} == {"main", "next"}
