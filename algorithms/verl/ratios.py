"""Compare the log-probs that verl computes before an update with those captured during sampling. Pure; does not import verl."""

from __future__ import annotations

from torch import Tensor

from agl_otel.algorithms.grpo.learner import SampledOtherwiseError
from agl_otel.algorithms.grpo.objective import max_ratio_error, ratio_errors, worst_ratio_error
from agl_otel.errors import DataError


def compared(ours: Tensor, captured: Tensor, written: Tensor, current: Tensor, *, limit: float | None) -> tuple[float, float]:
    """Return objective.max_ratio_error of the written tokens, and worst_ratio_error of those in rows of the current weights.

    Args:
        ours: float [rows, tokens], verl's log-probs before the update.
        captured: float [rows, tokens], those of sampling.
        written: bool [rows, tokens], the model-written tokens.
        current: bool [rows], whether the current weights sampled the row; of others a ratio other than 1 is no error.
        limit: VERL's ratio_error_limit.

    Raises DataError where `limit` is exceeded, or where a log-prob of verl's is not a number.
    """
    checked = written & current[:, None]
    errors = ratio_errors(ours[checked], captured[checked])
    worst = worst_ratio_error(errors)
    if limit is not None and not worst <= limit:
        raise DataError(str(SampledOtherwiseError(worst, limit, len(errors))))
    return max_ratio_error(ours[written], captured[written]), worst
