"""Terminal 3: the algorithm. It tries several prompts and keeps the one with the best reward."""

from __future__ import annotations

import asyncio
import os

import agl_otel as agl

STORE = os.environ.get("TUTORIAL_STORE", "http://localhost:4747")
PROMPTS = [
    agl.PromptTemplate(template="Answer: {question}", engine="f-string"),
    "Be friendly. {question}",
    "Be friendly and short, and give an example. {question}",
]


async def find_best_prompt(store: agl.LightningStore, prompts: list[agl.PromptTemplate | str], task: str) -> tuple[float, str]:
    scores: list[tuple[float, str]] = []
    for prompt in prompts:
        resources = await store.add_resources({"prompt_template": prompt})
        rollout = await store.enqueue_rollout(input=task, mode="train", resources_id=resources.resources_id)
        finished = await store.wait_for_rollouts([rollout.rollout_id], timeout=30)
        [status] = await store.query_rollouts([rollout.rollout_id])
        spans = await store.query_spans(rollout.rollout_id)
        reward = agl.find_final_reward(spans)
        text = prompt if isinstance(prompt, str) else prompt.template
        print(f"{reward!s:>6}  {status.status}, {len(finished)} finished, {len(spans)} spans: {text}")
        scores.append((reward or 0.0, text))
    return max(scores)


async def main() -> None:
    store = agl.LightningStoreClient(STORE)
    score, prompt = await find_best_prompt(store, PROMPTS, "What is a rollout?")
    print(f"best prompt ({score:.2f}): {prompt}")
    await store.close()


if __name__ == "__main__":
    asyncio.run(main())
