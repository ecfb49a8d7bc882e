"""The same in one call: agent, algorithm and data in one script."""

from __future__ import annotations

import sys

from agent import simple_agent, tasks
from algorithm import PROMPTS, find_best_prompt

import agl_otel as agl


@agl.algo
async def best_prompt(*, store: agl.LightningStore, train_dataset: agl.Dataset[str]) -> None:
    score, prompt = await find_best_prompt(store, PROMPTS, train_dataset[0])
    print(f"best prompt ({score:.2f}): {prompt}")


if __name__ == "__main__":
    agl.setup_logging()
    strategy = sys.argv[1] if len(sys.argv) > 1 else "cs"
    agl.Trainer(algorithm=best_prompt, n_runners=2, strategy=strategy).fit(simple_agent, tasks())
