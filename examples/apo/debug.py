"""Debug an agent before training: run one rollout in this process, then all tasks without training.

    python server.py --port 8099                                   # terminal 1
    python debug.py [--endpoint http://127.0.0.1:8099/v1 --model rooms]

Breakpoints in rooms.py work in both cases, because the agent runs in a thread of this process.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from typing import Any

from rooms import choose, train

import agl_otel as agl


class PrintRollout(agl.Hook):
    """Print the messages and reward of each rollout as soon as it has ended."""

    async def on_rollout_end(self, *, agent: Any, runner: Any, rollout: agl.AttemptedRollout, spans: Sequence[Any]) -> None:
        print(f"{rollout.input['time']} for {rollout.input['people']}: {len(spans)} spans, reward {agl.find_final_reward(spans)}")


async def one_rollout(resources: agl.NamedResources, store: agl.LightningStore) -> None:
    """Run one rollout; `runner.step` raises the agent's exception, or returns the finished rollout."""
    runner = agl.LitAgentRunner[Any](tracer=agl.OtelTracer())
    with runner.run_context(agent=choose, store=store, hooks=[PrintRollout()]):
        rollout = await runner.step(train()[0], resources=resources, mode="train")
    for span in await store.query_spans(rollout.rollout_id):
        print(f"  {span.sequence_id:>3} {span.name}")
    for call in agl.TraceToMessages()(list(await store.query_spans(rollout.rollout_id))):
        print("  said:", call["messages"][-1].get("content") or "a call of a tool")


def main(endpoint: str, model: str) -> None:
    resources: agl.NamedResources = {
        "prompt_template": agl.PromptTemplate(template="Choose a room that is free.", engine="f-string"),
        "main_llm": agl.LLM(endpoint=endpoint, model=model),
    }
    store = agl.InMemoryLightningStore()
    asyncio.run(one_rollout(resources, store))
    trainer = agl.Trainer(store=store, strategy="shm", tracer=agl.OtelTracer(), initial_resources=resources, hooks=PrintRollout())
    trainer.dev(choose, train())  # Baseline: runs every task once, without training
    asyncio.run(store.close())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--endpoint", default="http://127.0.0.1:8099/v1")
    parser.add_argument("--model", default="rooms")
    main(**vars(parser.parse_args()))
