"""Lines about what a training run is waiting for."""

from __future__ import annotations

from agl_otel.cli.progress_lines import TrainingLines


def test_a_training_without_open_rollouts_is_said_to_update_and_nothing_is_repeated() -> None:
    lines = TrainingLines()
    counts = ((0, 4, 0), (0, 4, 0), (4, 0, 0), (4, 0, 0), (4, 0, 0), (4, 4, 0), (8, 0, 3), (8, 0, 0))
    said = [lines.next(*each) for each in counts]
    updates = "none is open: they are read, and the weights updated"
    assert said == [
        "training: 0 rollouts of all steps have ended, 4 are open",
        None,
        f"training: 4 rollouts of all steps have ended, {updates}",
        None,
        None,
        "training: 4 rollouts of all steps have ended, 4 are open",
        "training: 8 rollouts of all steps have ended, 3 of a validation are open",
        f"training: 8 rollouts of all steps have ended, {updates}",
    ]
