"""Records of runs that are removed with a rollout, and those that are kept."""

from __future__ import annotations

import contextlib
from pathlib import Path

from agl_otel.algorithms.run_folder import RUN, RunFolder
from agl_otel.cli.erase import forget_in_runs


def run_of(data: Path, name: str) -> tuple[Path, str]:
    """Make a run folder with records and figures; return it with the id of a rollout that it made."""
    folder = data / "runs" / name
    with contextlib.closing(RunFolder(folder, algorithm="sft", options={})) as run:
        run.metric({"step": 1})
        made = f"ro-{run.run_id}-s1-t0-r0"
    (folder / "round-1").mkdir()
    for record in ("round-1/rows.jsonl", "journal.frames", "trainer.log", "weights.safetensors", "best.json"):
        (folder / record).write_text("tokens")
    return folder, made


def left(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


FIGURES_AND_WEIGHTS = {RUN, "lock", "metrics.jsonl", "weights.safetensors", "best.json"}
RECORDS = {"round-1/rows.jsonl", "journal.frames", "trainer.log"}


def test_a_run_that_made_a_rollout_keeps_only_figures_and_weights(tmp_path: Path) -> None:
    (folder, made), (other, _) = run_of(tmp_path, "a"), run_of(tmp_path, "b")
    assert forget_in_runs(tmp_path, ["ro-unknown", made]) == [f"{folder} made them: its weights and checkpoints stay"]
    assert left(folder) == FIGURES_AND_WEIGHTS
    assert left(other) == FIGURES_AND_WEIGHTS | RECORDS


def test_records_that_name_a_rollout_are_removed_and_service_logs_reported(tmp_path: Path) -> None:
    folder, _ = run_of(tmp_path, "a")
    (folder / "journal.frames").write_bytes(b"\x00ro-1\xff")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "runner.log").write_text("ro-1 says hello")
    [text] = forget_in_runs(tmp_path, ["ro-1"])
    assert "runner.log names them" in text
    assert left(folder) == FIGURES_AND_WEIGHTS | RECORDS - {"journal.frames"}


def test_a_run_in_use_keeps_its_records(tmp_path: Path) -> None:
    folder, _ = run_of(tmp_path, "a")
    (folder / "journal.frames").write_text("ro-1")
    with contextlib.closing(RunFolder(folder, algorithm="sft", options={})):
        assert forget_in_runs(tmp_path, ["ro-1"]) == [
            f"{folder} names them, and a process works on it: delete them again when it has ended"
        ]
        assert left(folder) == FIGURES_AND_WEIGHTS | RECORDS
    assert forget_in_runs(tmp_path, ["ro-1"]) == []
    assert "journal.frames" not in left(folder)


def test_without_run_folders_there_are_no_messages(tmp_path: Path) -> None:
    assert forget_in_runs(tmp_path / "none", ["ro-1"]) == []
