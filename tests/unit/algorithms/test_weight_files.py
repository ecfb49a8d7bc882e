"""Files of weights: what `save_weights` writes, and how a server knows that it has read them already."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the [train] extra")

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from agl_otel.algorithms.grpo import sampler
from agl_otel.algorithms.grpo.model_port import Origin
from agl_otel.algorithms.grpo.options import Updates
from agl_otel.algorithms.grpo.policy import Policy, load_policy, save_weights
from agl_otel.algorithms.grpo.push import Pushes
from agl_otel.algorithms.grpo.sampler import Engine
from agl_otel.algorithms.model_files import WEIGHTS_FILE, replacing_files
from agl_otel.errors import DiskFullError, UsageError

TINY = Path(__file__).parents[2] / "tiny_policy"


class Mixed(torch.nn.Module):
    """Parameters and buffers of many types, one of them of an odd length."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = torch.nn.Parameter(torch.randn(3).to(torch.bfloat16))
        self.wide = torch.nn.Parameter(torch.randn(5, 2).T)
        self.register_buffer("flag", torch.tensor([True, False, True]))
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("empty", torch.empty(0, 4))


def test_a_written_file_is_read_by_the_library_as_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agl_otel.algorithms.grpo.policy._once", lambda weights, model: weights)  # it asks a model of transformers
    model: Any = Mixed()
    folder = save_weights(model, tmp_path / "ours")
    plain = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(plain, tmp_path / "theirs", metadata={"format": "pt"})
    ours, theirs = load_file(folder / WEIGHTS_FILE), load_file(tmp_path / "theirs")
    assert ours.keys() == theirs.keys() == plain.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name
    with safe_open(folder / WEIGHTS_FILE, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    save_weights(model, tmp_path / "low", dtype=torch.bfloat16)
    low = load_file(tmp_path / "low" / WEIGHTS_FILE)
    assert all(low[name].dtype == (torch.bfloat16 if tensor.is_floating_point() else tensor.dtype) for name, tensor in plain.items())
    assert sorted(path.name for path in folder.iterdir()) == [WEIGHTS_FILE], "nothing is left beside it"


def test_files_are_replaced_all_or_none_and_weights_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    (folder / ".new").mkdir(parents=True)
    (folder / ".new" / "half").write_text("of a process that was killed")
    (folder / WEIGHTS_FILE).write_text("old")
    with pytest.raises(ZeroDivisionError), replacing_files(folder) as new:
        (new / WEIGHTS_FILE).write_text("half")
        raise ZeroDivisionError
    assert {path.name: path.read_text() for path in folder.iterdir()} == {WEIGHTS_FILE: "old"}

    replaced: list[str] = []
    real = Path.replace

    def replace(path: Path, target: Path) -> Path:
        replaced.append(path.name)
        return real(path, target)

    monkeypatch.setattr(Path, "replace", replace)
    with replacing_files(folder) as new:
        for name in (WEIGHTS_FILE, "z.json"):
            (new / name).write_text("new")
    assert replaced == ["z.json", WEIGHTS_FILE], "whoever finds new weights finds what describes them"
    assert {path.name: path.read_text() for path in folder.iterdir()} == {WEIGHTS_FILE: "new", "z.json": "new"}


def test_an_origin_holds_only_while_its_files_are_the_same(tmp_path: Path) -> None:
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(folder)
    assert Origin(folder).path is None, "there are no weights"
    (folder / WEIGHTS_FILE).write_bytes(b"1")
    origin = Origin(link)
    assert origin.path == str(folder) and origin.is_still(folder) and not origin.is_still(tmp_path)
    (folder / "more.safetensors").write_bytes(b"2")
    assert origin.path is None and not origin.is_still(folder)


async def test_weights_that_the_engine_has_read_are_not_read_again(policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (save_weights(policy.model, tmp_path / name) for name in ("one", "two"))
    read: list[Path] = []
    monkeypatch.setattr(sampler, "load_weights", lambda model, folder: read.append(folder))
    async with Engine(policy, origin=Origin(one)) as engine:
        await engine.set_weights(one, "1")
        assert (engine.version, read) == ("1", [])
        for folder in (two, two, one):
            await engine.set_weights(folder, "2")
        assert read == [two, one]
        await engine.take_weights(policy.model.state_dict(), "3")
        await engine.set_weights(one, "4")
        assert read == [two, one, one], "weights from memory are of no folder"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda weights: weights.pop("lm_head.weight"),
            "lack 1 of the model's tensors, first lm_head.weight, which would be drawn at random",
        ),
        (
            lambda weights: weights["model.norm.weight"].fill_(torch.nan),
            "are damaged: model.norm.weight is not finite; copy the model again",
        ),
    ],
    ids=["missing", "nan"],
)
def test_a_model_that_is_not_whole_is_not_loaded(tmp_path: Path, change: Any, words: str) -> None:
    shutil.copytree(TINY, tmp_path / "model")
    weights = load_file(TINY / WEIGHTS_FILE)
    change(weights)
    save_file(weights, tmp_path / "model" / WEIGHTS_FILE, metadata={"format": "pt"})
    with pytest.raises(UsageError, match=words):
        load_policy(tmp_path / "model")


def test_weights_that_find_a_full_disk_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_policy(TINY).model
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("agl_otel.algorithms.grpo.policy._write", lambda tensors, file: (_ for _ in ()).throw(full))
    with pytest.raises(DiskFullError, match=f"the weights in {tmp_path}"):
        save_weights(model, tmp_path)


@pytest.mark.parametrize(("of_run_alone", "kept"), [(True, {"3", "4", "notes"}), (False, {"1", "3", "4", "5", "6", "notes"})])
def test_a_push_leaves_the_two_newest_versions_in_the_runs_own_folder(tmp_path: Path, of_run_alone: bool, kept: set[str]) -> None:
    """A killed process may have pushed 5 and 6 after the checkpoint that the run goes on from; elsewhere they may be another run's."""
    for name in ("1", "2", "3", "4", "5", "6", "notes"):
        (tmp_path / name).mkdir()
    Pushes(tmp_path, Updates(), 0, of_run_alone=of_run_alone).forget(4)
    assert {path.name for path in tmp_path.iterdir()} == kept
