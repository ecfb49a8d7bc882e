from __future__ import annotations

import copy
import json
import random
import shutil
import sys
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import count, islice
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from agl_otel.algorithms.base_model import find_base, name_of_base
from agl_otel.algorithms.checked_files import with_checksum
from agl_otel.algorithms.grpo import tiny
from agl_otel.algorithms.grpo.checkpoint import Checkpoints, State
from agl_otel.algorithms.grpo.groups import TaskOrder
from agl_otel.algorithms.grpo.learner import Learner
from agl_otel.algorithms.grpo.lora import with_lora
from agl_otel.algorithms.grpo.options import Objective
from agl_otel.algorithms.grpo.policy import WEIGHTS_FILE, Policy, save_weights
from agl_otel.algorithms.model_files import model_fingerprint
from agl_otel.algorithms.run_folder import METRICS, RUN, RunFolder
from agl_otel.algorithms.run_result import kept_weights
from agl_otel.errors import DataError, SettingsError, UsageError
from tests.unit.algorithms.test_learner import ROWS, make_batch

pytestmark = pytest.mark.full

ADVANTAGES = np.array([1.0, -0.5, 2.0, -3.0], np.float32)


def learner(policy: Policy) -> Learner:
    return Learner(copy.deepcopy(policy.model), learning_rate=1e-2, objective=Objective(kl=0.1), updates=2)


def state(step: int, **given: Any) -> State:
    whole: dict[str, Any] = {"run_id": "grpo-1", "resources_id": "r", "version": step + 1, "tasks": {}, "next_group": 3, **given}
    return State(step=step, **whole)


def saved(folder: Path, policy: Policy, *steps: int, keep: int = 2) -> Checkpoints:
    checkpoints, trained = Checkpoints(folder, keep=keep), learner(policy)
    for step in steps:
        checkpoints.save(state(step), trained.model, trained.optimizer)
    return checkpoints


def draws() -> list[Any]:
    return [random.random(), np.random.random(3).tolist(), torch.rand(3).tolist()]


def test_a_loaded_checkpoint_continues_bit_for_bit(policy: Policy, tmp_path: Path) -> None:
    batch, first = make_batch(policy), learner(policy)
    first.update(batch, ADVANTAGES)
    order = TaskOrder(5, random.Random(1))
    list(islice(order, 7))
    checkpoints = Checkpoints(tmp_path, keep=1)
    groups = [{"number": 1, "step": 2, "rollout_ids": ["ro-a", "ro-b"]}]
    checkpoints.save(state(2, tasks=order.state, groups=groups), first.model, first.optimizer)
    drawn, update = draws(), first.update(batch, ADVANTAGES)

    second = learner(policy)
    place = checkpoints.latest()
    assert place is not None
    found = checkpoints.load(place, "grpo-1", second.model, second.optimizer)
    assert (found.step, found.version, found.next_group, found.groups) == (2, 3, 3, groups)
    assert draws() == drawn
    again = TaskOrder(5, random.Random(9))
    again.restore(found.tasks)
    assert list(islice(again, 20)) == list(islice(order, 20))
    assert second.update(batch, ADVANTAGES) == update
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True))
    ours, theirs = first.optimizer.state_dict()["state"], second.optimizer.state_dict()["state"]
    assert all(torch.equal(ours[i][name], theirs[i][name]) for i in ours for name in ours[i])


def test_the_latest_checkpoints_are_kept_and_incomplete_ones_removed(policy: Policy, tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, policy, 9, 10, 11)
    incomplete = checkpoints.folder / ".step-000012"
    incomplete.mkdir()
    (incomplete / "model.safetensors").write_bytes(b"half")
    checkpoints.remove_incomplete()
    latest = checkpoints.latest()
    assert latest is not None and latest.name == "step-000011"
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["step-000010", "step-000011"]
    assert Checkpoints(tmp_path / "new", keep=1).latest() is None
    (late,) = saved(tmp_path / "long", policy, 999_999, 1_000_000, keep=1).folder.iterdir()
    assert late.name == "step-1000000", "max_steps may be ten million"


def test_a_checkpoint_is_of_its_step_though_training_goes_on_while_it_is_written(policy: Policy, tmp_path: Path) -> None:
    first, batch = learner(policy), make_batch(policy)
    first.update(batch, ADVANTAGES)
    with ThreadPoolExecutor(1) as writer:
        free = Event()
        writer.submit(free.wait)
        checkpoints = Checkpoints(tmp_path, keep=1, writer=writer)
        place = checkpoints.save(state(1), first.model, first.optimizer)
        update = first.update(batch, ADVANTAGES)
        assert checkpoints.latest() is None, "it is being written"
        free.set()
        checkpoints.wait()
    second = learner(policy)
    checkpoints.load(place, "grpo-1", second.model, second.optimizer)
    assert second.update(batch, ADVANTAGES) == update


