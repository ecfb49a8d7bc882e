"""Supervised fine-tuning in rounds: serve, run rollouts, keep the best calls, train in a separate process, serve the next version, repeat.

python loop.py --out out [--model FOLDER --backend unsloth --vllm]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from tasks import train

import agl_otel as agl
from agl_otel.adapters import Reading, rows_of
from agl_otel.adapters.formats import as_written
from agl_otel.settings import free_port
from agl_otel.store import Store

NAME = "policy"
START_SECONDS = 600.0


@asynccontextmanager
async def served(model: Path, vllm: bool) -> AsyncIterator[str]:
    """Run a model server within the context; yield its base URL. Afterwards the GPU is free for training."""
    port = free_port()
    ours = (*("-m", "agl_otel.algorithms.grpo.server", "--model", str(model)), "--name", NAME)
    theirs = ("-m", "vllm.entrypoints.cli.main", "serve", str(model), "--served-model-name", NAME, "--generation-config", "vllm")
    process = await asyncio.create_subprocess_exec(sys.executable, *(theirs if vllm else ours), "--port", str(port), stdout=sys.stderr)
    try:
        async with asyncio.timeout(START_SECONDS), aiohttp.ClientSession() as session:
            while not await _answers(session, f"http://127.0.0.1:{port}/health"):
                if process.returncode is not None:
                    raise SystemExit(f"the model server ended with exit code {process.returncode}")
                await asyncio.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


async def roll_out(store: Store, url: str, options: argparse.Namespace, source: random.Random) -> tuple[list[dict[str, object]], float]:
    """Return (rows of the best calls, mean reward of all rollouts). A call's reward is its rollout's, discounted for each later call."""
    resources = await store.publish({"main_llm": agl.LLM(endpoint=url, model=NAME)})
    tasks = source.sample(train(), options.tasks) * options.group_size
    requests = [
        agl.EnqueueRolloutRequest(
            input=task,
            mode="train",
            resources_id=resources.resources_id,
            metadata={"sampling_seed": source.getrandbits(48)},  # makes samples independent of the order of calls
        )
        for task in tasks
    ]
    rollouts = await store.enqueue(requests)
    traces = await store.traces(await store.wait([rollout.rollout_id for rollout in rollouts]))
    reading = Reading(form="sft", by_call=True, discount=0.9, top_fraction=options.top_fraction)
    rows = [as_written("sft", row) for row in rows_of(reading, traces).rows]
    rewards = [found[-1].value for found in traces.rewards.values() if found]
    return rows, sum(rewards) / len(rewards)


def written(rows: list[dict[str, object]], out: Path) -> Path:
    out.mkdir(parents=True)
    file = out.with_suffix(".jsonl")
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


async def trained(rows: list[dict[str, object]], model: Path, out: Path, backend: str) -> Path:
    file = written(rows, out)
    script = Path(__file__).parent / "train.py"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(script), str(file), str(model), str(out)), "--backend", backend, stdout=sys.stderr
    )
    if await process.wait():
        raise SystemExit(f"training ended with exit code {process.returncode}")
    return out


async def main(options: argparse.Namespace) -> None:
    model, source = options.model or _tiny(options.out / "version-0"), random.Random(0)
    async with await Store.connect(options.store) as store:
        for number in range(options.rounds + 1):
            async with served(model, options.vllm) as url:
                rows, reward = await roll_out(store, url, options, source)
            print(json.dumps({"version": number, "reward": reward, "rows": len(rows)}), flush=True)
            if number < options.rounds:
                model = await trained(rows, model, options.out / f"version-{number + 1}", options.backend)


def _tiny(folder: Path) -> Path:
    import torch

    from agl_otel.algorithms.grpo.tiny import make_policy

    torch.set_num_threads(1)  # for so small a model a second thread makes torch ten times slower
    return make_policy(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", default="http://localhost:4747")
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--model", type=Path, help="folder in transformers' format; without it a tiny one is made")
    parser.add_argument("--backend", choices=("plain", "unsloth"), default="plain")
    parser.add_argument("--vllm", action="store_true", help="serve with vLLM instead of agl-otel's own small server")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--top-fraction", type=float, default=0.25)
    asyncio.run(main(parser.parse_args()))
