"""GRPO's asynchronous mode against its synchronous one, with agents whose tools are sometimes slow: `python -m bench.async_grpo`.

The agent of examples/first_light waits for a tool after its model call: `--tool` seconds, or `--slow` seconds with probability `--share`.
Both modes train the same number of steps and rollouts from the same seed; the asynchronous one has more groups in flight, trains on the
first complete ones, and corrects for stale samples. The result is the time of the training steps, and the final score on held-out tasks
(without tools). Takes several minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "first_light"
AGENT = """
import asyncio, os, random
from openai import AsyncOpenAI
source = random.Random({seed})
async def answer(question, rollout):
    reply = await AsyncOpenAI().chat.completions.create(model="policy", messages=[{{"role": "user", "content": question}}])
    if rollout.mode == "train":
        await asyncio.sleep({slow} if source.random() < {share} else {tool})
    return reply.choices[0].message.content or ""
"""
JOB = """
[agent]
function = "agent.py:answer"
grader = "{example}/grade.py:grade"
concurrency = 512
[data]
train = "{example}/tasks.py:train"
val = "{example}/tasks.py:val"
options = {{ target = 1 }}
[algorithm]
name = "grpo"
prompts_per_step = {prompts}
group_size = 8
max_steps = {steps}
metrics = []
keep_checkpoints = 1
checkpoint_every_steps = 1000
"""
ASYNC = "groups_in_flight = {in_flight}\nmax_staleness = {staleness}\nimportance_cap = 2.0\n"


def main() -> int:
    """Print the figures; return 1 if it is less than 1.5 times as fast, or its final score is lower by more than 0.05."""
    parser = argparse.ArgumentParser(prog="python -m bench.async_grpo")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--in-flight", type=int, default=32)
    parser.add_argument("--staleness", type=int, default=5)
    parser.add_argument("--tool", type=float, default=0.2)
    parser.add_argument("--slow", type=float, default=10.0)
    parser.add_argument("--share", type=float, default=0.05)
    options = parser.parse_args()
    results = {mode: trained(options, mode) for mode in ("sync", "async")}
    ratio = results["sync"]["seconds"] / results["async"]["seconds"]
    scores = {mode: results[mode]["score_after"] for mode in results}
    for metric, unit in (("seconds", "s"), ("score_before", ""), ("score_after", ""), ("stale_share", ""), ("oldest", "steps")):
        ours, baseline = results["async"][metric], results["sync"][metric]
        line = {"bench": "async_grpo", "metric": metric, "value": ours, "unit": unit, "baseline": baseline}
        print(json.dumps({**line, "ratio": round(ratio, 3) if metric == "seconds" else None, "against": "synchronous mode"}))
    return 0 if ratio >= 1.5 and scores["async"] >= scores["sync"] - 0.05 else 1


def trained(options: argparse.Namespace, mode: str) -> dict[str, Any]:
    """Run one training; return its result and figures."""
    with tempfile.TemporaryDirectory(prefix="bench-async-") as name:
        place = Path(name)
        (place / "agent.py").write_text(AGENT.format(seed=1, slow=options.slow, share=options.share, tool=options.tool))
        more = ASYNC.format(in_flight=options.in_flight, staleness=options.staleness) if mode == "async" else ""
        (place / "job.toml").write_text(JOB.format(example=EXAMPLE, prompts=options.prompts, steps=options.steps) + more)
        command = [sys.executable, "-m", "agl_otel", "train", "job.toml", "--data-dir", "data", "--run-dir", "run", "--json"]
        done = subprocess.run(command, cwd=place, stdout=subprocess.PIPE, check=True)
        steps = [json.loads(line) for line in (place / "run" / "metrics.jsonl").read_text().splitlines()]
    trajectories = sum(step["trajectories"] for step in steps)
    return {
        **json.loads(done.stdout),
        "seconds": round(steps[-1]["ended_at"] - steps[0]["started_at"], 1),
        "stale_share": round(sum(step["off_policy"] for step in steps) / trajectories, 3),
        "oldest": max(step["oldest"] for step in steps),
    }


if __name__ == "__main__":
    sys.exit(main())