class Copies(TorchDispatchMode):
    """Records the bytes of each floating-point tensor that is made as a copy of another."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default) and result.is_floating_point():
            self.sizes.append(result.nbytes)
        return result


def test_a_checkpoint_copies_each_weight_once(policy: Policy, tmp_path: Path) -> None:
    trained = learner(policy)
    wide = trained.model.model.layers[0].mlp.up_proj.weight
    with torch.no_grad():
        wide.set_(wide.T.contiguous().T)  # column by column: the file has it row by row
    with Copies() as copies:
        place = Checkpoints(tmp_path, keep=1).save(state(1), trained.model, trained.optimizer)
    held = load_file(place / WEIGHTS_FILE)
    assert sorted(copies.sizes) == sorted(tensor.nbytes for tensor in held.values())
    assert all(torch.equal(held[name], tensor) for name, tensor in trained.model.state_dict().items() if name in held)


def test_a_checkpoint_that_cannot_be_written_beside_training_ends_the_run(policy: Policy, tmp_path: Path) -> None:
    trained = learner(policy)
    with ThreadPoolExecutor(1) as writer:
        free = Event()
        writer.submit(free.wait)
        checkpoints = Checkpoints(tmp_path, keep=1, writer=writer)
        checkpoints.save(state(1), trained.model, trained.optimizer)
        checkpoints.raise_failed()
        shutil.rmtree(checkpoints.folder)
        checkpoints.folder.write_text("no folder")
        free.set()
        with pytest.raises(
            SettingsError, match=r"step-000001 cannot be written \(.*\): check the disk's free space .* start the run again"
        ):
            checkpoints.save(state(2), trained.model, trained.optimizer)


class Killed(BaseException):
    """Ends the work at a file operation, as kill -9 does; what follows on the way out changes no file either."""


_left: list[int] = []
"""How many file operations are still allowed, of the block of `killed_after`; empty outside of one."""
_FILES = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.truncate")


def _count_down(event: str, arguments: tuple[Any, ...]) -> None:
    if _left and event in _FILES:
        _left[0] -= 1
        if _left[0] < 0:
            raise Killed


@contextmanager
def killed_after(operations: int) -> Generator[list[int]]:
    """Stop the block at its next file operation but so many. Yields a list whose item is negative if it was stopped."""
    if not _HOOKED:
        sys.addaudithook(_count_down)
        _HOOKED.append(True)
    _left.append(operations)
    said = _left[:]
    try:
        yield said
    except Killed:
        pass
    finally:
        said[0] = _left.pop()


_HOOKED: list[bool] = []


@pytest.mark.parametrize("rank", [None, 2], ids=["all weights", "adapter"])
def test_a_checkpoint_is_whole_or_absent_wherever_the_process_is_killed(policy: Policy, tmp_path: Path, rank: int | None) -> None:
    """At each file operation of the third checkpoint, with which the first is removed."""
    if rank is not None:
        pytest.importorskip("peft", reason="needs the [lora] extra")
    model: Any = copy.deepcopy(policy.model) if rank is None else with_lora(copy.deepcopy(policy.model), rank)
    trained = Learner(model, learning_rate=1e-2)
    given: dict[str, Any] = {"keep": 2, "base": None if rank is None else {"digest": "d", "dtype": "float32", "folder": "m"}}
    with closing(RunFolder(tmp_path / "begun", algorithm="grpo", options={}, seed=1)) as begun:
        run_id = begun.run_id
    for step in (1, 2):
        Checkpoints(tmp_path / "begun", **given).save(state(step, run_id=run_id), trained.model, trained.optimizer)
    seen = set[tuple[int, ...]]()
    for operations in count():
        run = tmp_path / f"run-{operations}"
        shutil.copytree(tmp_path / "begun", run)
        with killed_after(operations) as left:
            Checkpoints(run, **given).save(state(3, run_id=run_id), trained.model, trained.optimizer)
        kept = kept_weights(run)
        checkpoints = Checkpoints(run, **given)
        named = {int(path.name[-6:]): path for path in checkpoints.folder.glob("step-*")}
        assert named == kept and all(checkpoints.state(place, run_id).step == step for step, place in kept.items()), operations
        checkpoints.remove_incomplete()
        assert {*checkpoints.folder.iterdir()} == {*kept.values()}, operations
        latest = checkpoints.latest()
        assert latest is not None
        checkpoints.load(latest, run_id, trained.model, trained.optimizer)
        seen.add(tuple(kept))
        if left[0] >= 0:
            break
    assert seen == {(1, 2), (1, 2, 3), (2, 3)}


def test_weights_that_a_push_has_written_are_linked(policy: Policy, tmp_path: Path) -> None:
    trained = learner(policy)
    pushed = save_weights(trained.model, tmp_path / "weights" / "1")
    checkpoints = Checkpoints(tmp_path, keep=2)
    place = checkpoints.save(state(1), trained.model, trained.optimizer, pushed=pushed)
    assert (place / WEIGHTS_FILE).samefile(pushed / WEIGHTS_FILE)
    written = checkpoints.save(state(2), trained.model, trained.optimizer, pushed=tmp_path / "gone")
    assert (written / WEIGHTS_FILE).read_bytes() == (pushed / WEIGHTS_FILE).read_bytes()
    assert not (written / WEIGHTS_FILE).samefile(pushed / WEIGHTS_FILE)
    shutil.rmtree(pushed)
    checkpoints.load(place, "grpo-1", trained.model, trained.optimizer)


@pytest.mark.parametrize("file", ["model.safetensors", "trainer.pt", "state.json"])
@pytest.mark.parametrize("how", ["cut", "changed", "gone"])
def test_the_error_for_a_damaged_checkpoint_names_the_previous_one(policy: Policy, tmp_path: Path, file: str, how: str) -> None:
    checkpoints = saved(tmp_path, policy, 1, 2)
    place = checkpoints.folder / "step-000002"
    content = (place / file).read_bytes()
    (place / file).write_bytes(content[:-9] if how == "cut" else content[:-9] + b"\x00" * 9)
    if how == "gone":
        (place / file).unlink()
    target = learner(policy)
    with pytest.raises(DataError, match=r"step-000002 is damaged .* remove it to resume from step-000001"):
        checkpoints.load(place, "grpo-1", target.model, target.optimizer)
    assert all(torch.equal(a, b) for a, b in zip(target.model.parameters(), policy.model.parameters(), strict=True))


def test_flipped_bits_in_a_checkpoints_state_are_detected(policy: Policy, tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, policy, 1)
    place = checkpoints.folder / "step-000001"
    content, whole = (place / "state.json").read_bytes(), checkpoints.state(place, "grpo-1")
    refused, places = 0, [*range(400), *range(400, len(content), 97), *range(len(content) - 300, len(content))]
    for where in places:
        (place / "state.json").write_bytes(content[:where] + bytes([content[where] ^ 1]) + content[where + 1 :])
        try:
            assert checkpoints.state(place, "grpo-1") == whole, where
        except DataError as error:
            assert "remove it to start the run again" in str(error)
            refused += 1
    assert refused > len(places) / 3  # the rest is white space, which may become other white space or be refused


def test_a_checkpoint_of_another_run_model_or_release_is_refused(policy: Policy, tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, policy, 1)
    place = checkpoints.folder / "step-000001"
    target = learner(policy)
    with pytest.raises(UsageError, match=r"step-000001 is of run grpo-1, and this is grpo-2"):
        checkpoints.load(place, "grpo-2", target.model, target.optimizer)
    other = torch.nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"step-000001 is of another model: .* or a new folder"):
        checkpoints.load(place, "grpo-1", other, torch.optim.AdamW(other.parameters()))
    content = json.loads((place / "state.json").read_text())
    del content["checksum"]
    (place / "state.json").write_text(json.dumps(with_checksum({**content, "format": 99})))
    with pytest.raises(UsageError, match="has format 99, this release reads 1"):
        checkpoints.load(place, "grpo-1", target.model, target.optimizer)


def test_metrics_after_the_checkpoint_are_truncated(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, algorithm="grpo", options={}, seed=1)
    for step in (1, 2, 3):
        run.metric({"step": step})
    run.close()
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"st')
    again = RunFolder(tmp_path, algorithm="grpo", options={})
    assert (again.run_id, again.seed) == (run.run_id, 1)
    assert again.metrics(2) == [{"step": 1}, {"step": 2}]
    again.metric({"step": 3})
    with pytest.raises(DataError, match=r"has 3 of the 4 steps"):
        again.metrics(4)
    again.close()
    (tmp_path / RUN).write_text('{"run_id"')
    with pytest.raises(DataError, match=r"run\.json is damaged"):
        RunFolder(tmp_path, algorithm="grpo", options={})


def test_a_base_model_is_named_by_its_digest_and_where_it_is(policy: Policy, tmp_path: Path) -> None:
    run, cached = tmp_path / "run", tmp_path / "hub" / "models--owner--name" / "snapshots" / "0a1b"
    for folder in (run / "policy", cached):
        policy.model.config.save_pretrained(folder)
    inside, of_hub = (name_of_base(folder, run, dtype="float32") for folder in (run / "policy", cached))
    digest = model_fingerprint(cached)
    assert inside == {"digest": digest, "dtype": "float32", "folder": "policy"}
    assert of_hub == {"digest": digest, "dtype": "float32", "id": "owner/name", "commit": "0a1b"}
    moved = run.rename(tmp_path / "moved")
    assert find_base(inside, moved) == moved / "policy"
    assert find_base(of_hub, moved, given=str(cached)) == cached


def test_model_fingerprints_differ_between_models(policy: Policy, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "same", "other")]
    for folder, seed in zip(folders, (1, 1, 2), strict=True):
        model = tiny.make_model(policy.tokenizer, seed=seed)
        model.config.save_pretrained(folder)
        save_weights(model, folder)
    one, same, other = map(model_fingerprint, folders)
    assert one == same != other
    with pytest.raises(UsageError, match="holds no model"):
        model_fingerprint(tmp_path)
    assert len(ROWS) == len(ADVANTAGES)
