"""The product and its users: it asks for the prompt of each conversation, and they accept an answer, correct it, or leave without a word.

`python product.py`, beside `agl-otel improve job.toml`. The product emits OpenTelemetry, and sends its users' verdicts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import time
import uuid
from pathlib import Path
from typing import Any

import aiohttp
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.propagate import inject
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from tasks import HELD_OUT, wanted

PROXY, WEB, COLLECTOR = (
    f"http://127.0.0.1:{os.environ.get(f'AGL_{name}_PORT', port)}" for name, port in (("PROXY", 4000), ("WEB", 4748), ("OTLP_GRPC", 4317))
)
HERE = Path(__file__).parent
ASKED = [digit for digit in range(10) if digit not in HELD_OUT]
HEADERS = {"Authorization": f"Bearer {os.environ['PRODUCT_TOKEN']}"} if "PRODUCT_TOKEN" in os.environ else {}
"""A stack with AGL_TOKEN wants a token: `agl-otel token --for prompts --for models --for feedback`."""
READ_SECONDS = 1.0
"""How long they read an answer before they judge it. Its spans are stored by then, as a rule."""
SPEAK = 0.9
"""The share of users who say what they think; the others leave."""


class Product:
    """A service that answers questions. It keeps its own books, seen.jsonl and rated.jsonl, in `folder`."""

    def __init__(self, session: aiohttp.ClientSession, folder: Path) -> None:
        self.session, self.folder = session, folder
        provider = TracerProvider()
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(COLLECTOR, insecure=True), schedule_delay_millis=500))
        self.tracer = provider.get_tracer("product")

    async def serve(self, rate: float) -> None:
        """Serve so many users in a second, until it is cancelled."""
        async with asyncio.TaskGroup() as users:
            while True:
                users.create_task(self.talk(f"talk-{time.time_ns()}", random.choice(ASKED)))
                await asyncio.sleep(random.expovariate(rate))

    async def talk(self, name: str, digit: int) -> None:
        """Serve one user: answer, and take the verdict."""
        served, reply = None, None
        with contextlib.suppress(aiohttp.ClientError):  # the stack is restarted
            served = await self.served(name)
            reply = await self.answer(name, str(digit), served) if served else None
        arm, prompt = (served["arm"], served["prompts"]["prompt_template"]["template"]) if served else ("", "")
        self.note("seen", talk=name, digit=digit, answer=reply, right=reply == wanted(digit), arm=arm, prompt=prompt)
        if reply is None or random.random() > SPEAK:
            return
        await asyncio.sleep(READ_SECONDS)
        good = reply == wanted(digit)
        verdict = {"source": "users", "value": float(good), **({} if good else {"correction": wanted(digit)})}
        await self.send({"conversation_id": name, **verdict})
        self.note("rated", talk=name, **verdict)

    async def served(self, name: str) -> dict[str, Any] | None:
        """Return the prompts of a conversation, and their arm; None before any are published."""
        async with self.session.get(f"{WEB}/v1/agl/resources/served", params={"conversation_id": name}) as found:
            return await found.json() if found.ok else None

    async def answer(self, name: str, asked: str, served: dict[str, Any]) -> str | None:
        """Return what the model says; None if it does not answer."""
        system = served["prompts"]["prompt_template"]["template"]
        messages = [{"role": "system", "content": system}, {"role": "user", "content": asked}]
        known = {"gen_ai.conversation.id": name, "agentlightning.served.arm": served["arm"]}
        with self.tracer.start_as_current_span("POST /chat", attributes=known):
            headers = {"agl-conversation-id": name}
            inject(headers)
            body = {"model": "words", "messages": messages}
            async with self.session.post(f"{PROXY}/v1/chat/completions", json=body, headers=headers) as answer:
                return (await answer.json())["choices"][0]["message"]["content"] if answer.ok else None

    async def send(self, verdict: dict[str, Any]) -> None:
        """Send a verdict, until it is stored; sent twice, it is the same. Its conversation is known once one of its spans is stored."""
        known = {"id": str(uuid.uuid4()), **verdict}
        while True:
            with contextlib.suppress(aiohttp.ClientConnectionError):
                async with self.session.post(f"{WEB}/v1/agl/feedback", json=known) as answer:
                    if answer.status not in (404, 503):
                        answer.raise_for_status()
                        return
            await asyncio.sleep(1.0)

    def note(self, book: str, **facts: Any) -> None:
        """Write a line into one of the product's own books."""
        with (self.folder / f"{book}.jsonl").open("a") as file:
            file.write(json.dumps({"time": time.time(), **facts}) + "\n")


async def main(rate: float) -> None:
    async with aiohttp.ClientSession(headers=HEADERS) as session:
        await Product(session, HERE).serve(rate)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=10.0, help="Users in a second.")
    asyncio.run(main(parser.parse_args().rate))
