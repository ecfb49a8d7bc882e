"""Log-probs of a model's own tokens, without the logits of a whole batch: [tokens, vocabulary] in float32 is 5 GB for 8,192 tokens of Qwen.

The head is applied to the hidden states that predict a trained token, a chunk at a time; the backward pass computes each chunk's logits
again. The idea is that of fused linear cross-entropy (Liger Kernel, arXiv:2410.10989, §3.2), with log-probs in place of a loss.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor

from agl_otel.algorithms.grpo.lora import has_lora
from agl_otel.algorithms.grpo.objective import token_logprobs

CHUNK_LOGITS: Final = 1 << 25
"""Logits computed at a time: 128 MB in float32."""
_PROBED_IDS: Final = 4  # token ids of the forward pass by which a head is recognised


class Scorer:
    """Computes the log-probs of trained tokens under a causal language model of transformers, with gradients.

    A model whose logits are more than a linear head of its last hidden states (final_logit_softcapping, logit_scale, …) is recognised when
    the scorer is made, by a forward pass over a few tokens, and is scored from its whole logits.

    Args:
        model: also with an adapter of peft.
        compute_dtype: torch.bfloat16 for automatic mixed precision: weights in float32 are their own master copy.
        chunk_logits: logits computed at a time.
    """

    def __init__(self, model: Any, *, compute_dtype: torch.dtype = torch.float32, chunk_logits: int = CHUNK_LOGITS) -> None:
        self._model = model
        self._dtype = compute_dtype
        self._chunk_logits = chunk_logits
        causal = model.get_base_model() if has_lora(model) else model
        self._decoder, self._head = causal.get_decoder(), causal.get_output_embeddings()
        self.whole_logits = not self._has_linear_head()
        """Whether log-probs are computed from the logits of all positions, which takes memory."""

    @property
    def device(self) -> torch.device:
        """Of the model."""
        return self._model.device

    def __call__(self, token_ids: Tensor, trained: Tensor, temperature: Tensor | float = 1.0) -> Tensor:
        """Compute float32 [tokens] for int64 `token_ids` and bool `trained` [n, width], where rows are padded on the right.

        `temperature`: of all tokens, or float [tokens] for each trained one; 0 stands for 1, as in objective.token_logprobs.
        """
        where, wanted = trained[:, 1:], token_ids[:, 1:][trained[:, 1:]]
        with self._autocast():
            if self.whole_logits:
                logits = self._model(input_ids=token_ids, use_cache=False).logits[:, :-1]
                return token_logprobs(logits[where], wanted, temperature=temperature)
            hidden = self._decoder(input_ids=token_ids, use_cache=False).last_hidden_state[:, :-1][where]
        weight, bias = self._head.weight, self._head.bias
        if self._dtype is not torch.float32:
            hidden, weight, bias = hidden.to(self._dtype), weight.to(self._dtype), None if bias is None else bias.to(self._dtype)
        scale = torch.as_tensor(temperature, dtype=torch.float32, device=hidden.device).expand(len(wanted))
        chunk = max(1, self._chunk_logits // weight.shape[0])
        found: Any = _LinearLogprobs.apply(hidden, weight, bias, wanted, torch.where(scale == 0, 1.0, scale), chunk)
        return found

    def _autocast(self) -> AbstractContextManager[object]:
        """Compute in `compute_dtype` what PyTorch computes in it safely; the weights keep their own."""
        low = self._dtype is not torch.float32
        return torch.autocast(self.device.type, dtype=self._dtype) if low else nullcontext()

    @torch.no_grad()
    def _has_linear_head(self) -> bool:
        if not isinstance(self._head, torch.nn.Linear):
            return False
        ids = torch.arange(_PROBED_IDS, device=self._model.device)[None]
        hidden = self._decoder(input_ids=ids, use_cache=False).last_hidden_state
        return torch.equal(self._head(hidden), self._model(input_ids=ids, use_cache=False).logits)


class _LinearLogprobs(torch.autograd.Function):
    """log softmax((hidden @ weight.T + bias) / temperature) at the given ids, in chunks of tokens; gradients of hidden, weight and bias."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, token_ids: Tensor, temperature: Tensor, chunk: int
    ) -> Tensor:
        found = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        norms = torch.empty_like(found)
        for part in _parts(len(hidden), chunk):
            logits = _logits(hidden[part], weight, bias, temperature[part])
            norms[part] = torch.logsumexp(logits, dim=-1)
            found[part] = logits.gather(-1, token_ids[part, None])[:, 0] - norms[part]
        ctx.save_for_backward(hidden, weight, bias, token_ids, temperature, norms)
        ctx.chunk = chunk
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, token_ids, temperature, norms = ctx.saved_tensors
        of_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        of_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and ctx.needs_input_grad[2] else None
        for part in _parts(len(hidden), ctx.chunk):
            scale = (gradients[0][part] / temperature[part])[:, None]
            step = _logits(hidden[part], weight, bias, temperature[part]).sub_(norms[part, None]).exp_().mul_(-scale)
            step.scatter_add_(1, token_ids[part, None], scale)
            if of_hidden is not None:
                of_hidden[part] = step.to(weight.dtype) @ weight
            if of_weight is not None:
                of_weight.addmm_(step.T, hidden[part].float())
            if of_bias is not None:
                of_bias += step.sum(dim=0)
        return (
            of_hidden,
            of_weight.to(weight.dtype) if of_weight is not None else None,
            of_bias.to(bias.dtype) if bias is not None and of_bias is not None else None,
            *(None, None, None),
        )


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: Tensor) -> Tensor:
    return torch.nn.functional.linear(hidden, weight, bias).float().div_(temperature[:, None])


def _parts(count: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, count)) for start in range(0, count, chunk)]
