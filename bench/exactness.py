"""Check that the trained tokens are the sampled tokens, by random conversations in every protocol through the real services.

python -m bench.exactness                          # 2,000 calls
python -m bench.exactness --calls=100000 --seed=3

Agents (exact_agents.py) call, through the proxy, a server that samples at random and records its samples (exact_server.py). The
trajectories adapted from the stored spans must equal the record: every token of every prompt and reply, log-probs, masks. A fifth of the
attempts have calls with injected faults. For half of them the chat template writes replies otherwise than they were sampled, and the
resource asks for bridges (proxy/bridge.py). Every call must be in one trajectory, or be refused and counted; at least 99 % of the calls
without faults must be accepted. Exits with 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import aiohttp
import numpy as np

from agl_otel.adapters import TrajectoryBatch, to_trajectories
from agl_otel.adapters.trajectories import CALL_REFUSALS
from agl_otel.queue.client import AttemptUpdate, QueueClient
from agl_otel.traces.reader import TraceReader
from agl_otel.types import LLM, AttemptedRollout, EnqueueRolloutRequest
from agl_otel.types.columns import Traces
from agl_otel_hook import conventions
from bench import harness
from bench.exact_agents import Agent
from bench.exact_server import CLOSE, DRIFTING, Sampled, Server, Truth
from bench.otlp import request_of

ACCEPTED_BAR: Final = 0.99
AT_ONCE: Final = 16
ROLLOUTS_PER_BATCH: Final = 200
SETTLE_SECONDS: Final = 30.0
FAULTY_ATTEMPTS: Final = 0.2
FAULTS: Final = 0.3  # share of the calls in such an attempt
_CALLS: Final = f"""
SELECT RolloutId, SpanId, SpanAttributes['gen_ai.response.id'] AS Response,
  toInt64OrZero(SpanAttributes['{conventions.LLM_CHOICE}']) AS Choice, SpanAttributes['{conventions.LLM_BRIDGE}'] AS Bridge
FROM otel_traces WHERE RolloutId IN {{rollouts:Array(String)}} AND SpanName = '{conventions.SPAN_LLM}'
"""


@dataclass
class Result:
    """Counts and errors of a run."""

    calls: int = 0
    """Requests that agents made."""
    answers: Counter[str] = field(default_factory=Counter[str])
    """Responses that agents got, by protocol."""
    sampled: int = 0
    """(call, choice) that the server sampled."""
    accepted: int = 0
    whole: int = 0
    """Sampled (call, choice) without an injected fault."""
    whole_accepted: int = 0
    trained_tokens: int = 0
    refused: Counter[str] = field(default_factory=Counter[str])
    breaks: Counter[str] = field(default_factory=Counter[str])
    bridges: Counter[str] = field(default_factory=Counter[str])
    """Calls that were bridged, and why others were not."""
    read_again: int = 0
    """Reads of batches in which an attempt was not complete yet."""
    wrong: list[str] = field(default_factory=list[str])
    """Differences from the record, and calls that are not counted."""

    @property
    def good(self) -> bool:
        """Whether there are no errors and enough calls were accepted."""
        return not self.wrong and self.whole_accepted >= ACCEPTED_BAR * self.whole


class Services(NamedTuple):
    """Clients and addresses of a running stack."""

    queue: QueueClient
    reader: TraceReader
    proxy: str
    otlp: str
    resources_ids: Sequence[str]
    """With a template that is true to the replies, and with one that is not."""


@contextlib.asynccontextmanager
async def services(directory: Path, upstream: str, start_seconds: float) -> AsyncGenerator[Services]:
    """Run queue, collector and proxy."""
    async with (
        harness.services(directory, "queue", "collector", "proxy", start_seconds=start_seconds) as made,
        QueueClient(made.queue) as queue,
        TraceReader(made.clickhouse, collectors=[made.otlp]) as reader,
    ):
        llms = LLM(endpoint=upstream, model="m"), LLM(endpoint=upstream, model=DRIFTING, bridge="keep")
        updates = [await queue.put_resources({"llm": llm}) for llm in llms]
        yield Services(queue, reader, made.proxy, made.otlp, [update.resources_id for update in updates])


async def one_attempt(stack: Services, session: aiohttp.ClientSession, chance: random.Random, truth: Truth, result: Result) -> str:
    """Run an agent as an attempt, reward it, close and complete it; return the rollout's id."""
    (started,) = await stack.queue.start([EnqueueRolloutRequest(input=1, resources_id=chance.choice(stack.resources_ids))])
    key = (started.rollout_id, started.attempt.attempt_id)
    base = f"{stack.proxy}/rollout/{key[0]}/attempt/{key[1]}"
    agent = Agent(session, chance.choice((base, f"{base}/v1")), chance, faults=FAULTS if chance.random() < FAULTY_ATTEMPTS else 0.0)
    await agent.run()
    result.calls += agent.calls
    result.answers += Counter(path for _, path in agent.received)
    for answer, path in agent.received:
        for choice, reply in enumerate(answer.replies):
            sampled = truth.sampled[answer.id, choice].response
            ids = truth.tools[reply.tool["id"]] if reply.tool else [ord(letter) for letter in reply.text]
            if ids != (sampled[:-1] if sampled[-1] == CLOSE else sampled):
                result.wrong.append(f"{path} {answer.id}: the agent got another reply than was sampled")
    reward = {conventions.reward_name_key(0): "primary", conventions.reward_value_key(0): chance.random()}
    ids = {"trace_id": os.urandom(16).hex(), "span_id": os.urandom(8).hex()}
    body = request_of([{"name": conventions.SPAN_ANNOTATION, **ids, "attributes": reward}], dict(zip(_IDS, key, strict=True)))
    async with session.post(f"{stack.otlp}/v1/traces", data=body, headers={"content-type": "application/x-protobuf"}) as answer:
        answer.raise_for_status()
    async with session.post(f"{base}/close") as answer:
        closed = await answer.json()
    seals = {closed["marker"]: closed["spans"]}
    await stack.queue.update_attempts([AttemptUpdate(rollout_id=key[0], attempt_id=key[1], status="succeeded", seals=seals)])
    return key[0]


