"""The product and its users: people ask, the product answers by way of the proxy, and they accept, correct, or leave without a word.

`python product.py`, beside `agl-otel improve job.toml`. The product knows nothing of training: it emits OpenTelemetry, and sends its users'
verdicts. `--at-random` is the control: its users' verdicts have nothing to do with what was answered.
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

from agl_otel.algorithms.grpo.tiny import BEHAVIOURS, TRAIN_NUMBERS, question

PROXY, WEB, COLLECTOR = (
    f"http://127.0.0.1:{os.environ.get(f'AGL_{name}_PORT', port)}" for name, port in (("PROXY", 4000), ("WEB", 4748), ("OTLP_GRPC", 4317))
)
HERE = Path(__file__).parent
READ_SECONDS = 1.0
"""How long they read an answer before they judge it. Its spans are stored by then, as a rule."""
SPEAK = 0.9
"""The share of users who say what they think; the others leave."""


class Product:
    """A service that answers questions. It keeps its own books, seen.jsonl and rated.jsonl, in `folder`."""

    def __init__(self, session: aiohttp.ClientSession, folder: Path, taste: int = 1, *, at_random: bool = False) -> None:
        self.session, self.folder, self.taste, self.at_random = session, folder, taste, at_random
        provider = TracerProvider()
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(COLLECTOR, insecure=True), schedule_delay_millis=500))
        self.tracer = provider.get_tracer("product")

    async def serve(self, rate: float) -> None:
        """Serve so many users in a second, until it is cancelled."""
        async with asyncio.TaskGroup() as users:
            while True:
                users.create_task(self.talk(f"talk-{time.time_ns()}", random.choice(TRAIN_NUMBERS)))
                await asyncio.sleep(random.expovariate(rate))

    async def talk(self, name: str, number: int) -> None:
        """Serve one user: answer, and take the verdict."""
        reply = await self.answer(name, question(number))
        self.note("seen", talk=name, number=number, answer=reply, right=reply == self.wanted(number))
        await asyncio.sleep(READ_SECONDS)
        for verdict in self.verdicts(number, reply) if reply is not None else ():
            await self.send({"conversation_id": name, **verdict})
            self.note("rated", talk=name, **verdict)

    async def answer(self, name: str, asked: str) -> str | None:
        """Return what the model says; None if it does not answer."""
        messages = [{"role": "user", "content": asked}]
        known = {"gen_ai.conversation.id": name, "gen_ai.input.messages": json.dumps(messages)}
        with self.tracer.start_as_current_span("POST /chat", attributes=known):
            headers = {"agl-conversation-id": name}
            inject(headers)
            try:
                body = {"model": "policy", "messages": messages}
                async with self.session.post(f"{PROXY}/v1/chat/completions", json=body, headers=headers) as answer:
                    return (await answer.json())["choices"][0]["message"]["content"].strip() if answer.ok else None
            except aiohttp.ClientError:
                return None

    def wanted(self, number: int) -> str:
        """Return the answer that users want."""
        return str(BEHAVIOURS[self.taste](number % 10))

    def verdicts(self, number: int, reply: str) -> list[dict[str, Any]]:
        """Return what is said of an answer: it is accepted, or corrected, or the user leaves."""
        if random.random() > SPEAK:
            return []
        good = random.random() < 0.5 if self.at_random else reply == self.wanted(number)
        return [{"source": "users", "value": float(good), **({} if good else {"correction": self.wanted(number)})}]

    async def send(self, verdict: dict[str, Any]) -> None:
        """Send a verdict, until it is stored; sent twice, it is the same. Its conversation is known once one of its spans is stored."""
        known = {"id": str(uuid.uuid4()), **verdict}
        while True:
            with contextlib.suppress(aiohttp.ClientConnectionError):  # the stack is restarted
                async with self.session.post(f"{WEB}/v1/agl/feedback", json=known) as answer:
                    if answer.status not in (404, 503):
                        answer.raise_for_status()
                        return
            await asyncio.sleep(1.0)

    def note(self, book: str, **facts: Any) -> None:
        """Write a line into one of the product's own books."""
        with (self.folder / f"{book}.jsonl").open("a") as file:
            file.write(json.dumps({"time": time.time(), **facts}) + "\n")


async def main(rate: float, taste: int, at_random: bool) -> None:
    async with aiohttp.ClientSession() as session:
        await Product(session, HERE, taste, at_random=at_random).serve(rate)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=10.0, help="Users in a second.")
    parser.add_argument("--taste", type=int, default=1, help="What they want, a number of tiny.BEHAVIOURS.")
    parser.add_argument("--at-random", action="store_true", help="Their verdicts have nothing to do with the answers.")
    given = parser.parse_args()
    asyncio.run(main(given.rate, given.taste, given.at_random))
