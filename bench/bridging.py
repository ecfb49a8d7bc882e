"""GRPO with bridges against GRPO without, on conversations of three turns whose template changes each answer: tokens until the target.

Each turn is a training of the tiny model (some 90 s). The trainer's tokens are those of all samples of all steps, prompts included: a
conversation that is three samples has its beginning in each. Not among the benches of a plain `make bench`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from itertools import count
from pathlib import Path

from agl_otel.types.resources import Bridging
from bench.harness import report, run_bench, take_turns
from tests.bridged_job import QUESTIONS, make_job

POLICY = Path(__file__).parents[1] / "tests" / "tiny_policy"


def train(bridge: Bridging, seed: int) -> float:
    """Train until the target; return the number of tokens in all samples. Prints the run's figures on stderr."""
    with tempfile.TemporaryDirectory(prefix="agl-bridging-") as name:
        folder = Path(name)
        job = make_job(folder, POLICY, bridge, prompts_per_step=8, group_size=8, target_score=0.9, max_steps=100, seed=seed)
        command = [
            sys.executable,
            "-m",
            "agl_otel",
            "train",
            str(job),
            "--run-dir",
            str(folder / "run"),
            "--data-dir",
            str(folder / "data"),
        ]
        subprocess.run(command, check=True, capture_output=True)
        steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        calls = [json.loads(line) for line in (folder / "run" / "model_server.jsonl").read_text().splitlines()]
    rollouts = sum(step["rollouts"] for step in steps)
    whole = [len(call["prompt_token_ids"]) + len(call["response_token_ids"]) for call in calls]
    ends = sorted(whole)[-len(whole) // QUESTIONS :]  # the longest third: conversations at their end
    of_one = sum(ends) / len(ends) if bridge == "keep" else QUESTIONS * sum(whole) / len(whole)
    found = {"bridge": bridge, "seed": seed, "steps": len(steps), "samples": sum(step["trajectories"] for step in steps)}
    print(json.dumps({**found, "tokens": round(rollouts * of_one)}), file=sys.stderr, flush=True)
    return rollouts * of_one


async def compare(rounds: int) -> None:
    """Train in turns, with a seed for each round."""
    ours, theirs = count(), count()
    contest = await take_turns(
        lambda: asyncio.to_thread(train, "keep", next(ours)), lambda: asyncio.to_thread(train, "off", next(theirs)), rounds=rounds
    )
    report("bridging", "tokens that the trainer reads until a score of 0.9", "tokens", contest, against="without bridges")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    run_bench(compare(parser.parse_args().rounds))