_IDS: Final = (conventions.ROLLOUT_ID, conventions.ATTEMPT_ID)


async def check(stack: Services, rollout_ids: Sequence[str], truth: Truth, result: Result) -> None:
    """Read and adapt the rollouts, and compare every trajectory with the sampled calls."""
    found = [r for r in await stack.queue.query_rollouts(rollout_id_in=list(rollout_ids)) if isinstance(r, AttemptedRollout)]
    traces = await _settled(stack, found, result)
    batch = to_trajectories(traces)
    rows = await stack.reader.query(_CALLS, params={"rollouts": list(rollout_ids)})
    result.bridges += Counter(_bridge(row["Bridge"]) for row in rows if row["Bridge"])
    named = {(row["RolloutId"], row["SpanId"]): (row["Response"], int(row["Choice"])) for row in rows}
    accepted = set[tuple[str, int]]()
    for place in range(len(batch)):
        names = [named[traces.calls.rollout_id[row], traces.calls.span_id[row]] for row in batch.rows[place].tolist()]
        accepted.update(names)
        result.wrong += [f"{batch.rollout_id[place]}: {what}" for what in differences(batch, place, [truth.sampled[n] for n in names])]
    _count(result, traces, batch, {name: truth.sampled.pop(name, None) for name in named.values() if name[0]}, accepted)


async def _settled(stack: Services, found: Sequence[AttemptedRollout], result: Result) -> Traces:
    """Read the rollouts; again while one is incomplete, for at most SETTLE_SECONDS.

    A call in flight when its attempt ended is missing until it is stored.
    """
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        traces = await stack.reader.traces(found, [rollout.attempt for rollout in found])
        lacking = [verdict for verdict in traces.verdicts.values() if verdict.kind != "complete"]
        if not lacking or time.monotonic() > deadline:
            result.wrong += [f"{verdict.rollout_id} is {verdict.kind}: {verdict.reasons}" for verdict in lacking]
            return traces
        result.read_again += 1
        await asyncio.sleep(1.0)


def _bridge(recorded: str) -> str:
    return json.loads(recorded).get("refused", "bridged")


