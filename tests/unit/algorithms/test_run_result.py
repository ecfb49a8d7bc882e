"""What the end of a run names as its result."""

from __future__ import annotations

from pathlib import Path

import pytest

from agl_otel.algorithms.run_folder import RunFolder
from agl_otel.algorithms.run_result import result_of
from agl_otel.algorithms.validation import Validation, note_validation


@pytest.mark.parametrize(
    ("score", "said"),
    [(0.5, []), (0.25, ["the training has not raised the score: 0.250 with its best weights, 0.375 with those that it began with"])],
)
def test_best_weights_that_score_no_higher_than_the_first_are_named_so(score: float, said: list[str], tmp_path: Path) -> None:
    RunFolder(tmp_path, algorithm="grpo", options={}).close()
    (tmp_path / "weights" / "3").mkdir(parents=True)
    note_validation(tmp_path, Validation(0, "val-0", 0.375, 8, 0, None))
    note_validation(tmp_path, Validation(3, "val-3", score, 8, 0, "weights/3"))
    *before, named, _ = result_of(tmp_path).lines()
    assert (before, named) == (said, f"best weights, after step 3: {tmp_path / 'weights' / '3'}")
