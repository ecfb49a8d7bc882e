"""Log-probs of stored replies under a policy that did not write them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web

from agl_otel.adapters.logged import logged_of, weighable
from agl_otel.adapters.offpolicy import estimate
from agl_otel.adapters.sampling import token_temperatures
from agl_otel.adapters.trajectories import TrajectoryBatch
from agl_otel.algorithms.backtest import logprobs_under
from agl_otel.algorithms.grpo.policy import Policy
from agl_otel.algorithms.grpo.sampler import Engine
from agl_otel.algorithms.grpo.server import make_app
from agl_otel.errors import ModelServerError, UsageError
from agl_otel.jobs.model_client import Access, Bounds, ModelClient, PromptRefusedError, Spend
from agl_otel.jobs.scoring import served_logprobs
from agl_otel.net.http_server import listen, make_runner
from agl_otel.types.columns import Ragged, Traces
from tests.model_server import ModelServer
from tests.unit.adapters.conftest import CallRow, TracesBuilder

CALLS = 12


def sampled(policy: Policy, temperatures: Sequence[float] = (1.0, 0.5, 1.5)) -> Traces:
    """Conversations of one to three calls, sampled from the policy at several temperatures, the last call apart from the others."""
    rng = torch.Generator().manual_seed(5)
    rows: list[CallRow] = []
    for number in range(CALLS):
        history: list[int] = []
        for call in range(1, 2 + number % 3):
            new = torch.randint(3, policy.vocabulary, (2 + number % 4,), generator=rng).tolist()
            history, temperature = history + new, temperatures[number % 3]
            reply, logprobs = list[int](), list[float]()
            for _ in range(3):
                with torch.no_grad():
                    logits = policy.model(input_ids=torch.tensor([history + reply])).logits[0, -1] / temperature
                chances = torch.log_softmax(logits, -1)
                token = int(torch.multinomial(chances.exp(), 1, generator=rng))
                reply.append(token)
                logprobs.append(float(chances[token]))
            rows.append(
                CallRow(
                    rollout=f"ro-{number:02d}",
                    call=call,
                    prompt=new,
                    response=reply,
                    logprobs=logprobs,
                    prefix=(call - 1, 0) if call > 1 else (0, 0),
                    temperature=temperature,
                )
            )
            history += reply
    return TracesBuilder().build(*rows)


def scored(policy: Policy, traces: Traces, most_tokens: int) -> tuple[TrajectoryBatch, np.ndarray[tuple[int], np.dtype[np.float32]]]:
    batch = weighable(traces).batch
    return batch, logprobs_under(policy, batch, token_temperatures(traces.calls, batch.rows, default=1.0), most_tokens=most_tokens)


@pytest.mark.parametrize("most_tokens", [1, 40, 10_000])
def test_under_the_policy_that_wrote_them_replies_have_the_captured_log_probs_and_attempts_the_weight_one(
    policy: Policy, most_tokens: int
) -> None:
    traces = sampled(policy)
    batch, new = scored(policy, traces, most_tokens)
    written = batch.response_mask.values == 1
    assert len(batch) == CALLS and np.allclose(new, batch.logprobs.values[written], rtol=0, atol=1e-4)
    found = estimate(logged_of(traces, batch, new, by_step=False, reward_name=None))
    assert found.mass == pytest.approx(1.0, abs=1e-3) and found.effective == pytest.approx(CALLS, abs=1e-3)


def test_a_policy_with_another_vocabulary_or_a_shorter_context_is_refused(policy: Policy) -> None:
    batch = weighable(sampled(policy)).batch
    ones = Ragged(np.ones(len(batch.response.values), np.float32), batch.response.offsets)
    greatest = np.asarray(batch.prompt.values).copy()
    greatest[0] = policy.vocabulary
    beyond = replace(batch, prompt=Ragged(greatest, batch.prompt.offsets))
    with pytest.raises(
        UsageError, match=f"token id {policy.vocabulary} was logged, and the policy has a vocabulary of {policy.vocabulary}"
    ):
        logprobs_under(policy, beyond, ones)
    short = Policy(policy.model, policy.tokenizer, policy.stop_ids, 4)
    with pytest.raises(UsageError, match="tokens, and the policy reads 4 at most"):
        logprobs_under(short, batch, ones)


@asynccontextmanager
async def behind(url: str) -> AsyncGenerator[ModelClient]:
    async with ModelClient(Access("policy", url), Spend(Bounds())) as model:
        yield model


@asynccontextmanager
async def served(policy: Policy) -> AsyncGenerator[ModelClient]:
    """The policy behind a model server of ours."""
    async with Engine(policy) as engine:
        runner = make_runner(make_app(engine))
        await runner.setup()
        try:
            async with behind(f"http://127.0.0.1:{await listen(runner, '127.0.0.1', 0, None)}/v1") as model:
                yield model
        finally:
            await runner.cleanup()


@pytest.mark.parametrize("at_once", [1, 8])
async def test_a_server_scores_as_the_policy_itself_does(policy: Policy, at_once: int) -> None:
    traces = sampled(policy, (1.0, 1.0, 1.0))
    batch, own = scored(policy, traces, 10_000)
    async with served(policy) as model:
        theirs = await served_logprobs(model, batch, at_once=at_once)
    assert len(batch) == CALLS and np.abs(theirs - own).max() < 1e-5
    mine, other = (estimate(logged_of(traces, batch, new, by_step=False, reward_name=None)) for new in (own, theirs))
    figures = ("mass", "effective", "logged")
    assert [getattr(other, name) for name in figures] == pytest.approx([getattr(mine, name) for name in figures], abs=1e-4)


async def test_a_server_that_cannot_score_names_what_is_missing(policy: Policy) -> None:
    async with served(policy) as model:
        with pytest.raises(PromptRefusedError, match=f"prompt has {policy.vocabulary}: the model's tokens are 0 to"):
            await model.logprobs([1, policy.vocabulary])
        with pytest.raises(PromptRefusedError, match="the model's context is"):
            await model.logprobs([1] * (policy.context_tokens + 1))

    async def says(request: Any) -> Any:
        return web.json_response({"choices": [{"text": "no log-probs", "logprobs": None}]})

    server = ModelServer({"/v1/completions": says})
    await server.start()
    try:
        async with behind(server.url) as model:
            with pytest.raises(ModelServerError, match="has no log-probs of the 2 tokens of a prompt: the server has to take token ids"):
                await model.logprobs([1, 2])
    finally:
        await server.stop()
