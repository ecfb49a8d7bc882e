"""From ClickHouse to tensors: read, adapt and pad a million trained tokens, against Agent Lightning 0.3's TracerTraceToTriplet.

python -m bench.adapters               # 1,000 attempts of four calls, 250 tokens each
python -m bench.adapters --single-call # 4,000 attempts of one call instead

Ours covers everything from the HTTP query to the embedded ClickHouse up to padded torch tensors with ids, mask, log-probs and rewards.
Theirs is `adapt` alone, on the same calls, as span objects in memory, which favours it. A second ratio compares the adapters alone: ours
on columns in memory, theirs on spans in memory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Generator, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp
import numpy as np
import torch

from agl_otel.adapters import TrajectoryBatch, to_trajectories
from agl_otel.traces.reader import TraceReader
from agl_otel.types import Attempt, AttemptedRollout
from agl_otel.types.columns import Ragged
from agl_otel_hook import conventions
from bench.agentlightning_triplets import as_03
from bench.harness import Contest, Turn, report, report_absent, report_against_bar, run_bench, take_turns
from bench.otlp import request_of
from bench.peers import agentlightning_python, ours
from tests.environments import AbsentError

SECONDS_BAR: Final = 0.5
RATIO_BAR: Final = 20.0
PROMPT_TOKENS: Final = 256
BETWEEN_TOKENS: Final = 30
RESPONSE_TOKENS: Final = 250
MARKER: Final = "bench-process"
VOCABULARY: Final = 151_000


class Call(NamedTuple):
    """One model call."""

    rollout_id: str
    number: int
    trace_id: str
    span_id: str
    prompt: list[int]
    """Token ids of the whole prompt."""
    added: list[int]
    """Token ids after the previous call's prompt and reply; of the first call, the whole prompt."""
    response: list[int]
    logprobs: list[float]
    messages: list[dict[str, str]]
    answer: str


def conversations(attempts: int, turns: int) -> Iterator[list[Call]]:
    """Generate the calls of each attempt; every call extends the previous one."""
    chance = random.Random(7)
    for number in range(attempts):
        calls: list[Call] = []
        history: list[int] = []
        messages: list[dict[str, str]] = [{"role": "system", "content": "You look things up. " * 10}]
        for turn in range(1, turns + 1):
            added = [chance.randrange(VOCABULARY) for _ in range(BETWEEN_TOKENS if calls else PROMPT_TOKENS)]
            response = [chance.randrange(VOCABULARY) for _ in range(RESPONSE_TOKENS)]
            messages = [*messages, {"role": "user", "content": f"question {turn} of {number} " * 6}]
            answer = f"an answer to {turn} " * 40
            ids = (f"{number + 1:032x}", f"{number * 100 + turn:016x}")
            logprobs = [-chance.random() for _ in response]
            calls.append(Call(f"ro-{number:06}", turn, *ids, history + added, added, response, logprobs, messages, answer))
            history = history + added + response
            messages = [*messages, {"role": "assistant", "content": answer}]
        yield calls


def span_of(call: Call) -> dict[str, Any]:
    """Make the proxy's span of a call: later calls reference the previous call as their prefix."""
    prefixed = call.number > 1
    attributes: dict[str, Any] = {
        conventions.PROCESS: MARKER,
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "a/model-7b",
        "gen_ai.response.id": f"{call.rollout_id}-{call.number}",
        "gen_ai.input.messages": json.dumps(
            [{"role": m["role"], "parts": [{"type": "text", "content": m["content"]}]} for m in call.messages]
        ),
        "gen_ai.output.messages": json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": call.answer}]}]),
        conventions.LLM_CALL: call.number,
        conventions.LLM_CHOICE: 0,
        conventions.LLM_MODEL_VERSION: "1",
        conventions.LLM_PROMPT_TOKEN_IDS: call.added if prefixed else call.prompt,
        conventions.LLM_RESPONSE_TOKEN_IDS: call.response,
        conventions.LLM_RESPONSE_LOGPROBS: call.logprobs,
    }
    if prefixed:
        attributes |= {conventions.LLM_PREFIX_CALL: call.number - 1, conventions.LLM_PREFIX_CHOICE: 0}
    return {"name": conventions.SPAN_LLM, "trace_id": call.trace_id, "span_id": call.span_id, "attributes": attributes}


def reward_of(call: Call) -> dict[str, Any]:
    """Make the reward's span of the attempt that ends with `call`."""
    attributes = {conventions.PROCESS: MARKER, conventions.reward_name_key(0): "primary", conventions.reward_value_key(0): 1.0}
    span_id = f"{int(call.span_id, 16) + 50:016x}"
    return {"name": conventions.SPAN_ANNOTATION, "trace_id": call.trace_id, "span_id": span_id, "attributes": attributes}


@contextlib.asynccontextmanager
async def filled(attempts: list[list[Call]]) -> AsyncGenerator[TraceReader]:
    """Send all calls and rewards to a collector; yield a reader of it."""
    with tempfile.TemporaryDirectory(prefix="agl-bench-") as folder:
        async with ours(Path(folder)) as peer, aiohttp.ClientSession() as session:
            for calls in attempts:
                spans = [*map(span_of, calls), reward_of(calls[-1])]
                body = request_of(spans, {conventions.ROLLOUT_ID: calls[0].rollout_id, conventions.ATTEMPT_ID: "at-1"})
                async with session.post(peer.address.http, data=body, headers={"Content-Type": "application/x-protobuf"}) as answer:
                    answer.raise_for_status()
            base = peer.address.http.removesuffix("/v1/traces")
            async with TraceReader(peer.clickhouse, collectors=[base]) as reader:
                await reader.barrier()
                yield reader


