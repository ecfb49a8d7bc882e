"""Flipped bits in a run's folder are detected when the run is resumed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agl_otel.algorithms.checked_files import DIGESTS, changed_files, write_digests
from agl_otel.algorithms.run_folder import METRICS, RUN, RunFolder
from agl_otel.algorithms.verl.checkpoints import CHECKPOINT, last_step, note_checkpoint
from agl_otel.errors import DataError, UsageError

ROWS = [{"step": step, "reward_mean": step / 8, "rollout_ids": ["ro-é-1"], "nan": float("nan"), "kl": None} for step in (1, 2, 3)]
OPTIONS = {"learning_rate": 0.001, "nested": {"tasks": "0123"}}


def make(folder: Path) -> Path:
    run = RunFolder(folder, algorithm="grpo", options=OPTIONS, seed=7)
    for row in ROWS:
        run.metric(row)
    run.close()
    return folder


def load_run(folder: Path) -> object:
    run = RunFolder(folder, algorithm="grpo", options=OPTIONS)
    try:
        return repr((run.run_id, run.seed, run.metrics(len(ROWS))))
    finally:
        run.close()


def flips(content: bytes) -> Iterator[bytes]:
    """Yield the content with one bit flipped, for every bit."""
    for place in range(len(content)):
        for bit in range(8):
            yield content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]


@pytest.mark.parametrize("name", [RUN, METRICS])
def test_flipped_bits_do_not_change_a_resumed_run(tmp_path: Path, name: str) -> None:
    path, whole = make(tmp_path) / name, load_run(tmp_path)
    content, refused = path.read_bytes(), 0
    for damaged in flips(content):
        path.write_bytes(damaged)
        try:
            assert load_run(tmp_path) == whole, damaged
        except DataError:
            refused += 1
            assert path.read_bytes() == damaged, "the damaged file is left unchanged"
            for aside in tmp_path.glob("*.damaged"):
                assert aside.read_bytes() == damaged
                aside.unlink()
    assert refused > 8 * len(content) * 0.9  # others change white space, or the way a character is written


def test_a_damaged_line_is_named_and_copied_once(tmp_path: Path) -> None:
    path = make(tmp_path) / METRICS
    damaged = path.read_bytes().replace(b'"reward_mean": 0.25', b'"reward_mean": 0.35')
    path.write_bytes(damaged)
    for _ in range(2):
        with pytest.raises(DataError, match=r"metrics\.jsonl, line 2, is damaged .*: restore the file.* copy of it is metrics\.jsonl\.d"):
            load_run(tmp_path)
    assert [copy.read_bytes() for copy in tmp_path.glob("*.damaged*")] == [damaged]
    run = RunFolder(tmp_path, algorithm="grpo", options=OPTIONS)
    assert repr(run.metrics(1)) == repr(ROWS[:1]), "lines of repeated steps are not read"
    run.close()


def test_a_line_needs_a_checksum_unless_an_earlier_release_began_the_run(tmp_path: Path) -> None:
    path = make(tmp_path) / METRICS
    path.write_text('{"step": 1}\n' + path.read_text().split("\n", 1)[1])
    with pytest.raises(DataError, match=r"line 1, is damaged \(it has no checksum\)"):
        load_run(tmp_path)
    begun = json.loads((tmp_path / RUN).read_text())
    (tmp_path / RUN).write_text(json.dumps({name: begun[name] for name in begun if name != "checksum"}))
    assert "{'step': 1}" in str(load_run(tmp_path))


def test_checksums_ignore_whitespace(tmp_path: Path) -> None:
    path, whole = make(tmp_path) / METRICS, load_run(tmp_path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line, separators=(",", ":"), sort_keys=True) + "\n" for line in lines))
    (tmp_path / RUN).write_text(json.dumps(json.loads((tmp_path / RUN).read_text())))
    assert len(str(load_run(tmp_path))) == len(str(whole))


def test_a_row_with_a_field_named_checksum_is_refused(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, algorithm="mine", options={})
    with pytest.raises(UsageError, match="'checksum' is reserved"):
        run.metric({"checksum": 1})
    run.close()


def test_digests_identify_a_changed_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(99))
    assert changed_files(tmp_path) == []
    write_digests(tmp_path, ["model.safetensors"])
    assert changed_files(tmp_path) == []
    for content in flips((tmp_path / DIGESTS).read_bytes()[:20]):
        whole = (tmp_path / DIGESTS).read_bytes()
        (tmp_path / DIGESTS).write_bytes(content + whole[20:])
        assert changed_files(tmp_path) in ([], [DIGESTS])
        (tmp_path / DIGESTS).write_bytes(whole)
    (tmp_path / "model.safetensors").write_bytes(bytes(98) + b"\x01")
    assert changed_files(tmp_path) == ["model.safetensors"]


def verl_checkpoint(place: Path, step: int) -> Path:
    folder = place / "checkpoints" / f"global_step_{step}"
    (folder / "actor").mkdir(parents=True)
    (folder / "actor" / "model_world_size_1_rank_0.pt").write_bytes(bytes(99))
    (folder / "data.pt").write_bytes(b"data")
    (place / CHECKPOINT).write_text(str(step))
    note_checkpoint(place)
    return folder


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda place: (place / CHECKPOINT).write_text("2"), r"iteration.txt is damaged \(it names step 2; .* noted is that of step 3"),
        (lambda place: (place / CHECKPOINT).write_text("7"), "it names step 7"),
        (lambda place: (place / CHECKPOINT).write_text("s"), "iteration.txt is damaged"),
        (lambda place: (place / "checkpoints/global_step_3/data.pt").write_bytes(b"eata"), r"global_step_3 is damaged \(data\.pt has"),
        (lambda place: next(place.glob("checkpoints/global_step_3/actor/*.pt")).write_bytes(bytes(98) + b"\x01"), "actor/model_world_size"),
    ],
)  # fmt: skip
def test_verl_does_not_resume_from_a_changed_checkpoint(tmp_path: Path, damage: Callable[[Path], object], says: str) -> None:
    assert last_step(tmp_path) == 0
    for step in (2, 3):
        verl_checkpoint(tmp_path, step)
        assert last_step(tmp_path) == step
    damage(tmp_path)
    with pytest.raises(DataError, match=says):
        last_step(tmp_path)
    note_checkpoint(tmp_path)  # verl may be writing its file: the run does not end of it
