"""Limits trajectories to what a model can read: refuses or cuts overlong ones (ids, mask and log-probs alike), refuses unknown ids.

Pure. A response was not sampled after a cut prompt, so a trajectory with an overlong prompt is refused and counted. Cutting the end of a
response does not affect the tokens before.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from agl_otel.adapters.ragged import count_per_row, pieces, take
from agl_otel.adapters.trajectories import TrajectoryBatch
from agl_otel.errors import UsageError
from agl_otel.types.columns import Ragged

LENGTH_REFUSALS: Final = {
    "prompt_too_long": "the prompt is longer than max_prompt_tokens",
    "beyond_context": "prompt and response are longer than the model's context",
    "nothing_left": "after max_response_tokens no token of the model's is left",
    "beyond_vocabulary": "a token id that the trained model does not have: another model answered, or its server sends wrong ids",
    "other_weights": "sampled by weights that its run had not given the model server, or had replaced before (GRPO)",
}
"""Reasons for refusing a trajectory; counted once per trajectory."""


def limit_lengths(
    batch: TrajectoryBatch,
    *,
    max_prompt_tokens: int | None = None,
    max_response_tokens: int | None = None,
) -> TrajectoryBatch:
    """Apply limits (None: no limit). In the result `refused` counts the trajectories left out, `cut` those shortened.

    Raises UsageError for a limit below 1.
    """
    for name, limit in (("max_prompt_tokens", max_prompt_tokens), ("max_response_tokens", max_response_tokens)):
        if limit is not None and limit < 1:
            raise UsageError(f"{name} is {limit}: it must be at least 1")
    refused: Counter[str] = Counter(batch.refused)
    too_long = batch.prompt.lengths > max_prompt_tokens if max_prompt_tokens is not None else np.zeros(len(batch), np.bool_)
    keep = ~too_long
    response, mask, logprobs = (clipped(rows, max_response_tokens) for rows in (batch.response, batch.response_mask, batch.logprobs))
    trained: NDArray[np.bool_] = np.add.reduceat(np.append(mask.values, 0), mask.offsets[:-1]) > 0 if len(batch) else keep
    trained &= mask.lengths > 0
    for reason, rows in (("prompt_too_long", ~keep), ("nothing_left", keep & ~trained)):
        if count := int(np.count_nonzero(rows)):
            refused[reason] += count
    keep = keep & trained
    cut = response.lengths != batch.response.lengths
    limited = replace(batch, response=response, response_mask=mask, logprobs=logprobs, refused=refused)
    return replace(pick(limited, np.flatnonzero(keep)), cut=int(np.count_nonzero(cut & keep)))


def readable(batch: TrajectoryBatch, *, vocabulary: int | None = None, context_tokens: int | None = None) -> TrajectoryBatch:
    """Return the trajectories that the model can read; `refused` counts the others as `beyond_vocabulary` or `beyond_context`.

    Args:
        batch: an adapter's result.
        vocabulary: the size of the model's embedding; None: unknown.
        context_tokens: the most tokens that the model reads; None: no limit.
    """
    strange = _beyond(batch.prompt, vocabulary) | _beyond(batch.response, vocabulary)
    total = batch.prompt.lengths + batch.response.lengths
    too_long = total > context_tokens if context_tokens is not None else np.zeros(len(batch), np.bool_)
    if not (strange | too_long).any():
        return batch
    refused = Counter(batch.refused)
    for reason, rows in (("beyond_vocabulary", strange), ("beyond_context", too_long & ~strange)):
        if count := int(np.count_nonzero(rows)):
            refused[reason] += count
    return pick(replace(batch, refused=refused), np.flatnonzero(~(strange | too_long)))


def _beyond(rows: Ragged, vocabulary: int | None) -> NDArray[np.bool_]:
    """Return for each row whether it has an id outside 0 … vocabulary - 1."""
    if vocabulary is None:
        return np.zeros(len(rows), np.bool_)
    ids: Any = rows.values
    return count_per_row((ids < 0) | (ids >= vocabulary), rows.offsets) > 0


def clipped(rows: Ragged, limit: int | None) -> Ragged:
    """Return the first `limit` values of every row."""
    if limit is None or not len(rows) or not bool((rows.lengths > limit).any()):
        return rows
    return pieces(rows, rows.offsets[:-1], np.minimum(rows.lengths, limit))


def pick(batch: TrajectoryBatch, index: NDArray[np.int64]) -> TrajectoryBatch:
    """Return the trajectories at `index`, in that order, with unchanged counts of refusals and breaks."""
    columns: dict[str, Any] = {}
    for name in batch.COLUMNS:
        column: Any = getattr(batch, name)
        if isinstance(column, Ragged):
            columns[name] = take(column, index)
        else:
            columns[name] = column[index] if isinstance(column, np.ndarray) else [column[place] for place in index.tolist()]
    return replace(batch, **columns)
