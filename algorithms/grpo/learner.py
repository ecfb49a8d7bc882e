"""Update the weights from one batch of trajectories: the objective applied to a model. No store, no server, no clock.

The rows of a micro-batch do not see each other (logprobs.Scorer), so the log-probs equal those of a forward pass over each row alone.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agl_otel.adapters.ragged import count_per_row, take
from agl_otel.adapters.trajectories import TrajectoryBatch
from agl_otel.algorithms.grpo.logprobs import Scorer
from agl_otel.algorithms.grpo.lora import has_lora
from agl_otel.algorithms.grpo.objective import (
    Objective,
    kl_terms,
    max_ratio_error,
    policy_loss,
    ratio_errors,
    token_weights,
    worst_ratio_error,
)
from agl_otel.algorithms.grpo.optimizers import OptimizerName, make_optimizer
from agl_otel.algorithms.grpo.policy import check_finite
from agl_otel.algorithms.report import not_finite
from agl_otel.errors import DataError
from agl_otel.types.columns import Ragged


@dataclass(frozen=True)
class Update:
    """The results of one step's updates."""

    loss: float
    """Of the last minibatch of the last pass, before its optimizer step."""
    gradient_norm: float
    """Before clipping, of the first optimizer step; 0 where none was made."""
    max_ratio_error: float
    """On the first update: objective.max_ratio_error."""
    tokens: int
    """Model-written tokens trained on."""
    kl: float = 0.0
    """Mean over those tokens of the KL term, in the last pass; 0 without one."""
    worst_ratio_error: float = 0.0
    """On the first update, over the tokens of trajectories that the current weights sampled: objective.worst_ratio_error."""
    made: int = 0
    """Optimizer steps."""
    not_finite: str = ""
    """What was not a finite number, so that further optimizer steps were not made; empty where all was finite."""
    learning_rate: float | None = None
    """Of the optimizer steps; None where none was made."""


NO_UPDATE: Final = Update(0.0, 0.0, 0.0, 0)
"""Of a batch whose objective has no gradient, as where all advantages are 0 and there is no KL term."""


class SampledOtherwiseError(DataError):
    """The log-probs captured during sampling are not the trainer's for the same tokens; training on them would be wrong."""

    def __init__(self, worst: float, limit: float, tokens: int) -> None:
        super().__init__(
            f"the model server's log-probs are not the trainer's: the probability ratio of the worst 1 % of {tokens} tokens is off by "
            f"{worst:.3g} on average (ratio_error_limit = {limit:g}). Nothing was changed. Likely causes, in this order: (1) sampling "
            "differs: top_p, top_k, penalties or logit_bias of the agent or the server, or log-probs that are not those after the "
            "temperature; (2) weights differ: the server runs others than model_dir or the last push, or at a lower precision; "
            "(3) the tokenizer or the chat template differs, so that ids mean other tokens"
        )


@dataclass(frozen=True)
class Rows:
    """Trajectories of a micro-batch: the tokens of distinct rows end to end, and the trained tokens of all, [tokens].

    Rollouts of one group often give the same answer; equal rows go through the model once.
    """

    token_ids: Tensor
    lengths: tuple[int, ...]
    """Of the distinct rows."""
    trained: Tensor
    """bool, of each of `token_ids`: the model wrote it."""
    source: Tensor
    """int64 [tokens]: index among the distinct rows' trained tokens."""
    behaviour_logprobs: Tensor
    sequence: Tensor
    """int64 [tokens]: trajectory in the batch."""
    temperature: Tensor
    """float32, of each trained token of the distinct rows."""

    def logprobs(self, scorer: Scorer) -> Tensor:
        """Compute the log-probs of all trained tokens: float32 [tokens]."""
        return scorer(self.token_ids, self.lengths, self.trained, self.temperature)[self.source]


@dataclass
class _Part:
    """One forward pass of a minibatch, and what all passes over it share."""

    rows: Rows
    advantages: Tensor
    weights: Tensor
    """objective.token_weights of the minibatch."""
    reference: Tensor | None
    """Log-probs under the initial weights of the run; None without a KL term."""
    initial: Tensor | None = None
    """Log-probs before the first optimizer step; None until they are known."""


