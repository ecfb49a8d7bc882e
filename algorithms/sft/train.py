"""Train one round in a separate process: `python -m agl_otel.algorithms.sft.train FOLDER`.

Its end frees the memory of optimizer and gradients, so that a model server has the accelerator to itself while agents run. FOLDER holds
`spec.json` (a Spec) and `rows.jsonl` (one Row per line); `trained.json` (a Trained) is written last.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from agl_otel.adapters.records import IGNORED
from agl_otel.algorithms.checked_files import write_digests, write_json
from agl_otel.algorithms.grpo.logprobs import Scorer
from agl_otel.algorithms.grpo.objective import max_ratio_error
from agl_otel.algorithms.grpo.optimizers import OptimizerName, make_optimizer
from agl_otel.algorithms.grpo.policy import WEIGHTS_FILE, check_finite, load_policy, load_weights, save_weights
from agl_otel.algorithms.report import not_finite
from agl_otel.errors import AglError, DataError
from agl_otel.service.framed import sync_file

SPEC: Final = "spec.json"
ROWS: Final = "rows.jsonl"
TRAINED: Final = "trained.json"
NOT_FINITE: Final = 3
"""Training ends with an error after so many batches in a row whose loss or gradient is not finite."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One sample."""

    input_ids: list[int]
    labels: list[int]
    """Of the same length: the token id where there is a loss, IGNORED elsewhere."""
    logprobs: list[float] = field(default_factory=list[float])
    """Captured log-probs of the tokens with a loss; empty where unknown."""
    weights: list[float] = field(default_factory=list[float])
    """Of the losses of these tokens, 0 or more; empty: all are 1."""
    rollout_id: str = ""
    """The rollout that it is of, for readers of the file; the training uses neither this nor `reward`."""
    reward: float | None = None
    """With which it was selected."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The input of one round's training."""

    model_dir: str
    """Model and tokenizer in transformers' format."""
    weights: str
    """Folder with the initial weights."""
    out: str
    """Folder for the new weights."""
    learning_rate: float
    epochs: int
    batch_rows: int
    """Rows of one optimizer step."""
    max_grad_norm: float
    seed: int
    device: str
    threads: int
    temperature: float | None = None
    """The temperature at which the initial weights sampled the rows; None where others sampled them: then no drift is reported."""
    optimizer: OptimizerName = "adamw"


@dataclass(frozen=True)
class Trained:
    """The results of one round's training."""

    loss_before: float
    """Of the first batch, before any step; nats a token."""
    loss: float
    """Mean over the last epoch."""
    tokens: int
    """With a loss, in one epoch."""
    updates: int
    logprob_drift: float | None = None
    """objective.max_ratio_error of the first batch, before any step; None where its log-probs are not known, or others sampled it."""
    not_finite: int = 0
    """Batches whose loss or gradient was not finite; they changed no weight."""


NOT_TRAINED: Final = Trained(0.0, 0.0, 0, 0)
"""The results of a round that selected nothing."""


def logprobs(scorer: Scorer, rows: Sequence[Row], temperature: float = 1.0) -> Tensor:
    """Compute the log-probs of all tokens with a loss, row by row: float32 [tokens]. The first token of a row has no loss."""
    ids = torch.tensor([token for row in rows for token in row.input_ids], device=scorer.device)
    labels = torch.tensor([label for row in rows for label in [IGNORED, *row.labels[1:]]], device=scorer.device)
    return scorer(ids, [len(row.input_ids) for row in rows], labels != IGNORED, temperature)


def weights_of(row: Row) -> list[float]:
    """Return the weight of each token with a loss."""
    return row.weights or [1.0] * sum(label != IGNORED for label in row.labels[1:])


def drift(scorer: Scorer, rows: Sequence[Row], temperature: float) -> float | None:
    """Compute objective.max_ratio_error of these rows under the current weights; None where their log-probs are unknown."""
    captured = torch.tensor([logprob for row in rows for logprob in row.logprobs], device=scorer.device)
    with torch.no_grad():
        ours = logprobs(scorer, rows, temperature)
    return max_ratio_error(ours, captured) if len(captured) and len(captured) == len(ours) else None


def fit(model: Any, rows: Sequence[Row], spec: Spec) -> Trained:
    """Train `model` in place, without weight decay, on the mean over the tokens of each batch, for `epochs` passes over the rows.

    Tokens count by their weights; a batch whose weights are all 0 is passed over. One whose loss or gradient is not finite is left out and
    counted. Raises DataError where no row has a token to learn, NOT_FINITE batches in a row are left out, or a weight is not finite.
    """
    learnt = sum(label != IGNORED for row in rows for label in row.labels[1:])
    total_weight = sum(sum(weights_of(row)) for row in rows)
    if not total_weight:
        raise DataError(f"none of the {len(rows)} rows has a token to learn: labels are all {IGNORED}, or weights all 0")
    optimizer = make_optimizer(spec.optimizer, model.parameters(), spec.learning_rate)
    scorer, source = Scorer(model), random.Random(spec.seed)
    before, total, updates, left_out, in_a_row = 0.0, 0.0, 0, 0, 0
    drifted: float | None = None
    for _ in range(spec.epochs):
        total = 0.0
        for batch in _batches(rows, spec.batch_rows, source):
            optimizer.zero_grad()
            if not updates and spec.temperature is not None:
                drifted = drift(scorer, batch, spec.temperature)
            weights = torch.tensor([weight for row in batch for weight in weights_of(row)], device=scorer.device)
            if not (weight := float(weights.sum())):
                continue
            loss = -(weights * logprobs(scorer, batch)).sum()
            (loss / weight).backward()  # pyright: ignore[reportUnknownMemberType]  # torch annotates it in part only
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), spec.max_grad_norm)
            if wrong := not_finite(loss=loss.item(), gradient=norm.item()):
                left_out, in_a_row = left_out + 1, in_a_row + 1
                if in_a_row == NOT_FINITE:
                    raise DataError(f"{NOT_FINITE} batches in a row were not finite (of the last, {wrong}): lower learning_rate")
                continue
            in_a_row = 0
            optimizer.step()
            before = loss.item() / weight if not updates else before
            total += loss.item()
            updates += 1
    check_finite(model)
    return Trained(before, total / total_weight, learnt, updates, drifted, left_out)


def _batches(rows: Sequence[Row], size: int, source: random.Random) -> Iterator[list[Row]]:
    order = source.sample(range(len(rows)), len(rows))
    for start in range(0, len(order), size):
        yield [rows[place] for place in order[start : start + size]]


def train(folder: Path) -> None:
    """Train as FOLDER/spec.json specifies."""
    disable_progress_bar()
    spec = Spec(**json.loads((folder / SPEC).read_text()))
    rows = [Row(**json.loads(line)) for line in (folder / ROWS).read_text().splitlines()]
    torch.set_num_threads(spec.threads)
    torch.manual_seed(spec.seed)
    model = load_policy(spec.model_dir, device=spec.device).model
    load_weights(model, Path(spec.weights))
    trained = fit(model, rows, spec)
    out = save_weights(model, spec.out)
    sync_file(out / WEIGHTS_FILE)
    write_digests(out, [WEIGHTS_FILE])
    write_json(folder / TRAINED, asdict(trained))


def main() -> int:
    """Train the folder that the command line names; return the exit code."""
    try:
        train(Path(sys.argv[1]))
    except AglError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - the last line of its log
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
