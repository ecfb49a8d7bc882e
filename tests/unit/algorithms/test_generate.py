from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM, OpenAIGPTConfig, OpenAIGPTLMHeadModel

from agl_otel.algorithms.grpo.generate import SHAPE_ROWS, Row, Sampling, by_prompt_length, generate
from agl_otel.algorithms.grpo.policy import Policy

pytestmark = pytest.mark.full


def plain_logprobs(policy: Policy, row: Row) -> torch.Tensor:
    """Compute log-probs [response, vocabulary] at temperature 1 by one forward pass over the row."""
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([row.prompt + row.tokens])).logits[0]
    return torch.log_softmax(logits[len(row.prompt) - 1 : -1].float(), -1)


def row(seed: int = 0, **sampling: float) -> Row:
    return Row([1, 4, 20, 30, 2, 5], Sampling(**{"max_tokens": 6, **sampling}), random.Random(seed))  # pyright: ignore[reportArgumentType]  # ints and floats


def test_logprobs_equal_those_of_a_forward_pass(policy: Policy) -> None:
    rows = [row(seed) for seed in range(8)]
    generate(policy.model, rows, policy.stop_ids)
    for done in rows:
        wanted = plain_logprobs(policy, done).gather(1, torch.tensor(done.tokens)[:, None])[:, 0]
        assert done.logprobs == pytest.approx(wanted.tolist(), abs=1e-5)


@pytest.mark.parametrize("name", ["gpt", "mamba"])
@pytest.mark.parametrize("seeded", [False, True])
def test_a_model_without_a_cache_of_keys_reads_the_whole_row_for_each_token(name: str, seeded: bool) -> None:
    torch.manual_seed(0)
    model: Any
    if name == "gpt":
        model = OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=104, n_embd=32, n_layer=2, n_head=2, initializer_range=0.5)).eval()
    else:
        model = MambaForCausalLM(MambaConfig(vocab_size=104, hidden_size=32, state_size=4, num_hidden_layers=2)).eval()
    rows = [row(seed, max_tokens=2 + 2 * seed) for seed in range(3)]  # they end one after the other
    for each in rows:
        each.seeded = seeded
    generate(model, rows, frozenset())
    for done in rows:
        wanted = plain_logprobs(Policy(model, None, frozenset(), 512), done).gather(1, torch.tensor(done.tokens)[:, None])[:, 0]
        assert (len(done.tokens), done.logprobs) == (done.sampling.max_tokens, pytest.approx(wanted.tolist(), abs=1e-5))


def test_logprobs_are_of_the_sampled_distribution(policy: Policy) -> None:
    hot, narrow, greedy = row(temperature=1.5), row(top_p=0.3), row(temperature=0.0)
    generate(policy.model, [hot, narrow, greedy], policy.stop_ids)
    plain = plain_logprobs(policy, hot)
    wanted = torch.log_softmax(plain / 1.5, -1).gather(1, torch.tensor(hot.tokens)[:, None])[:, 0]
    assert hot.logprobs == pytest.approx(wanted.tolist(), abs=1e-5)

    for place, token in enumerate(narrow.tokens):
        ordered, index = plain_logprobs(policy, narrow)[place].exp().sort(descending=True)
        nucleus = int((ordered.cumsum(0) < 0.3).sum()) + 1
        assert token in index[:nucleus].tolist()
        share = ordered[index[:nucleus].tolist().index(token)] / ordered[:nucleus].sum()
        assert narrow.logprobs[place] == pytest.approx(share.log().item(), abs=1e-4)

    unscaled = plain_logprobs(policy, greedy)
    assert greedy.tokens == unscaled.argmax(-1).tolist()
    assert greedy.logprobs == pytest.approx(unscaled.max(-1).values.tolist(), abs=1e-5)


def test_a_seeded_reply_does_not_depend_on_other_rows(policy: Policy) -> None:
    alone = row(7)
    generate(policy.model, [alone], policy.stop_ids)
    together = [row(1), row(7), row(2, max_tokens=2)]
    generate(policy.model, together, policy.stop_ids)
    assert together[1].tokens == alone.tokens
    assert (len(together[2].tokens), together[2].finish_reason) == (2, "length")


def test_tokens_are_drawn_in_proportion_to_their_probability(policy: Policy) -> None:
    rows = [row(seed, max_tokens=1) for seed in range(4000)]
    generate(policy.model, rows, policy.stop_ids)
    drawn = Counter(done.tokens[0] for done in rows)
    probability = plain_logprobs(policy, rows[0])[0].exp()
    for token in probability.topk(5).indices.tolist():
        expected = 4000 * probability[token].item()
        assert abs(drawn[token] - expected) < 5 * expected**0.5


def test_a_stop_token_ends_a_reply_and_is_part_of_it(policy: Policy) -> None:
    probe = row(3)
    generate(policy.model, [probe], policy.stop_ids)
    stopped = row(3)
    steps: list[int] = []
    generate(policy.model, [stopped, row(4)], frozenset({probe.tokens[2]}), lambda rows: steps.append(len(rows)))
    assert stopped.tokens == probe.tokens[: probe.tokens.index(probe.tokens[2]) + 1]
    assert stopped.finish_reason == "stop"
    assert steps[0] == 2


@pytest.mark.parametrize("seeded", [False, True])
def test_a_stop_string_ends_a_reply_with_the_token_that_completes_it(policy: Policy, seeded: bool) -> None:
    probe = row(3)
    probe.seeded = seeded
    generate(policy.model, [probe], policy.stop_ids)
    text = policy.decode(probe.tokens[:3])
    ended = next(count for count in range(1, 4) if text[-2:] in policy.decode(probe.tokens[:count]))
    stopped, other = row(3), row(4)
    stopped.seeded = other.seeded = seeded
    stopped.sampling = Sampling(ended, stop=("not there", text[-2:]))  # a stop string beats the limit of tokens
    generate(policy.model, [stopped, other], policy.stop_ids, decode=policy.decode)
    assert (stopped.tokens, stopped.finish_reason) == (probe.tokens[:ended], "stop")
    assert stopped.logprobs == pytest.approx(probe.logprobs[:ended], abs=1e-5)


def test_batches_have_prompts_of_equal_length() -> None:
    rows = [Row([0] * length, Sampling(1), random.Random(0)) for length in (3, 5, 3, 3, 5)]
    assert [[len(r.prompt) for r in batch] for batch in by_prompt_length(rows, 2)] == [[3, 3], [3], [5, 5]]


def test_a_seeded_reply_is_bit_identical_in_any_batch(policy: Policy) -> None:
    def seeded(seed: int, max_tokens: int = 6) -> Row:
        return Row([1, 4, 20, 30, 2, seed % 40 + 5], Sampling(max_tokens), random.Random(seed), seeded=True)

    alone = seeded(7)
    generate(policy.model, [alone], policy.stop_ids)
    for company in (1, 9, 25):
        rows = [seeded(seed, max_tokens=1 + seed % 6) for seed in range(100, 100 + company)] + [seeded(7)]
        random.Random(company).shuffle(rows)
        for batch in by_prompt_length(rows, 256):
            assert len(batch) <= SHAPE_ROWS
            generate(policy.model, batch, policy.stop_ids)
        same = next(each for each in rows if each.prompt == alone.prompt and each.sampling.max_tokens == 6)
        assert (same.tokens, same.logprobs) == (alone.tokens, alone.logprobs)
        assert all(each.finish_reason and len(each.tokens) == len(each.logprobs) <= each.sampling.max_tokens for each in rows)
