"""Twenty questions, played and trained: all in one, algorithm and runners apart, or played once without training.

    agl-otel train job.toml                                    # everything in one call, with a stack and runner processes
    python main.py oneclick                                    # the same from Python, in threads of one process
    agl-otel store;  python main.py runner;  python main.py algo       # three terminals (--store ADDRESS)
    python main.py dryrun --endpoint http://localhost:8000/v1 --model MODEL     # any model, no training

With `--real` the `tinker` package and TINKER_API_KEY are used, else scripted.py stands for them.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
from typing import Any

import scripted
from agent import play
from algorithm import TinkerGRPO
from game import SECRETS

import agl_otel as agl

TASKS = list(SECRETS)
MODEL = "Qwen/Qwen3-4B-Instruct-2507"


def tasks() -> list[str]:
    return TASKS


def algorithm(*, real: bool = False, model: str = MODEL, steps: int = 8, group_size: int = 16) -> TinkerGRPO:
    course = {"steps": steps, "group_size": group_size}
    if not real:
        return TinkerGRPO(scripted, scripted.ServiceClient(), base_model="table", learning_rate=1.5, **course)
    tinker: Any = importlib.import_module("tinker")
    return TinkerGRPO(tinker, tinker.ServiceClient(), base_model=model, **course)


def chosen(options: argparse.Namespace) -> TinkerGRPO:
    return algorithm(real=options.real, model=options.model, steps=options.steps, group_size=options.group_size)


def oneclick(options: argparse.Namespace) -> None:
    agl.Trainer(algorithm=chosen(options), n_runners=8, strategy="shm").fit(play, TASKS)


async def algo(options: argparse.Namespace) -> None:
    made, store = chosen(options), agl.LightningStoreClient(options.store)
    made.set_store(store)
    await made.run(TASKS)
    await store.close()


async def runner(options: argparse.Namespace) -> None:
    store = agl.LightningStoreClient(options.store)
    made = [agl.LitAgentRunner[str](tracer=agl.OtelTracer()) for _ in range(8)]
    async with asyncio.TaskGroup() as group:
        for number, each in enumerate(made):
            group.create_task(_serve(each, store, number))


async def _serve(each: agl.LitAgentRunner[str], store: agl.LightningStore, number: int) -> None:
    with each.run_context(agent=play, store=store, worker_id=number) as running:
        await running.iter()


def dryrun(options: argparse.Namespace) -> None:
    for secret in TASKS:
        reward = play(secret, agl.LLM(endpoint=options.endpoint, model=options.model))
        print(f"{secret}: reward {reward}")


if __name__ == "__main__":
    modes = {"oneclick": oneclick, "algo": algo, "runner": runner, "dryrun": dryrun}
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=modes)
    parser.add_argument("--store", default="http://localhost:4747")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--endpoint", default="http://localhost:8000/v1")
    given = parser.parse_args()
    done = modes[given.mode](given)
    if asyncio.iscoroutine(done):
        asyncio.run(done)
