"""Log-probs computed in chunks, against those of whole logits."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen2Config, Qwen2ForCausalLM

from agl_otel.algorithms.grpo.logprobs import Scorer
from agl_otel.algorithms.grpo.lora import with_lora
from agl_otel.algorithms.grpo.objective import token_logprobs
from agl_otel.algorithms.grpo.policy import Policy

pytestmark = pytest.mark.full
SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def qwen(*, tied: bool) -> Any:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=tied)).eval()


def some_rows(seed: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make token ids and trained tokens [3, 17], and a temperature for each of these."""
    source = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, (3, 17), generator=source)
    trained = torch.rand((3, 17), generator=source) < 0.5
    trained[:, 0] = False
    return ids, trained, 0.3 + torch.rand(int(trained.sum()), generator=source)


def whole(model: Any, ids: torch.Tensor, trained: torch.Tensor, temperature: torch.Tensor | float) -> torch.Tensor:
    where = trained[:, 1:]
    return token_logprobs(model(input_ids=ids).logits[:, :-1][where], ids[:, 1:][where], temperature=temperature)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunk", [1, 3 * 211, 1 << 25])
def test_chunks_give_the_log_probs_and_gradients_of_whole_logits(tied: bool, chunk: int) -> None:
    ours, plain = qwen(tied=tied), qwen(tied=tied)
    ids, trained, temperature = some_rows(1, 211)
    scorer = Scorer(ours, chunk_logits=chunk)
    assert not scorer.whole_logits
    found, expected = scorer(ids, trained, temperature), whole(plain, ids, trained, temperature)
    assert torch.allclose(found, expected, rtol=0, atol=1e-6)
    weights = torch.linspace(-1, 1, len(found))
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    for (name, one), (_, other) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=1e-5, atol=1e-6), name


def test_only_the_adapter_gets_gradients(policy: Policy) -> None:
    pytest.importorskip("peft", reason="needs the [lora] extra")
    model = with_lora(copy.deepcopy(policy.model), 2)
    scorer = Scorer(model)
    assert not scorer.whole_logits
    ids, trained, temperature = some_rows(2, policy.vocabulary)
    found, expected = scorer(ids, trained, temperature), whole(model, ids, trained, temperature)
    assert torch.allclose(found, expected, rtol=0, atol=1e-6)
    found.sum().backward()
    parameters: dict[str, Any] = dict(model.named_parameters())
    assert {name for name in parameters if parameters[name].grad is not None} == {name for name in parameters if ".lora_" in name}


def test_bfloat16_is_as_exact_as_whole_logits_in_bfloat16() -> None:
    model = qwen(tied=True).bfloat16()
    ids, trained, temperature = some_rows(3, 211)
    found = Scorer(model, chunk_logits=500)(ids, trained, temperature)
    assert found.dtype is torch.float32
    assert torch.allclose(found, whole(model, ids, trained, temperature), rtol=0, atol=1e-6)


def test_a_head_that_is_not_linear_is_scored_from_its_logits() -> None:
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(Gemma2Config(**SIZES, final_logit_softcapping=0.5, query_pre_attn_scalar=16)).eval()
    scorer = Scorer(model)
    assert scorer.whole_logits
    ids, trained, temperature = some_rows(4, 211)
    assert torch.allclose(scorer(ids, trained, temperature), whole(model, ids, trained, temperature), rtol=0, atol=1e-6)


def test_no_trained_token_gives_no_log_prob() -> None:
    ids, trained, _ = some_rows(random.Random(5).randrange(100), 211)
    assert Scorer(qwen(tied=False))(ids, torch.zeros_like(trained)).shape == (0,)


def test_the_logits_of_all_tokens_are_never_held_at_once() -> None:
    """All tensors as wide as the vocabulary are as long as a chunk, but for the head's transposed weight."""
    model, (ids, trained, _) = qwen(tied=True), some_rows(6, 211)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):  # pyright: ignore
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            made = func(*args, **(kwargs or {}))
            for tensor in made if isinstance(made, tuple | list) else [made]:
                if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (211,) and tensor.shape != (SIZES["hidden_size"], 211):
                    largest = max(largest, tensor.numel())
            return made

    scorer = Scorer(model, chunk_logits=2 * 211)
    with Watch():
        scorer(ids, trained).sum().backward()
    assert largest == 2 * 211