@dataclass
class Learner:
    """A model, its optimizer (of the AdamW family, without weight decay) and the objective's options."""

    model: Any
    """A transformers causal language model; updated in place."""
    learning_rate: float
    objective: Objective = field(default_factory=Objective)
    max_grad_norm: float = 1.0
    temperature: float = 1.0
    """The temperature at which the tokens were sampled, unless their call had its own."""
    updates: int = 1
    """Passes over one batch (mu in DeepSeekMath's algorithm 1); the clip bounds the change."""
    micro_batch_tokens: int = 16384
    """Maximal tokens of one forward pass, with padding where there is some; gradients are accumulated over a batch. A longer trajectory has
    a pass of its own."""
    minibatches: int = 1
    """Parts into which the batch is split at random, by torch's generator: each pass takes an optimizer step on each (PPO,
    arXiv:1707.06347, algorithm 1)."""
    compute_dtype: torch.dtype = torch.float32
    """torch.bfloat16: mixed precision (logprobs.Scorer)."""
    ratio_error_limit: float | None = None
    """`update` raises SampledOtherwiseError where Update.worst_ratio_error is greater; None: no limit."""
    optimizer_name: OptimizerName = "adamw"

    def __post_init__(self) -> None:
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = make_optimizer(self.optimizer_name, trained, self.learning_rate)
        self._scorer = Scorer(self.model, compute_dtype=self.compute_dtype)
        self._reference = Scorer(self._initial_model(), compute_dtype=self.compute_dtype) if self.objective.kl else None

    def _initial_model(self) -> Any:
        """Return a copy of the current model as reference; with an adapter the base model serves, and no copy is needed."""
        return self.model if has_lora(self.model) else copy.deepcopy(self.model).requires_grad_(False)

    def update(
        self,
        batch: TrajectoryBatch,
        advantages: NDArray[np.float32] | Ragged,
        *,
        temperatures: Ragged | None = None,
        current: NDArray[np.bool_] | None = None,
        learning_rate: float | None = None,
    ) -> Update:
        """Pass `updates` times over the batch, until the loss or the gradient of an optimizer step is not finite.

        A minibatch whose gradient is exactly 0 takes no optimizer step: its advantages are all 0, or its ratios all clipped, and no KL term
        pulls.

        Args:
            batch: what to train on.
            advantages: float32, one for each trajectory, or one for each model-written token of each (token_columns.spread).
            temperatures: float32, one for each model-written token of each trajectory (sampling.token_temperatures); None: all tokens
                were sampled at `temperature`.
            current: which trajectories the current weights sampled; None: all. Of others a ratio other than 1 is no error.
            learning_rate: from now on; None: unchanged.

        Raises:
            SampledOtherwiseError: `ratio_error_limit` is exceeded; no weight has changed.
            DataError: an advantage, or a weight after an update, is not finite. The weights must not be used or saved.
        """
        values: Any = advantages.values if isinstance(advantages, Ragged) else advantages
        if not np.isfinite(values).all():
            raise DataError(f"{int((~np.isfinite(values)).sum())} of {len(values)} advantages are not finite: check the rewards")
        counts = count_per_row(batch.response_mask.values == 1, batch.response_mask.offsets)
        offsets = np.concatenate([[0], np.cumsum(counts)])
        if not isinstance(advantages, Ragged):
            advantages = Ragged(np.repeat(values, counts), offsets)
        if temperatures is None:
            temperatures = Ragged(np.full(offsets[-1], self.temperature, np.float32), offsets)
        for group in self.optimizer.param_groups if learning_rate is not None else ():
            group["lr"] = learning_rate
        minibatches = [self._parts(batch, advantages, temperatures, index) for index in self._split(len(batch))]
        parts = [part for minibatch in minibatches for part in minibatch]
        if len(minibatches) > 1:  # later ones are scored after the weights have changed
            with torch.no_grad():
                for part in parts:
                    part.initial = part.rows.logprobs(self._scorer)
        loss = first_norm = kl = worst = 0.0
        made, wrong = 0, ""
        for _, minibatch in itertools.product(range(self.updates), minibatches):
            loss, drift = self._accumulate(minibatch)
            kl = drift + (kl if minibatch is not minibatches[0] else 0.0)
            worst = worst if made else self._check_ratios(parts, current)
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm).item()
            first_norm = norm if not made else first_norm
            if wrong := not_finite(loss=loss, gradient=norm):
                self.optimizer.zero_grad()
                break
            if norm:  # where no term has a gradient, the optimizer's momentum alone would move the weights
                self.optimizer.step()
                made += 1
        check_finite(self.model)
        tokens = sum(len(part.advantages) for part in parts)
        greatest = max(
            (max_ratio_error(each.initial, each.rows.behaviour_logprobs) for each in parts if each.initial is not None), default=0.0
        )
        rate = self.optimizer.param_groups[0]["lr"] if made else None
        return Update(loss, first_norm, greatest, tokens, kl / max(1, tokens), worst, made, wrong, rate)

    def _split(self, count: int) -> list[NDArray[np.int64]]:
        """Return the row numbers of each minibatch."""
        if self.minibatches == 1:
            return [np.arange(count)]
        return [np.sort(index) for index in np.array_split(torch.randperm(count).numpy(), min(self.minibatches, max(1, count)))]

    def _accumulate(self, minibatch: Sequence[_Part]) -> tuple[float, float]:
        """Compute the gradients of a minibatch; return its loss and the sum of its KL terms."""
        self.optimizer.zero_grad()
        loss = kl = 0.0
        for part in minibatch:
            logprobs = part.rows.logprobs(self._scorer)
            if part.initial is None:
                part.initial = logprobs.detach()
            behaviour = part.rows.behaviour_logprobs
            share = policy_loss(
                logprobs,
                behaviour if self.objective.importance_cap is None else part.initial,
                part.advantages,
                part.weights,
                part.rows.sequence,
                self.objective,
                behaviour_logprobs=behaviour,
                reference_logprobs=part.reference,
            )
            share.backward()  # pyright: ignore[reportUnknownMemberType]  # torch annotates it in part only
            loss += share.item()
            if part.reference is not None:
                kl += float(kl_terms(logprobs.detach(), part.reference).sum())
        return loss, kl

    def _check_ratios(self, parts: Sequence[_Part], current: NDArray[np.bool_] | None) -> float:
        """Return objective.worst_ratio_error of the trajectories that the current weights sampled. Raises SampledOtherwiseError."""
        found: list[Tensor] = []
        for part in parts:
            assert part.initial is not None  # the first pass is done
            errors = ratio_errors(part.initial, part.rows.behaviour_logprobs)
            rows = part.rows.sequence
            found.append(errors if current is None else errors[torch.from_numpy(current).to(rows.device)[rows]])
        errors = torch.cat(found)
        worst = worst_ratio_error(errors)
        if self.ratio_error_limit is not None and not worst <= self.ratio_error_limit:
            raise SampledOtherwiseError(worst, self.ratio_error_limit, len(errors))
        return worst

    def _parts(self, batch: TrajectoryBatch, advantages: Ragged, temperatures: Ragged, index: NDArray[np.int64]) -> list[_Part]:
        """Lay out the rows of one minibatch for its forward passes, and compute what stays the same in all passes."""
        lengths = (batch.prompt.lengths + batch.response.lengths)[index]
        passes = [index[each] for each in self._scorer.passes(lengths, self.micro_batch_tokens)]
        rows = [end_to_end(batch, temperatures, each, self.model.device) for each in passes]
        rollout = np.unique(batch.rollout_id, return_inverse=True)[1]
        sequence = torch.cat([part.sequence for part in rows])
        weights = token_weights(sequence, torch.from_numpy(rollout).to(sequence.device), self.objective)
        own: Any = [torch.from_numpy(take(advantages, each).values).to(sequence.device) for each in passes]
        shares = weights.split([len(part.sequence) for part in rows])
        return [_Part(*each, self._reference_logprobs(each[0])) for each in zip(rows, own, shares, strict=True)]

    def _reference_logprobs(self, part: Rows) -> Tensor | None:
        if self._reference is None:
            return None
        with torch.no_grad(), self.model.disable_adapter() if has_lora(self.model) else nullcontext():
            return part.logprobs(self._reference)

    def drift(self, prompt: Sequence[int], reply: Sequence[int], logprobs: Sequence[float]) -> float:
        """Compute the mean of objective.ratio_errors of one reply and its captured log-probs under the current weights; 0 for no token."""
        token_ids = torch.tensor([*prompt, *reply], device=self.model.device)
        trained = torch.arange(len(token_ids), device=token_ids.device) >= len(prompt)
        with torch.no_grad():
            ours = self._scorer(token_ids, [len(token_ids)], trained, self.temperature)
        errors = ratio_errors(ours, torch.tensor(logprobs, device=ours.device))
        return float(errors.mean()) if len(errors) else 0.0


