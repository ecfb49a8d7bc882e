"""Sample from a causal language model in batches: pure torch, no server, no clock.

Rows of a batch have prompts of equal length, so that there is no padding and each token's log-prob equals that of a forward pass over
its row alone. Log-probs are float32, natural, under the distribution that the token was sampled from: temperature first, then top-p
(nucleus sampling, Holtzman et al., arXiv:1904.09751), renormalised. Temperature 0 is greedy and reports the unscaled distribution.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final, Literal

import torch
from torch import Tensor

SHAPE_ROWS: Final = 16
"""Size of a batch of seeded rows; fixed, because floating-point results depend on the shape."""
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    """Texts that end a reply."""


@dataclass
class Row:
    """A reply that is being generated: `generate` fills in `tokens`, `logprobs`, `top` and `finish_reason`."""

    prompt: list[int]
    sampling: Sampling
    random: random.Random
    """Its own random source, so that a seeded reply does not depend on the other rows of the batch."""
    seeded: bool = False
    """Whether the reply must be bit-identical for the same seed and weights."""
    want_top: int = 0
    """Number of most likely tokens to report at each position."""
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    top: list[list[tuple[int, float]]] = field(default_factory=list[list[tuple[int, float]]])
    """For each position (token id, log-prob), most likely first."""
    finish_reason: FinishReason | None = None


def by_prompt_length(rows: Sequence[Row], limit: int) -> Iterator[list[Row]]:
    """Yield batches of rows with prompts of equal length, at most `limit` rows each (at most SHAPE_ROWS seeded ones)."""

    def kind(row: Row) -> tuple[bool, int]:
        return row.seeded, len(row.prompt)

    for (seeded, _), same in groupby(sorted(rows, key=kind), key=kind):
        batch, most = list(same), min(limit, SHAPE_ROWS) if seeded else limit
        yield from (batch[start : start + most] for start in range(0, len(batch), most))


def stop_place(text: str, stop: Sequence[str]) -> int | None:
    """Return the place in `text` of the first stop string; None if it has none."""
    return min((place for each in stop if (place := text.find(each)) >= 0), default=None)


@torch.inference_mode()
def generate(
    model: Any,
    rows: Sequence[Row],
    stop_ids: frozenset[int],
    on_tokens: Callable[[list[Row]], None] | None = None,
    decode: Callable[[list[int]], str] | None = None,
) -> None:
    """Generate the replies of rows with prompts of equal length.

    Args:
        model: a transformers causal language model.
        rows: at least one; either all seeded or none.
        stop_ids: tokens that end a reply; included in `tokens`, because the model sampled them.
        on_tokens: called after each step with the rows that got a token (streaming).
        decode: turns token ids into the text in which stop strings are found; the token that completes one is included in `tokens`.
    """
    active, fixed = list(rows), rows[0].seeded
    fillers = [Row(rows[0].prompt, Sampling(1, 0.0), random.Random(0)) for _ in range(SHAPE_ROWS - len(rows))] if fixed else []
    inputs, cache = torch.tensor([row.prompt for row in [*rows, *fillers]], device=model.device), None
    caches = True  # a model that has no cache reads the whole row for each token
    while any(row.finish_reason is None for row in rows):
        given: dict[str, Any] = {"past_key_values": cache, "use_cache": True} if caches else {"use_cache": False}
        output = model(input_ids=inputs, logits_to_keep=1, **given)
        cache = getattr(output, "past_key_values", None)
        caches = cache is not None
        drawn, logprobs, distribution = _draw(output.logits[:, -1].float(), [*active, *fillers])
        got = _append(active, drawn.tolist(), logprobs.tolist(), distribution)
        for row in got:
            row.finish_reason = _finish_reason(row, stop_ids, decode)
        if on_tokens is not None:
            on_tokens(got)
        keep = [place for place, row in enumerate(active) if fixed or row.finish_reason is None]
        if len(keep) < len(active) and keep:
            if cache is not None:
                cache.batch_select_indices(torch.tensor(keep, device=model.device))
            drawn, inputs = drawn[keep], inputs[keep]
        active = [active[place] for place in keep]
        inputs = drawn[:, None] if caches else torch.cat([inputs, drawn[:, None]], dim=1)


def _append(rows: Sequence[Row], tokens: list[int], logprobs: list[float], distribution: Tensor) -> list[Row]:
    """Append a token to each unfinished row and return these rows."""
    got: list[Row] = []
    for place, row in enumerate(rows):
        if row.finish_reason is not None:
            continue
        got.append(row)
        row.tokens.append(tokens[place])
        row.logprobs.append(logprobs[place])
        if row.want_top:
            best = distribution[place].topk(min(row.want_top, distribution.shape[1]))
            row.top.append(list(zip(best.indices.tolist(), best.values.tolist(), strict=True)))
    return got


def _finish_reason(row: Row, stop_ids: frozenset[int], decode: Callable[[list[int]], str] | None) -> FinishReason | None:
    stop = row.sampling.stop
    if row.tokens[-1] in stop_ids or (stop and decode is not None and stop_place(decode(row.tokens), stop) is not None):
        return "stop"
    return "length" if len(row.tokens) >= row.sampling.max_tokens else None


def _draw(logits: Tensor, rows: Sequence[Row]) -> tuple[Tensor, Tensor, Tensor]:
    """Sample from `logits` [n, vocabulary]: (token ids [n], their log-probs [n], all log-probs [n, vocabulary])."""
    temperature = torch.tensor([row.sampling.temperature for row in rows], device=logits.device)
    greedy = temperature == 0
    logprobs = torch.log_softmax(logits / torch.where(greedy, 1.0, temperature)[:, None], dim=-1)
    top_p = torch.tensor([row.sampling.top_p for row in rows], device=logits.device)
    if bool((top_p < 1).any()):
        logprobs = torch.where((greedy | (top_p >= 1))[:, None], logprobs, _nucleus(logprobs, top_p))
    drawn = logprobs.argmax(dim=-1)
    if not bool(greedy.all()):
        cumulative = logprobs.double().exp().cumsum(dim=-1)
        uniform = torch.tensor([[row.random.random()] for row in rows], dtype=torch.float64, device=logits.device) * cumulative[:, -1:]
        chosen = torch.searchsorted(cumulative, uniform, right=True)[:, 0].clamp(max=logits.shape[1] - 1)
        drawn = torch.where(greedy, drawn, chosen)
    return drawn, logprobs.gather(1, drawn[:, None])[:, 0], logprobs


def _nucleus(logprobs: Tensor, top_p: Tensor) -> Tensor:
    """Restrict each row to its smallest set of most likely tokens with at least `top_p` of the mass, renormalised; -inf elsewhere."""
    ordered, index = logprobs.sort(dim=-1, descending=True)
    before = ordered.exp().cumsum(dim=-1) - ordered.exp()
    ordered = ordered.masked_fill(before >= top_p[:, None], -torch.inf)
    return torch.log_softmax(torch.empty_like(ordered).scatter(1, index, ordered), dim=-1)
