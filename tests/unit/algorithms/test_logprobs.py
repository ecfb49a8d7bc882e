"""Log-probs of rows end to end and in chunks, against those of whole logits of each row."""

from __future__ import annotations

import copy
import logging
import random
from typing import Any

import pytest
import torch
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from agl_otel.algorithms.grpo.logprobs import Scorer, _attend_by_row, _Layout  # pyright: ignore[reportPrivateUsage]  # the GPU's way is taken on the CPU
from agl_otel.algorithms.grpo.lora import with_lora
from agl_otel.algorithms.grpo.objective import token_logprobs
from agl_otel.algorithms.grpo.policy import Policy, checkpoint_activations
from agl_otel.errors import UsageError

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


def scored(scorer: Scorer, ids: torch.Tensor, trained: torch.Tensor, temperature: torch.Tensor | float = 1.0) -> torch.Tensor:
    return scorer(ids.flatten(), [ids.shape[1]] * len(ids), trained.flatten(), temperature)


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
    found, expected = scored(scorer, ids, trained, temperature), whole(plain, ids, trained, temperature)
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
    found, expected = scored(scorer, ids, trained, temperature), whole(model, ids, trained, temperature)
    assert torch.allclose(found, expected, rtol=0, atol=1e-6)
    found.sum().backward()
    parameters: dict[str, Any] = dict(model.named_parameters())
    assert {name for name in parameters if parameters[name].grad is not None} == {name for name in parameters if ".lora_" in name}


def test_bfloat16_is_as_exact_as_whole_logits_in_bfloat16() -> None:
    model = qwen(tied=True).bfloat16()
    ids, trained, temperature = some_rows(3, 211)
    found = scored(Scorer(model, chunk_logits=500), ids, trained, temperature)
    assert found.dtype is torch.float32
    assert torch.allclose(found, whole(model, ids, trained, temperature), rtol=0, atol=1e-6)


def test_a_head_that_is_not_linear_is_scored_from_its_logits() -> None:
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(Gemma2Config(**SIZES, final_logit_softcapping=0.5, query_pre_attn_scalar=16)).eval()
    scorer = Scorer(model)
    assert scorer.whole_logits
    ids, trained, temperature = some_rows(4, 211)
    assert torch.allclose(scored(scorer, ids, trained, temperature), whole(model, ids, trained, temperature), rtol=0, atol=1e-6)


def dropping(name: str) -> Any:
    """Make a model that has noise of its own in training mode: of hidden states, whole layers, attention, or a router."""
    torch.manual_seed(0)
    heads: dict[str, Any] = {"vocab_size": 211, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    match name:
        case "opt":
            return OPTForCausalLM(OPTConfig(**heads, ffn_dim=64, word_embed_proj_dim=32, dropout=0.5, layerdrop=0.5)).eval()
        case "falcon":
            return FalconForCausalLM(FalconConfig(**heads, hidden_dropout=0.5, attention_dropout=0.5)).eval()
        case _:
            return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, router_jitter_noise=0.5)).eval()


INSIDE = {"opt": "layers.0.self_attn", "falcon": "h.0.self_attention", "mixtral": "layers.0.self_attn"}
"""A module of a layer, whose passes are counted."""


@pytest.mark.parametrize("name", INSIDE)
def test_checkpointed_activations_are_those_of_the_model_that_samples(name: str) -> None:
    """They are computed twice, and neither time with the dropout or the noise of training mode."""
    ids, lengths, trained, temperature = ragged(3)
    model, plain, passes = dropping(name), dropping(name), list[int]()
    checkpoint_activations(model)
    scorer = Scorer(model)
    model.get_decoder().get_submodule(INSIDE[name]).register_forward_pre_hook(lambda *_: passes.append(1))
    found, expected = scorer(ids, lengths, trained, temperature), row_by_row(plain, ids, lengths, trained, temperature)
    assert torch.allclose(found, expected, rtol=0, atol=1e-5)
    once = len(passes)
    for logprobs in (found, expected):
        logprobs.sum().backward()
    assert len(passes) == 2 * once
    for (weight, one), (_, other) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), weight
        assert one.grad is None or torch.allclose(one.grad, other.grad, rtol=1e-4, atol=1e-5), weight