def end_to_end(batch: TrajectoryBatch, temperatures: Ragged, index: NDArray[np.int64], device: torch.device) -> Rows:
    """Lay out the trajectories at `index`; `temperatures`: of the tokens that the model wrote, a row for each trajectory of the batch."""
    place: dict[tuple[bytes, ...], int] = {}  # of each distinct row: token ids, which are trained, and their temperatures
    distinct: list[tuple[NDArray[Any], ...]] = []
    row: list[int] = []
    for each in index.tolist():
        prompt, written = batch.prompt[each], batch.response_mask[each] == 1
        ids = np.concatenate([prompt, batch.response[each]]).astype(np.int64)
        own = (ids, np.concatenate([np.zeros(len(prompt), np.bool_), written]), temperatures[each].astype(np.float32))
        row.append(place.setdefault(tuple(array.tobytes() for array in own), len(distinct)))
        if row[-1] == len(distinct):
            distinct.append(own)
    token_ids, trained, scale = (np.concatenate(arrays) for arrays in zip(*distinct, strict=True))
    offsets = np.concatenate([[0], np.cumsum([len(of_row) for *_, of_row in distinct])])
    source: Any = take(Ragged(np.arange(offsets[-1]), offsets), np.array(row)).values
    captured: Any = take(batch.logprobs, index).values[take(batch.response_mask, index).values == 1]
    counts = np.diff(offsets)[row]
    arrays = (source, captured, np.repeat(index, counts), scale)
    lengths = tuple(len(ids) for ids, *_ in distinct)
    rest = (torch.from_numpy(array).to(device) for array in arrays)
    return Rows(torch.from_numpy(token_ids).to(device), lengths, torch.from_numpy(trained).to(device), *rest)
