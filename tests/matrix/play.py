"""A stack, a scripted model, and frameworks played on them: rollouts in, the cells of their row out."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from agl_otel.settings import Settings
from agl_otel.stack.supervisor import Stack
from agl_otel.store import Store
from agl_otel.types import LLM, AttemptedRollout, EnqueueRolloutRequest, Rollout, Span
from agl_otel.types.sampling import all_parameters
from tests.matrix.check import Result, result
from tests.matrix.environments import Environment
from tests.matrix.frameworks import AGENTS, Framework, Play
from tests.matrix.model import ScriptedModel
from tests.matrix.script import Reply, people, question, riddle

PORTS: Final = ("queue_port", "otlp_grpc_port", "otlp_http_port", "clickhouse_port", "proxy_port", "web_port")
ATTEMPT_SECONDS: Final = 300.0
MAX_TOKENS: Final = 4096
_FOREIGN: Final = ("OTEL_", "OPENAI_", "ANTHROPIC_", "GEMINI_", "GOOGLE_", "AGL_", "VIRTUAL_ENV", "PYTHON")


@dataclass
class Ground:
    """What all plays share."""

    store: Store
    model: ScriptedModel
    rollouts: int = 2
    """Of each play."""
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(100))
    """Cities have numbers that are used once."""
    strays: set[str] = field(default_factory=set[str])
    """Spans without ids that are known already."""


@asynccontextmanager
async def ground(data_dir: Path, rollouts: int = 2, reply: Reply = riddle) -> AsyncGenerator[Ground]:
    """A stack on free ports, whose one model is the scripted one."""
    settings = Settings.load(data_dir=data_dir, **dict.fromkeys(PORTS, 0))
    async with (
        ScriptedModel(reply) as model,
        Stack(settings, only=("queue", "collector", "proxy")) as stack,
        await Store.connect(stack.address) as store,
    ):
        await store.publish(
            {"main": LLM(endpoint=model.url, model="scripted", api_key="sk-secret", sampling_parameters=all_parameters(1.0, MAX_TOKENS))}
        )
        yield Ground(store, model, rollouts)


async def played(on: Ground, framework: Framework, plays: Sequence[Play], environment: Environment) -> list[Result]:
    """Run every play with one runner; a result for each."""
    asked = {play.mode: await _enqueue(on, play) for play in plays}
    everything = [rollout for rollouts in asked.values() for rollout, _ in rollouts]
    first = len(on.model.served)
    await _run(on.store, framework, environment, len(everything))
    served = on.model.served[first:]
    strays = await _strays(on)
    results: list[Result] = []
    for play in plays:
        cities = {rollout.rollout_id: about for rollout, about in asked[play.mode]}
        traces = await on.store.traces(list(cities), deadline_seconds=30.0)
        spans = [*await on.store.spans(list(cities)), *strays]
        own = [answer for answer in served if answer.cities in cities.values()]
        found = result(play, cities, traces, spans, own)
        found.problems += sorted({line for rollout in traces.rollouts if (line := _error(rollout))})
        results.append(found)
        strays = []  # told once
    return results


async def _enqueue(on: Ground, play: Play) -> list[tuple[Rollout, tuple[str, str]]]:
    pairs = [(f"A{number}", f"B{number}") for number in itertools.islice(on.numbers, on.rollouts)]
    tasks = [{"mode": play.mode, "question": question(*pair, play.task), "expected": str(sum(map(people, pair)))} for pair in pairs]
    return list(zip(await on.store.enqueue([EnqueueRolloutRequest(input=task) for task in tasks]), pairs, strict=True))


async def _run(store: Store, framework: Framework, environment: Environment, count: int) -> None:
    """A runner of its own, in the folder of the agent, to its end."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    arguments = ("--grader", f"{AGENTS / 'shared' / 'grade.py'}:grade", "--max-rollouts", str(count), "--concurrency", "2")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agl_otel.runner", *arguments, "--timeout", str(ATTEMPT_SECONDS)),
        *("--", *environment.command, "{mode}", "{question}"),
        env={**kept, **environment.variables, **framework.environment, "AGL_STORE": store.description.queue},
        cwd=AGENTS.parents[2],
    )
    try:
        await process.wait()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


async def _strays(on: Ground) -> list[Span]:
    """Spans that have come without ids since this was asked last."""
    await on.store.reader.barrier()
    rows = await on.store.reader.query("SELECT DISTINCT TraceId FROM otel_traces WHERE RolloutId = ''")
    spans = await on.store.reader.by_trace([row["TraceId"] for row in rows])
    found = [span for span in spans if not span.rollout_id and span.span_id not in on.strays]
    on.strays.update(span.span_id for span in found)
    return found


def _error(rollout: Rollout) -> str:
    error = rollout.attempt.error if isinstance(rollout, AttemptedRollout) else None
    return (error or "").strip().rpartition("\n")[2][-200:]