def test_a_model_without_layers_to_compute_again_is_refused() -> None:
    with pytest.raises(UsageError, match="gradient_checkpointing = true: OpenAIGPTLMHeadModel has no layers"):
        checkpoint_activations(OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=211, n_embd=32, n_layer=1, n_head=2)))


def test_a_model_that_is_its_own_decoder_is_scored_from_its_logits() -> None:
    """Llama 4's get_decoder gives the whole model, which has no hidden states among its outputs."""
    torch.manual_seed(0)
    model = Llama4ForCausalLM(Llama4TextConfig(**SIZES, num_local_experts=2, intermediate_size_mlp=64)).eval()
    scorer = Scorer(model)
    assert scorer.whole_logits
    ids, lengths, trained, temperature = ragged(4)
    expected = row_by_row(model, ids, lengths, trained, temperature)
    assert torch.allclose(scorer(ids, lengths, trained, temperature), expected, rtol=0, atol=1e-5)


def test_rows_on_both_sides_of_the_original_length_are_turned_by_their_own_factors() -> None:
    """Phi 3 and 4 mini have longrope: a pass that holds a long row would turn the short ones by the long factors, too."""
    torch.manual_seed(0)
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 8}
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, **factors}
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim"}
    sizes |= {"rope_scaling": rope, "original_max_position_embeddings": 8, "max_position_embeddings": 64, "pad_token_id": 0}
    model: Any = Phi3ForCausalLM(Phi3Config(**sizes)).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    inputs = ragged(5)
    expected = row_by_row(model, *inputs)
    for pack in (True, False):
        assert torch.allclose(Scorer(model, pack=pack)(*inputs), expected, rtol=0, atol=1e-4)


def ragged(seed: int, vocabulary: int = 211) -> tuple[torch.Tensor, list[int], torch.Tensor, torch.Tensor]:
    """Make token ids of rows end to end, the lengths of the rows, trained tokens, and a temperature for each of these."""
    source, lengths = torch.Generator().manual_seed(seed), [7, 2, 11, 1, 7]
    ids = torch.randint(0, vocabulary, (sum(lengths),), generator=source)
    trained = torch.rand(sum(lengths), generator=source) < 0.6
    trained[[0, 7, 9, 20, 21]] = False
    return ids, lengths, trained, 0.3 + torch.rand(int(trained.sum()), generator=source)


def row_by_row(model: Any, ids: torch.Tensor, lengths: list[int], trained: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    counts = [int(part.sum()) for part in trained.split(lengths)]
    parts = zip(ids.split(lengths), trained.split(lengths), temperature.split(counts), strict=True)
    return torch.cat([whole(model, row[None], where[None], scale) for row, where, scale in parts])


def mistral() -> Any:
    """Make a model whose tokens see themselves and the three before."""
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4)).eval()


def checkpointed() -> Any:
    model = qwen(tied=False)
    checkpoint_activations(model)
    return model


def adapted() -> Any:
    pytest.importorskip("peft", reason="needs the [lora] extra")
    model = with_lora(qwen(tied=True), 2)
    for name, weight in model.named_parameters():
        if ".lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    return model


def eager() -> Any:
    model = qwen(tied=False)
    model.set_attn_implementation("eager")
    return model


def recurrent() -> Any:
    torch.manual_seed(0)
    return MambaForCausalLM(MambaConfig(vocab_size=211, hidden_size=32, state_size=4, num_hidden_layers=2)).eval()


PACKED: dict[str, Any] = {
    "untied": lambda: qwen(tied=False), "tied": lambda: qwen(tied=True), "sliding": mistral, "checkpointed": checkpointed, "lora": adapted,
}  # fmt: skip


@pytest.mark.parametrize("name", PACKED)
def test_rows_end_to_end_have_the_log_probs_and_gradients_of_padded_rows_and_of_rows_alone(name: str) -> None:
    """All in float64, but for norms, rotations and the log-probs themselves, which are float32 in any case: 1e-6."""
    models = [PACKED[name]().double() for _ in range(3)]
    inputs = ragged(7)
    packed, padded = Scorer(models[0]), Scorer(models[1], pack=False)
    assert packed.packs and not padded.packs
    found = [packed(*inputs), padded(*inputs), row_by_row(models[2], *inputs)]
    weights = torch.linspace(-1, 1, len(found[0]))
    for each in found:
        (each * weights / len(weights)).sum().backward()
    for each, model in zip(found[1:], models[1:], strict=True):
        assert torch.allclose(found[0], each.float(), rtol=0, atol=1e-6)
        for (weight, one), (_, other) in zip(models[0].named_parameters(), model.named_parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None)
            assert one.grad is None or torch.allclose(one.grad, other.grad, rtol=0, atol=1e-6), weight


