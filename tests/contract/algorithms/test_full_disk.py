"""All that a training writes, on a disk that is full: one error that names the file and the remedy, nothing half, and all well with room.

`python -m tests.contract.algorithms.test_full_disk DISK` is the process that has the small disk to itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from agl_otel.algorithms.checked_files import file_digest
from agl_otel.algorithms.grpo.checkpoint import Checkpoints, State
from agl_otel.algorithms.grpo.lora import with_lora
from agl_otel.algorithms.grpo.options import Updates
from agl_otel.algorithms.grpo.policy import load_policy
from agl_otel.algorithms.grpo.progress import TAKEN
from agl_otel.algorithms.grpo.push import Pushes
from agl_otel.algorithms.model_export import export_model
from agl_otel.algorithms.model_files import keep_small_files
from agl_otel.algorithms.run_folder import RunFolder
from agl_otel.algorithms.sft.algorithm import write_round
from agl_otel.algorithms.sft.train import Row, Spec
from agl_otel.algorithms.sft.train import train as train_round
from agl_otel.errors import AglError
from tests.contract.algorithms.test_bad_input import make_policy
from tests.small_disk import fill, on_small_disk

ROOT: Final = Path(__file__).parents[3]
ROOM_BYTES: Final = (0, 100_000)
"""What is left of the disk: nothing, or a part of what is written."""
NAMES: Final = {
    "checkpoint": "the checkpoint {disk}/run/checkpoints/step-000001 cannot be written",
    "checkpoint of an adapter": "the checkpoint {disk}/lora/checkpoints/step-000001 cannot be written",
    "checkpoint beside pushed weights": "the checkpoint {disk}/run/checkpoints/step-000001 cannot be written",
    "push": "the weights in {disk}/run/weights/2 cannot be written",
    "push of an adapter": "the weights in {disk}/lora/weights/2 cannot be written",
    "the model's files": "{disk}/other/policy cannot be written",
    "metrics": "{disk}/run/metrics.jsonl cannot be written",
    "taken": "{disk}/run/taken.jsonl cannot be written",
    "a round's rows": "the rows in {disk}/run/rounds/1 cannot be written",
    "a round's weights": "the weights in {disk}/sft/weights/1 cannot be written",
    "export": "{disk}/out cannot be written",
}
"""{what is written: how its error begins}."""


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_full_disk_is_named_with_what_could_not_be_written_and_leaves_nothing_half(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    command = [*on_small_disk(disk, "48m"), sys.executable, "-m", "tests.contract.algorithms.test_full_disk", str(disk)]
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found, of_round = json.loads(ended.stdout.splitlines()[-1])
    assert found.keys() == NAMES.keys()
    assert of_round[0] == of_round[1], "a round that is trained again after a full disk has the weights of one that had room"
    beside_weights = found["checkpoint beside pushed weights"][0]["said"]
    assert beside_weights is not None and beside_weights.startswith("trainer.pt of the checkpoint ")
    for what, tries in found.items():
        for tried in tries:
            said = tried["said"] and tried["said"].removeprefix("trainer.pt of ")
            assert said is None or said.startswith(NAMES[what].format(disk=disk)), (what, tried)
            assert tried["said"] is None or ("disk is full (" in tried["said"] and "free space" in tried["said"]), (what, tried)
            assert tried["left"] == [], (what, tried)
        assert tries[0]["said"] is not None, what


def written(disk: Path) -> dict[str, Callable[[], object]]:
    """Return {what: function that writes it to `disk`}; what they need is written before."""
    folder = make_policy(disk / "model", seed=1)
    model, lora = load_policy(folder).model, with_lora(load_policy(folder).model, 8)
    run = RunFolder(disk / "run", algorithm="grpo", options={}, seed=0)
    kept = Checkpoints(run.folder, keep=9)
    keep_small_files(folder, run.folder)
    kept.save(state := State(run.run_id, 2, run.run_id, 2, {}, 0), model, _optimizer(model))
    rows = [Row(input_ids=[9] * 50, labels=[9] * 50) for _ in range(2000)]
    spec = round_of(folder, disk / "sft")
    write_round(disk / "round", spec, rows[:1])
    (disk / "other").mkdir()
    first = State(run.run_id, 1, run.run_id, 1, {}, 0)
    trained = _optimizer(model)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    trained.step()  # whose state is larger than the room
    beside = kept.of_step(2)
    return {
        "checkpoint": lambda: kept.save(first, model, _optimizer(model)),
        "checkpoint of an adapter": lambda: Checkpoints(disk / "lora", keep=9).save(first, lora, _optimizer(lora)),
        "checkpoint beside pushed weights": lambda: kept.save(first, model, trained, pushed=beside),
        "push": lambda: Pushes(disk / "run" / "weights", Updates(), 0).write(model, state.version),
        "push of an adapter": lambda: Pushes(disk / "lora" / "weights", Updates(lora_rank=8), 8).write(lora, state.version),
        "the model's files": lambda: keep_small_files(folder, disk / "other"),
        "metrics": lambda: run.metric({"step": 1, "text": "t" * 200_000}),
        "taken": lambda: run.append(TAKEN, {"step": 1, "takes": [{"group": "g" * 200_000}]}),
        "a round's rows": lambda: write_round(disk / "run" / "rounds" / "1", spec, rows),
        "a round's weights": lambda: train_round(disk / "round"),
        "export": lambda: export_model(disk / "run", disk / "out", step=2),
    }


def round_of(policy: Path, run: Path) -> Spec:
    """Return what trains the first round of a run."""
    options: dict[str, Any] = {"learning_rate": 1e-3, "epochs": 1, "batch_rows": 9, "max_grad_norm": 1.0, "seed": 0, "device": "cpu"}
    return Spec(model_dir=str(policy), weights=str(policy), out=str(run / "weights" / "1"), threads=1, **options)


def weights_with_room(disk: Path) -> list[str]:
    """Train the round that failed on a full disk elsewhere; return the digests of both rounds' weights."""
    write_round(disk / "another round", round_of(disk / "model", disk / "another"), [Row(input_ids=[9] * 50, labels=[9] * 50)])
    train_round(disk / "another round")
    return [file_digest(disk / run / "weights" / "1" / "model.safetensors") for run in ("sft", "another")]


def _optimizer(model: Any) -> Any:
    import torch

    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])


def main(disk: Path) -> None:
    """Write each thing without room and with some, and then with enough; print what was said and what is left, as JSON."""
    found: dict[str, list[dict[str, Any]]] = {}
    for what, write in written(disk).items():
        for room in ROOM_BYTES:
            before = {path for path in disk.rglob("*") if path.is_file()}
            ballast = fill(os.getpid(), disk, leave=room)
            said = None
            try:
                write()
            except AglError as error:
                said = str(error)
            except OSError as error:
                said = repr(error)
            ballast.unlink()
            left = sorted(str(path) for path in {*disk.rglob("*")} - before if path.is_file() and path.suffix != ".jsonl")
            found.setdefault(what, []).append({"said": said, "left": left if said else []})
        write()
    print(json.dumps([found, weights_with_room(disk)]))  # for the test


if __name__ == "__main__":
    main(Path(sys.argv[1]))