def rollout_of(calls: list[Call]) -> AttemptedRollout:
    """Make the queue's record of an attempt with these calls."""
    rollout_id = calls[0].rollout_id
    attempt = Attempt(rollout_id=rollout_id, attempt_id="at-1", sequence_id=1, start_time=0.0, seals={MARKER: len(calls) + 1})
    return AttemptedRollout(rollout_id=rollout_id, input=None, start_time=0.0, status="succeeded", attempt=attempt)


def our_turn(reader: TraceReader, rollouts: list[AttemptedRollout], expected: int, seconds: dict[str, list[float]]) -> Turn:
    """Make a turn that reads, adapts and pads; it measures trained tokens (`expected`) a second, and adds the `seconds` of each part."""

    async def turn() -> float:
        start = time.perf_counter()
        traces = await reader.traces(rollouts, [rollout.attempt for rollout in rollouts])
        read = time.perf_counter()
        batch = to_trajectories(traces)
        adapted = time.perf_counter()
        tensors = padded(batch)
        end = time.perf_counter()
        assert int(tensors["mask"].sum()) == expected, (batch.refused, batch.breaks)
        for part, spent in (("read", read - start), ("adapt", adapted - read), ("pad", end - adapted), ("all", end - start)):
            seconds.setdefault(part, []).append(spent)
        return expected / (end - start)

    return turn


def padded(batch: TrajectoryBatch) -> dict[str, torch.Tensor]:
    """Make a trainer's tensors: prompt and response ids, mask and log-probs (trajectories, positions); rewards (trajectories,)."""
    rows = {"prompt": batch.prompt, "response": batch.response, "mask": batch.response_mask, "logprobs": batch.logprobs}
    return {name: torch.from_numpy(_rectangle(ragged)) for name, ragged in rows.items()} | {"reward": torch.from_numpy(batch.reward)}


def _rectangle(rows: Ragged) -> np.ndarray[Any, np.dtype[Any]]:
    lengths = rows.lengths
    made = np.zeros((len(rows), int(lengths.max(initial=0))), rows.values.dtype)
    made[np.arange(made.shape[1]) < lengths[:, None]] = rows.values
    return made


@contextlib.contextmanager
def their_turn(attempts: list[list[Call]]) -> Generator[Turn]:
    """Run 0.3's adapter on the same calls in another process; yield a turn that measures trained tokens a second."""
    tokens = sum(len(call.response) for calls in attempts for call in calls)
    with tempfile.TemporaryDirectory(prefix="agl-bench-") as folder:
        path = Path(folder) / "spans.json"
        path.write_text(json.dumps([as_03([call._asdict() for call in calls]) for calls in attempts]))
        script = str(Path(__file__).with_name("agentlightning_triplets.py"))
        child = subprocess.Popen(
            [agentlightning_python(), script, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            yield lambda: asyncio.to_thread(_ask, child, tokens)
        finally:
            child.kill()
            child.communicate()


def _ask(child: subprocess.Popen[str], tokens: int) -> float:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write("go\n")
    child.stdin.flush()
    while line := child.stdout.readline():
        if line.startswith("{"):
            answer = json.loads(line)
            assert answer["tokens"] == tokens, answer
            return tokens / answer["seconds"]
    raise RuntimeError("Agent Lightning's adapter ended before it answered")


async def compare(options: argparse.Namespace) -> None:
    """Fill the store, take turns, report."""
    turns = 1 if options.single_call else 4
    attempts = list(conversations(options.tokens // (turns * RESPONSE_TOKENS), turns))
    what = f"{options.tokens} trained tokens, {len(attempts)} attempts of {turns} calls"
    seconds: dict[str, list[float]] = {}
    async with filled(attempts) as reader:
        rollouts, expected = [rollout_of(calls) for calls in attempts], sum(len(call.response) for calls in attempts for call in calls)
        turn = our_turn(reader, rollouts, expected, seconds)
        try:
            with their_turn(attempts) as theirs:
                attempts.clear()  # else the garbage collector would traverse a million objects that no trainer has
                contest: Contest | None = await take_turns(turn, theirs, rounds=options.rounds)
        except AbsentError as reason:
            report_absent("adapters", what, "tokens/s", str(reason))
            contest = None
            for _ in range(options.rounds + 1):
                await turn()
    parts = {f"{part}_seconds": round(float(np.median(spent[1:])), 4) for part, spent in seconds.items()}
    report_against_bar("adapters", what, parts.pop("all_seconds"), "s", SECONDS_BAR * options.tokens / 1_000_000, **parts)
    if contest is not None:
        theirs = "0.3's TracerTraceToTriplet, spans in memory"
        report("adapters", f"{what}, ClickHouse to tensors", "tokens/s", contest, against=theirs)
        adapted = [expected / spent for spent in seconds["adapt"][1:]]
        report("adapters", f"{what}, adapter alone", "tokens/s", Contest(adapted, contest.baseline), against=theirs, bar=RATIO_BAR)


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--single-call", action="store_true", help="attempts of one call")
    run_bench(compare(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
