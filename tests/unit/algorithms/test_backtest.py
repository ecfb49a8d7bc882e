"""Log-probs of stored replies under a policy that did not write them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from agl_otel.adapters.logged import logged_of, weighable
from agl_otel.adapters.offpolicy import estimate
from agl_otel.adapters.sampling import token_temperatures
from agl_otel.adapters.trajectories import TrajectoryBatch
from agl_otel.algorithms.backtest import logprobs_under
from agl_otel.algorithms.grpo.policy import Policy
from agl_otel.errors import UsageError
from agl_otel.types.columns import Ragged, Traces
from tests.unit.adapters.conftest import CallRow, TracesBuilder

CALLS = 12


def sampled(policy: Policy) -> Traces:
    """Conversations of one to three calls, sampled from the policy at several temperatures, the last call apart from the others."""
    rng = torch.Generator().manual_seed(5)
    rows: list[CallRow] = []
    for number in range(CALLS):
        history: list[int] = []
        for call in range(1, 2 + number % 3):
            new = torch.randint(3, policy.vocabulary, (2 + number % 4,), generator=rng).tolist()
            history, temperature = history + new, (1.0, 0.5, 1.5)[number % 3]
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
