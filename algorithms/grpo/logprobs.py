"""Log-probs of a model's own tokens, without padding and without the logits of a whole batch.

Rows are laid end to end in one row of the model. Attention alone works row by row, since a mask over all pairs of tokens, by which
transformers keeps rows apart under sdpa, costs more than the padding that it saves; all other layers see one long row.

The head is applied to the hidden states that predict a trained token, a chunk at a time; the backward pass computes each chunk's logits
again: [tokens, vocabulary] in float32 is 5 GB for 8,192 tokens of Qwen. The idea is that of fused linear cross-entropy (Liger Kernel,
arXiv:2410.10989, §3.2), with log-probs in place of a loss.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from agl_otel.algorithms.grpo.lora import has_lora
from agl_otel.algorithms.grpo.objective import token_logprobs

CHUNK_LOGITS: Final = 1 << 25
"""Logits computed at a time: 128 MB in float32."""
BY_ROW: Final = "sdpa_by_row"
"""The name of `_attend_by_row` in transformers."""
_PROBED_IDS: Final = 4  # token ids of the forward pass by which a head is recognised
_PROBED_ROWS: Final = (3, 5, 1)  # lengths of the rows by which it is found out whether a model can be packed
_SHORT_ROW: Final = 800  # tokens; on an H100, padding is faster at 100 and 300 tokens a row, and a call for each row at 1500
_LAYERS: Final = frozenset({"full_attention", "sliding_attention"})  # what `_attend_by_row` computes
_TOLERANCE: Final = 1e-4  # of hidden states, relative to their norm; where rows see each other they differ by far more
_LOW_TOLERANCE: Final = 3e-2  # with weights in bfloat16, which has 8 bits
_logger = logging.getLogger(__name__)


class Scorer:
    """Computes the log-probs of trained tokens under a causal language model of transformers, with gradients.

    What the model can do is found out when the scorer is made, by forward passes over a few tokens. One whose logits are more than a linear
    head of its last hidden states (final_logit_softcapping, logit_scale, …) is scored from its whole logits. One whose rows are not
    independent when they are laid end to end (recurrent layers, other attention than sdpa and flash attention) gets rows that are padded on
    the right, which under causal attention changes no token's distribution.

    Args:
        model: also with an adapter of peft. With sdpa its attention becomes `BY_ROW`, which is the same for calls by others.
        compute_dtype: torch.bfloat16 for automatic mixed precision: weights in float32 are their own master copy.
        chunk_logits: logits computed at a time.
        pack: False pads in any case.
    """

    def __init__(
        self, model: Any, *, compute_dtype: torch.dtype = torch.float32, chunk_logits: int = CHUNK_LOGITS, pack: bool = True
    ) -> None:
        self._model = model
        self._dtype = compute_dtype
        self._chunk_logits = chunk_logits
        self._causal = model.get_base_model() if has_lora(model) else model
        self._decoder, self._head = self._causal.get_decoder(), self._causal.get_output_embeddings()
        self._short = _short_rows(self._causal.config)
        self.whole_logits = not self._has_linear_head()
        """Whether log-probs are computed from the logits of all positions, which takes memory."""
        self.packs = False
        """Whether rows are laid end to end; else they are padded."""
        self.packs = pack and self._can_pack()

    @property
    def device(self) -> torch.device:
        """Of the model."""
        return self._model.device

    def __call__(self, token_ids: Tensor, lengths: Sequence[int], trained: Tensor, temperature: Tensor | float = 1.0) -> Tensor:
        """Compute float32 [trained tokens] for rows of these lengths, end to end: int64 `token_ids` and bool `trained`, both [tokens].

        The first token of a row has no log-prob, and must not be trained. `temperature`: of all tokens, or float [trained tokens]; 0 stands
        for 1, as in objective.token_logprobs.
        """
        where, wanted = trained[1:], token_ids[1:][trained[1:]]
        with self._autocast():
            predicting = self._predicting(token_ids, lengths)[:-1][where]
        if self.whole_logits:
            return token_logprobs(predicting, wanted, temperature=temperature)
        hidden, weight, bias = predicting, self._head.weight, self._head.bias
        if self._dtype is not torch.float32:
            hidden, weight, bias = predicting.to(self._dtype), weight.to(self._dtype), None if bias is None else bias.to(self._dtype)
        scale = torch.as_tensor(temperature, dtype=torch.float32, device=hidden.device).expand(len(wanted))
        chunk = max(1, self._chunk_logits // weight.shape[0])
        found: Any = _LinearLogprobs.apply(hidden, weight, bias, wanted, torch.where(scale == 0, 1.0, scale), chunk)
        return found

    def passes(self, lengths: NDArray[np.int64], most_tokens: int) -> Iterator[NDArray[np.int64]]:
        """Yield the row numbers of each forward pass: rows of similar length, at most `most_tokens` with padding where there is some."""
        order = np.argsort(lengths, kind="stable")
        start = tokens = 0
        for end, longest in enumerate(lengths[order]):
            tokens = tokens + longest if self.packs else (end + 1 - start) * longest
            if end > start and tokens > most_tokens:
                yield order[start:end]
                start, tokens = end, longest
        if start < len(order):
            yield order[start:]

    def _predicting(self, token_ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """Compute what each token's successor is predicted from, [tokens, …]: logits, or the hidden states that the head is applied to.

        A model of longrope turns all rows of a pass by the longest, so short and long rows have passes of their own.
        """
        if self._short is None or not min(lengths) <= self._short < max(lengths):
            return self._of_pass(token_ids, lengths)
        rows, found = token_ids.split(tuple(lengths)), dict[int, Tensor]()
        for are_long in (False, True):
            places = [place for place, length in enumerate(lengths) if (length > self._short) is are_long]
            own = [lengths[place] for place in places]
            found |= zip(places, self._of_pass(torch.cat([rows[place] for place in places]), own).split(own), strict=True)
        return torch.cat([found[place] for place in range(len(lengths))])

    def _of_pass(self, token_ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """Compute `_predicting` in one pass."""

        def take(**inputs: Any) -> Tensor:
            return self._model(**inputs).logits if self.whole_logits else self._decoder(**inputs).last_hidden_state

        places = torch.cat([torch.arange(length) for length in lengths]).to(token_ids.device)
        row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(token_ids.device)
        if self.packs and self._causal.config._attn_implementation == BY_ROW:
            # without this mask, transformers finds rows by their positions and makes a mask of all pairs of tokens
            every = torch.ones((1, len(token_ids)), dtype=torch.bool, device=token_ids.device)
            layout = _Layout(tuple(lengths), row, places, together=token_ids.is_cuda and len(token_ids) < _SHORT_ROW * len(lengths))
            packed = {"input_ids": token_ids[None], "position_ids": places[None], "attention_mask": every}
            return take(**packed, row_layout=layout, use_cache=False)[0]
        if self.packs:
            return take(input_ids=token_ids[None], position_ids=places[None], use_cache=False)[0]
        return take(input_ids=pad_sequence([*token_ids.split(tuple(lengths))], batch_first=True), use_cache=False)[row, places]

    @torch.no_grad()
    def _can_pack(self) -> bool:
        """Return whether rows laid end to end have the hidden states that each has alone. In place of sdpa, attention becomes BY_ROW."""
        model, config = self._causal, self._causal.config
        before: str = config._attn_implementation
        layers = getattr(config, "layer_types", None) or ()
        if before == "sdpa" and _LAYERS.issuperset(layers) and getattr(config, "attention_chunk_size", None) is None:
            model.set_attn_implementation(BY_ROW)
        by_row = config._attn_implementation == BY_ROW
        if by_row or before.startswith("flash_attention"):
            ids = torch.arange(sum(_PROBED_ROWS), device=self.device) % model.get_input_embeddings().num_embeddings
            with nullcontext() if by_row else self._autocast():  # flash attention refuses float32
                alone = torch.cat([self._predicting(row, [len(row)]) for row in ids.split(_PROBED_ROWS)])
                self.packs = True
                error = (self._predicting(ids, _PROBED_ROWS) - alone).norm() / alone.norm()
            if error <= (_TOLERANCE if by_row and model.dtype.itemsize > 2 else _LOW_TOLERANCE):
                return True
            model.set_attn_implementation(before)
        _logger.info("%s has rows padded: its %s attention or its layers cannot keep rows apart", type(model).__name__, before)
        return False

    def _autocast(self) -> AbstractContextManager[object]:
        """Compute in `compute_dtype` what PyTorch computes in it safely; the weights keep their own."""
        low = self._dtype is not torch.float32
        return torch.autocast(self.device.type, dtype=self._dtype) if low else nullcontext()

    @torch.no_grad()
    def _has_linear_head(self) -> bool:
        if not isinstance(self._head, torch.nn.Linear) or self._decoder is self._causal:  # which gives no hidden states
            return False
        ids = torch.arange(_PROBED_IDS, device=self._model.device)[None]
        with self._autocast():
            hidden = self._decoder(input_ids=ids, use_cache=False).last_hidden_state
            return torch.equal(self._head(hidden), self._model(input_ids=ids, use_cache=False).logits)


def _short_rows(config: Any) -> int | None:
    """Return up to which length a row has the short factors of longrope (arXiv:2402.13753); None for other models."""
    given: Any = getattr(config, "rope_parameters", None) or {}
    if given.get("rope_type") != "longrope":
        return None
    return given.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)


@dataclass(frozen=True)
class _Layout:
    """Where the tokens of rows lie that are laid end to end."""

    lengths: tuple[int, ...]
    row: Tensor
    """int64 [tokens]."""
    place: Tensor
    """int64 [tokens]: in its row, from 0."""
    together: bool
    """Attention pads the rows for itself, and does all in one call: on a GPU, where a call for each short row takes longer than padding."""


def _attend_by_row(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    row_layout: _Layout | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend within each row of [1, heads, tokens, size] by itself, causally; without a layout it is transformers' sdpa."""
    if row_layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)

    def attend(*of_rows: Tensor) -> Tensor:
        length, window = of_rows[0].shape[2], options.get("sliding_window")
        mask = None
        if window is not None and length > window:  # a token sees itself and the window - 1 before it, as in transformers' masks
            mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=query.device).tril().triu(1 - window)
        states: Any = of_rows
        attended: Any = sdpa_attention_forward
        return attended(module, *states, mask, **options)[0]

    if not row_layout.together:
        parts = zip(*(tensor.split(row_layout.lengths, dim=2) for tensor in (query, key, value)), strict=True)
        return torch.cat([attend(*rows) for rows in parts], dim=1), None
    shape, where = (len(row_layout.lengths), max(row_layout.lengths)), (row_layout.row, row_layout.place)
    padded = [
        tensor.new_zeros(*shape, tensor.shape[1], tensor.shape[3]).index_put(where, tensor[0].transpose(0, 1)).transpose(1, 2)
        for tensor in (query, key, value)
    ]
    return attend(*padded)[where][None], None


attentions: Any = AttentionInterface
attentions.register(BY_ROW, _attend_by_row)
AttentionMaskInterface.register(BY_ROW, sdpa_mask)


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