def test_a_row_end_to_end_with_others_does_not_see_them() -> None:
    scorer, (ids, lengths, trained, temperature) = Scorer(qwen(tied=False)), ragged(8)
    other = torch.cat([(ids[:9] + 1) % 211, ids[9:]])
    before = int(trained[:9].sum())
    found = [scorer(each, lengths, trained, temperature) for each in (ids, other)]
    assert torch.equal(found[0][before:], found[1][before:])
    assert not torch.isclose(found[0][:before], found[1][:before]).any()


@pytest.mark.parametrize("window", [None, 4])
def test_attention_that_pads_rows_for_itself_is_attention_to_each_row(window: int | None) -> None:
    """The first is for GPUs, where calls for short rows are slow."""
    lengths, found = (7, 2, 11, 1), list[list[torch.Tensor]]()
    row = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    place = torch.cat([torch.arange(length) for length in lengths])
    module = mistral().model.layers[0].self_attn
    for together in (True, False):
        torch.manual_seed(0)
        states: Any = [torch.randn(1, heads, sum(lengths), 16, dtype=torch.float64, requires_grad=True) for heads in (2, 1, 1)]
        layout = _Layout(lengths, row, place, together)
        attend: Any = _attend_by_row
        attended, _ = attend(module, *states, None, row_layout=layout, sliding_window=window, scaling=0.25)
        attended.square().sum().backward()
        found.append([attended, *(state.grad for state in states)])
    assert all(torch.allclose(one, other, rtol=0, atol=1e-12) for one, other in zip(*found, strict=True))


def test_mixed_precision_scores_rows_end_to_end_as_padded_ones() -> None:
    """bfloat16 has 8 bits, and matrix products round by their shapes: log-probs differ by less than 0.02."""
    inputs = ragged(9)
    packed, padded = (Scorer(qwen(tied=False), compute_dtype=torch.bfloat16, pack=pack) for pack in (True, False))
    assert packed.packs
    assert torch.allclose(packed(*inputs), padded(*inputs), rtol=0, atol=0.02)


def hybrid() -> Any:
    """Make a model with both attention and recurrent layers, which its config does not list as layer_types."""
    torch.manual_seed(0)
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim"}
    config = JambaConfig(**sizes, num_experts=1, attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False, mamba_d_state=4)
    return JambaForCausalLM(config).eval()


@pytest.mark.parametrize(
    ("make", "words"),
    [(hybrid, "JambaForCausalLM has rows padded"), (eager, "its eager attention"), (recurrent, "MambaForCausalLM has rows padded")],
)
def test_a_model_that_cannot_keep_rows_apart_gets_padded_ones(make: Any, words: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "agl_otel"):
        model = make()
        scorer = Scorer(model)
    assert not scorer.packs and words in caplog.text
    inputs = ragged(10)
    assert torch.allclose(scorer(*inputs), row_by_row(model, *inputs), rtol=0, atol=1e-6)


def test_others_calls_of_a_packed_model_are_as_before() -> None:
    """A server's or a test's: with padding on the left and a mask."""
    plain, packed = mistral(), mistral()
    assert Scorer(packed).packs
    ids, mask = torch.arange(24).reshape(2, 12), torch.ones(2, 12, dtype=torch.int64)
    mask[1, :5] = 0
    assert torch.equal(plain(input_ids=ids, attention_mask=mask).logits, packed(input_ids=ids, attention_mask=mask).logits)
    assert torch.equal(plain(input_ids=ids).logits, packed(input_ids=ids).logits)


def test_no_trained_token_gives_no_log_prob() -> None:
    ids, trained, _ = some_rows(random.Random(5).randrange(100), 211)
    assert scored(Scorer(qwen(tied=False)), ids, torch.zeros_like(trained)).shape == (0,)


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
        scored(scorer, ids, trained).sum().backward()
    assert largest == 2 * 211