def differences(batch: TrajectoryBatch, place: int, calls: Sequence[Sampled]) -> list[str]:
    """Compare one trajectory with its sampled calls, given in order; return the differences."""
    prompt = batch.prompt[place].tolist()
    tokens = prompt + batch.response[place].tolist()
    mask, logprobs = batch.response_mask[place], batch.logprobs[place]
    wrong: list[str] = []
    expected_mask, expected_logprobs = np.zeros(len(mask), np.int8), np.zeros(len(mask), np.float32)
    for number, call in enumerate(calls):
        start, end = len(call.prompt), len(call.prompt) + len(call.response)
        if tokens[:start] != call.prompt:
            wrong.append(f"call {number}: the prompt is not the one that the server got")
        if tokens[start:end] != call.response:
            wrong.append(f"call {number}: the reply is not the sampled one")
        expected_mask[start - len(prompt) : end - len(prompt)] = 1
        expected_logprobs[start - len(prompt) : end - len(prompt)] = call.logprobs
    if len(tokens) != len(calls[-1].prompt) + len(calls[-1].response):
        wrong.append("the length is not that of the last call's prompt and reply")
    if not np.array_equal(mask, expected_mask):
        wrong.append("the mask does not cover exactly the sampled tokens")
    if not np.array_equal(logprobs, expected_logprobs):
        wrong.append("the log-probs are not those of the sampled tokens")
    return wrong


def _count(
    result: Result,
    traces: Traces,
    batch: TrajectoryBatch,
    sampled: Mapping[tuple[str, int], Sampled | None],
    accepted: set[tuple[str, int]],
) -> None:
    result.accepted += len(accepted)
    result.trained_tokens += int(batch.response_mask.values.sum())
    result.refused += batch.refused
    result.breaks += batch.breaks
    refused = sum(count for why, count in batch.refused.items() if why in CALL_REFUSALS)
    attempts = set(zip(batch.rollout_id, batch.attempt_id, strict=True))
    if others := {why: count for why, count in batch.refused.items() if why not in CALL_REFUSALS}:
        result.wrong.append(f"whole attempts were refused: {others}")
    if int(batch.calls.sum()) + refused != len(traces.calls):
        result.wrong.append(
            f"{len(traces.calls)} calls are stored, {batch.calls.sum()} accepted and {refused} refused of {len(attempts)} attempts"
        )
    for name, call in sampled.items():
        if call is not None:
            result.sampled += 1
            result.whole += not call.fault
            result.whole_accepted += not call.fault and name in accepted


async def run(calls: int, seed: int, directory: Path, *, start_seconds: float = 60.0) -> Result:
    """Make at least `calls` calls, and check all of them."""
    server, result, chance = Server(seed), Result(), random.Random(seed)
    await server.start()
    timeout = aiohttp.ClientTimeout(total=None)
    try:
        async with services(directory, server.url, start_seconds) as stack, aiohttp.ClientSession(timeout=timeout) as session:
            while result.calls < calls:
                done: list[str] = []

                async def work(own: random.Random, done: list[str] = done) -> None:
                    while len(done) < ROLLOUTS_PER_BATCH and result.calls < calls:
                        done.append(await one_attempt(stack, session, own, server.truth, result))

                await asyncio.gather(*(work(random.Random(chance.getrandbits(64))) for _ in range(AT_ONCE)))
                await check(stack, done, server.truth, result)
                print(f"{result.calls} calls, {result.accepted} accepted, {len(result.wrong)} wrong", file=sys.stderr, flush=True)
    finally:
        await server.stop()
    lost = Counter(call.fault or "nothing" for call in server.truth.sampled.values())
    if missing := {fault: count for fault, count in lost.items() if fault not in ("hold", "cut")}:
        result.wrong.append(f"sampled and neither accepted nor refused, by fault: {missing}")
    return result


def main() -> int:
    """Parse the command line, run, report; return 1 if the check fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="agl-bench-") as folder:
        result = asyncio.run(run(given.calls, given.seed, Path(folder)))
    share = result.whole_accepted / max(1, result.whole)
    head = {"bench": "exactness", "metric": "whole calls accepted, all of them exact", "unit": "share", "against": "the bar"}
    figures = {"value": round(share, 6), "baseline": ACCEPTED_BAR, "ratio": round(share / ACCEPTED_BAR, 4), "wrong": len(result.wrong)}
    counts = {name: getattr(result, name) for name in ("calls", "sampled", "accepted", "whole", "trained_tokens", "read_again")}
    seconds = round(time.perf_counter() - started, 1)
    why = {name: dict(getattr(result, name)) for name in ("answers", "refused", "breaks", "bridges")} | {"examples": result.wrong[:10]}
    print(json.dumps({**head, **figures, **counts, **why, "seed": given.seed, "seconds": seconds}), flush=True)
    return 0 if result.good else 1


if __name__ == "__main__":
    sys.exit(main())
