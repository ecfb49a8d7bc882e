"""When a GRPO run writes checkpoints, and that they are those of a run that writes one after each step."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from agl_otel.algorithms.grpo.algorithm import GRPO
from agl_otel.algorithms.grpo.model_port import Origin
from agl_otel.algorithms.grpo.policy import WEIGHTS_FILE
from agl_otel.algorithms.grpo.push import Pushes
from agl_otel.algorithms.grpo.report import StepReport
from agl_otel.algorithms.grpo.sampler import Engine
from agl_otel.algorithms.grpo.serving import Serving
from agl_otel.algorithms.model_files import ADAPTER, ADAPTER_CONFIG, ADAPTER_FILE, model_fingerprint
from agl_otel.algorithms.run_folder import RunFolder
from agl_otel.errors import InUseError, UsageError
from agl_otel.queue.client import AttemptUpdate
from agl_otel.store import LightningStore
from agl_otel.types import AttemptedRollout
from tests.contract.algorithms.test_bad_input import (
    BOTH,
    KINDS,
    Did,
    Kind,
    as_good,
    by_place,
    checkpoints_of,
    make_policy,
    member,
    of_run,
    spans_of,
    steps_of,
    trained,
)

STEPS = 3
LORA: dict[str, Any] = {
    "lora_rank": 2,
    "learning_rate": 1e-3,
}  # greater ones clip all made-up ratios of the second step, which is left out then
needs_peft = pytest.mark.skipif(find_spec("peft") is None, reason="needs the [lora] extra")


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        pytest.param({}, [3], marks=pytest.mark.full),
        ({"checkpoint_every_minutes": 0}, [1, 2, 3]),
        ({"checkpoint_every_steps": 2}, [2, 3]),
    ],
    ids=["by time", "each step", "by steps"],
)
async def test_checkpoints_are_written_by_time_or_by_steps_and_after_the_last(
    store: LightningStore, tmp_path: Path, options: dict[str, Any], steps: list[int]
) -> None:
    folder = make_policy(tmp_path / "policy", seed=1)
    reports = await trained(KINDS[0], store, folder, tmp_path / "run", by_place, max_steps=STEPS, keep_checkpoints=STEPS, **options)
    places = checkpoints_of(tmp_path / "run")
    assert [place.name for place in places] == [f"step-{step:06d}" for step in steps]
    pushed = tmp_path / "run" / "weights" / reports[-1].next_version
    assert (places[-1] / WEIGHTS_FILE).samefile(pushed / WEIGHTS_FILE), "equal bytes are written once"
    assert [line["step"] for line in steps_of(tmp_path / "run")] == [1, 2, 3]


async def test_a_run_with_a_folder_writes_nothing_beside_its_model(store: LightningStore, tmp_path: Path) -> None:
    """Two runs that begin with one model would overwrite each other's weights between their push and their checkpoint."""
    folder = make_policy(tmp_path / "policy", seed=1)
    before = sorted(folder.rglob("*"))
    await trained(KINDS[0], store, folder, tmp_path / "run", by_place, max_steps=1)
    assert sorted(folder.rglob("*")) == before and (tmp_path / "run" / "weights" / "2" / WEIGHTS_FILE).exists()


@pytest.mark.parametrize("kind", BOTH)
async def test_weights_that_a_killed_process_left_are_gone_once_the_run_goes_on(store: LightningStore, tmp_path: Path, kind: Kind) -> None:
    """Also where it ends without a further step: they are of versions that the run has not made, and nothing names them."""
    folder, weights = make_policy(tmp_path / "policy", seed=1), tmp_path / "run" / "weights"
    await trained(kind, store, folder, tmp_path / "run", by_place)
    before = {path.name for path in weights.iterdir()}
    shutil.copytree(weights / max(before), weights / "7")
    await trained(kind, store, folder, tmp_path / "run", by_place)
    assert {path.name for path in weights.iterdir()} == before


async def test_a_checkpoint_has_the_runs_own_weights_beside_those_of_a_run_before(store: LightningStore, tmp_path: Path) -> None:
    """A version that the server was started with is not pushed, so a file under its number is of the run before."""
    other, folder = (make_policy(tmp_path / name, seed=seed) for seed, name in enumerate(("other", "policy"), start=1))

    class Started(Engine):
        def __post_init__(self) -> None:
            super().__post_init__()
            self.origin = Origin(folder)

    for model, engine, decide in ((other, Engine, by_place), (folder, Started, as_good)):
        await trained(KINDS[0], store, model, tmp_path / f"of-{model.name}", decide, engine_of=engine, weights_dir=tmp_path / "weights")
    (place,) = checkpoints_of(tmp_path / "of-policy")
    assert (tmp_path / "weights" / "1" / WEIGHTS_FILE).exists(), "the other's"
    assert (place / WEIGHTS_FILE).read_bytes() == (folder / WEIGHTS_FILE).read_bytes()


@pytest.mark.parametrize("kind", BOTH)
async def test_two_runs_do_not_write_to_one_folder_of_weights(store: LightningStore, tmp_path: Path, kind: Kind) -> None:
    """Neither in a folder that both name, nor, without a folder of their own, beside the model. The first one goes on."""
    folder = make_policy(tmp_path / "policy", seed=1)
    grpo = kind.name == "grpo"
    place = tmp_path / "weights" if grpo else folder / "sft" / "weights"
    given: dict[str, Any] = {"weights_dir": place} if grpo else {}
    refused: list[str] = []

    async def second(step: int, kept: Path) -> None:
        with pytest.raises(InUseError) as error:
            await trained(kind, store, folder, None, as_good, **given)
        refused.append(str(error.value))

    def differing(rollout: AttemptedRollout) -> Did:
        return Did(reward=float((rollout.metadata or {})["sampling_seed"] % 97))

    (report,) = await trained(kind, store, folder, tmp_path / "run" if grpo else None, differing, **given, validator=second)
    assert report.next_version == "2" and (grpo or (place / "1" / WEIGHTS_FILE).exists())
    assert refused == [f"another run writes its weights to {place} (pid {os.getpid()}): wait for its end, or give each run a weights_dir "
                       "or a run_dir of its own"]  # fmt: skip
    await trained(kind, store, folder, None, as_good, **given)


async def test_a_schedule_that_decays_is_resumed_with_its_own_length_only(store: LightningStore, tmp_path: Path) -> None:
    folder = make_policy(tmp_path / "policy", seed=1)
    decay: dict[str, Any] = {"learning_rate_schedule": "linear"}
    await trained(KINDS[0], store, folder, tmp_path / "run", by_place, max_steps=1, **decay)
    with pytest.raises(UsageError, match="begun with another max_steps"):
        await trained(KINDS[0], store, folder, tmp_path / "run", by_place, max_steps=2, **decay)


RATES: dict[str, tuple[dict[str, Any], list[float]]] = {
    "constant": ({}, [1, 1, 1, 1]),
    "constant after a warm-up": ({"warmup_steps": 3}, [1 / 3, 2 / 3, 1, 1]),
    "linear": ({"learning_rate_schedule": "linear"}, [1, 3 / 4, 1 / 2, 1 / 4]),
    "linear after a warm-up": ({"learning_rate_schedule": "linear", "warmup_steps": 2}, [1 / 2, 1, 1, 1 / 2]),
    "cosine": ({"learning_rate_schedule": "cosine"}, [1, (2 + 2**0.5) / 4, 1 / 2, (2 - 2**0.5) / 4]),
    "cosine after a warm-up": ({"learning_rate_schedule": "cosine", "warmup_steps": 1}, [1, 1, 3 / 4, 1 / 4]),
}
"""{schedule: (options, shares of the learning rate in steps 1 to 4 of 4, by hand)}; cos(pi/4) = sqrt(2)/2, cos(pi/3) = 1/2."""


@pytest.mark.parametrize("schedule", [pytest.param(name, marks=() if "cosine after" in name else pytest.mark.full) for name in RATES])
async def test_the_rates_of_steps_are_those_of_the_schedule_also_after_a_resume(
    store: LightningStore, tmp_path: Path, schedule: str
) -> None:
    options, shares = RATES[schedule]
    folder, rate = make_policy(tmp_path / "policy", seed=1), 1e-6  # so small that no step clips all ratios of the next
    given: dict[str, Any] = {"learning_rate": rate, "max_steps": 4, "keep_checkpoints": 9, **options}
    every: tuple[dict[str, Any], ...] = ({"checkpoint_every_steps": 1}, {})
    for often in every:
        await trained(KINDS[0], store, folder, tmp_path / "run", by_place, **given, **often)
        assert [line["learning_rate"] for line in steps_of(tmp_path / "run")] == pytest.approx([rate * share for share in shares])
        for place in checkpoints_of(tmp_path / "run")[2:] if often else ():  # as after a kill, when these were not written yet
            place.rename(tmp_path / place.name)
    assert [place.name for place in checkpoints_of(tmp_path / "run")] == [f"step-{step:06d}" for step in (1, 2, 4)]


@pytest.mark.parametrize("changed", ["chat_template.jinja", "tokenizer.json", "model.safetensors"])
def test_a_models_fingerprint_is_of_all_that_a_run_reads(tmp_path: Path, changed: str) -> None:
    folder = make_policy(tmp_path / "policy", seed=1)
    with (folder / "model.safetensors").open("ab") as file:
        file.truncate(64 << 20)  # so that its end does not tell
    before = model_fingerprint(folder)
    with (folder / changed).open("r+b") as file:
        file.write(b"#other")
    assert model_fingerprint(folder) != before


def test_a_models_fingerprint_is_of_each_tensor_and_its_name(tmp_path: Path) -> None:
    """Most of the small tensors lie between the blocks that are spread over the file."""
    (tmp_path / "config.json").write_text("{}")
    sizes = {"mlp": 1 << 16, "norm": 64}
    tensors = {f"{number}.{kind}": torch.zeros(size, dtype=torch.uint8) for number in range(100) for kind, size in sizes.items()}

    def digest(tensors: dict[str, torch.Tensor]) -> str:
        save_file(tensors, tmp_path / "model.safetensors")
        return model_fingerprint(tmp_path)

    before = digest(tensors)
    norms = [name for name in tensors if name.endswith("norm")]
    assert [name for name in norms if digest({**tensors, name: tensors[name] + 1}) == before] == []
    assert digest({("7.gate" if name == "7.norm" else name): tensor for name, tensor in tensors.items()}) != before
    assert digest(tensors) == before


@pytest.mark.parametrize("header", [b"", b"\x05", b"\xff" * 16, b"\x02" + bytes(7) + b"[]", b"\x08" + bytes(7) + b'{"a": 1}'], ids=repr)
def test_a_models_fingerprint_is_of_files_in_other_formats_too(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name in ("model.safetensors", "pytorch_model.bin"):
        (tmp_path / name).write_bytes(header + b"one")
        before = model_fingerprint(tmp_path)
        (tmp_path / name).write_bytes(header + b"two")
        assert model_fingerprint(tmp_path) != before
        (tmp_path / name).unlink()


@pytest.mark.parametrize(
    ("options", "weights"),
    [({}, WEIGHTS_FILE), pytest.param(LORA, f"{ADAPTER}/{ADAPTER_FILE}", marks=needs_peft)],
    ids=["all weights", "adapter"],
)
async def test_a_run_that_is_resumed_after_an_early_checkpoint_ends_with_the_same_weights(
    store: LightningStore, tmp_path: Path, options: dict[str, Any], weights: str
) -> None:
    folder = make_policy(tmp_path / "policy", seed=1)
    often: dict[str, Any] = {"checkpoint_every_steps": 1, "keep_checkpoints": 9, **options}
    await trained(KINDS[0], store, folder, tmp_path / "run", by_place, max_steps=4, **often)
    *_, last = places = checkpoints_of(tmp_path / "run")
    lines = [{name: line[name] for name in ("step", "loss", "gradient_norm", "rollout_ids")} for line in steps_of(tmp_path / "run")]
    expected = (last / weights).read_bytes()
    for place in places[1:]:  # as after a kill, when these were not written yet
        place.rename(tmp_path / place.name)
    await trained(KINDS[0], store, folder, tmp_path / "run", by_place, max_steps=4, **options)
    assert [place.name for place in checkpoints_of(tmp_path / "run")] == ["step-000001", "step-000004"]
    assert (last / weights).read_bytes() == expected
    assert [{name: line[name] for name in lines[0]} for line in steps_of(tmp_path / "run")] == lines


@needs_peft
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_checkpoint_of_a_lora_run_holds_the_adapter_and_is_served_with_it_merged_in(
    store: LightningStore, tmp_path: Path, dtype: str
) -> None:
    folder = make_policy(tmp_path / "policy", seed=1)
    options: dict[str, Any] = {**LORA, "dtype": dtype}
    reports = await trained(KINDS[0], store, folder, tmp_path / "run", by_place, max_steps=2, **options)
    (place,) = checkpoints_of(tmp_path / "run")
    found = {str(path.relative_to(place)): path.stat().st_size for path in place.rglob("*") if path.is_file()}
    assert found.keys() == {"state.json", "trainer.pt", f"{ADAPTER}/{ADAPTER_CONFIG}", f"{ADAPTER}/{ADAPTER_FILE}"}
    assert sum(found.values()) < (folder / WEIGHTS_FILE).stat().st_size / 4

    grpo = GRPO.from_options(model_dir=folder, model_server_url="", run_dir=tmp_path / "run", **options)
    stored = json.loads((tmp_path / "run" / "run.json").read_text())
    with closing(RunFolder(tmp_path / "run", algorithm="grpo", options=stored["options"])) as run:
        assert grpo.last_weights(run) == (place, 3)
        assert grpo.weights_to_serve(run, adapter_rank=2) == (place / ADAPTER, 3)
        pushed = (run.folder / "weights" / "3" / WEIGHTS_FILE).read_bytes()
        shutil.rmtree(run.folder / "weights" / "3")
        shutil.copytree(place / ADAPTER, run.folder / "weights" / "3")  # as pushed to a server that took it
        merged, version = grpo.weights_to_serve(run, adapter_rank=1)
    assert merged is not None and merged == tmp_path / "run" / "weights" / "3" and str(version) == reports[-1].next_version
    assert [path.name for path in merged.iterdir()] == [WEIGHTS_FILE]
    assert (merged / WEIGHTS_FILE).read_bytes() == pushed, "as they were pushed"


@needs_peft
async def test_a_lora_run_does_not_go_on_with_another_base_model(store: LightningStore, tmp_path: Path) -> None:
    folder, run_dir = make_policy(tmp_path / "policy", seed=1), tmp_path / "run"
    await trained(KINDS[0], store, folder, run_dir, by_place, **LORA)
    (place,) = checkpoints_of(run_dir)
    named = json.loads((place / "state.json").read_text())["base"]
    assert named == {
        "digest": json.loads((run_dir / "run.json").read_text())["options"]["model"], "dtype": "float32", "folder": str(folder)
    }  # fmt: skip
    make_policy(folder, seed=2)
    grpo = GRPO.from_options(model_dir=folder, model_server_url="", run_dir=run_dir, **LORA)
    stored = json.loads((run_dir / "run.json").read_text())
    with closing(RunFolder(run_dir, algorithm="grpo", options=stored["options"])) as run:
        with pytest.raises(UsageError, match=rf"{folder} is another model, of digest \w+, than the one, of digest {named['digest']}, that"):
            grpo.weights_to_serve(run, adapter_rank=0)
        with pytest.raises(UsageError, match=r"step-000001 is of another model: .* Give the run its own model, or a new folder"):
            await trained(KINDS[0], store, folder, run, by_place, **LORA)


class StoppedError(Exception):
    """Stands for a kill after a step's line is written: nothing of the run is tidied."""


def stop_after(steps: int) -> Callable[[StepReport], None]:
    def on_step(report: StepReport) -> None:
        if report.step == steps:
            raise StoppedError

    return on_step


ASYNC: dict[str, Any] = {"groups_in_flight": 6}
TIMED: dict[str, Any] = {"step_timeout_seconds": 2.0}


@pytest.mark.parametrize("options", [ASYNC, TIMED], ids=["groups of another order", "rollouts that were late"])
async def test_a_resumed_run_repeats_its_steps_with_the_rollouts_that_they_took(
    store: LightningStore, tmp_path: Path, options: dict[str, Any]
) -> None:
    """The weights of its versions would be others otherwise, and samples of the next steps be taken for theirs.

    The first rollout ends after the step that enqueued it: that takes other groups, or is done without it. The model server has another
    address afterwards, which is no reason to count the weights anew.
    """
    folder, run_dir = make_policy(tmp_path / "policy", seed=1), tmp_path / "run"
    late: list[AttemptedRollout] = []

    def decide(rollout: AttemptedRollout) -> Did:
        number = int(rollout.rollout_id.split("-")[-2])
        if number == 0 and rollout.rollout_id.endswith("0") and not late:
            late.append(rollout)
            return Did(late=True)
        sampled_by = str((rollout.metadata or {})["step"])
        return Did(reward=float(member(rollout) * (number + 1)), logprobs=(-4.5, -4.25 - number / 8), version=sampled_by)

    given: dict[str, Any] = {"max_steps": 3, **options}
    with pytest.raises(StoppedError):
        await trained(KINDS[0], store, folder, run_dir, decide, on_step=stop_after(2), **given)
    before = steps_of(run_dir)
    if options is ASYNC:  # it ends while the run is stopped
        await store.add_many_spans(spans_of(late[0], Did(reward=9.0)))
        ended = AttemptUpdate(rollout_id=late[0].rollout_id, attempt_id=late[0].attempt.attempt_id, status="succeeded")
        await store.queue.update_attempts([ended])
    with (run_dir / "taken.jsonl").open("a") as file:
        file.write('{"step": 3, "tak')  # and the next step's line was being written
    reports = await trained(KINDS[0], store, folder, run_dir, decide, **given)
    same = ("step", "rollout_ids", "attempts", "loss", "gradient_norm", "weights_version", "next_version", "refused", "reward_mean")
    after = steps_of(run_dir)
    for name in same:
        assert [line[name] for line in after[:2]] == [line[name] for line in before], name
    assert all(report.refused.get("other_weights", 0) == 0 for report in reports)
    taken = [json.loads(line) for line in (run_dir / "taken.jsonl").read_text().splitlines()]
    assert [line["step"] for line in taken] == [1, 2, 3], "each once"
    first = late[0].rollout_id
    assert (first in reports[2].rollout_ids) == (options is ASYNC) and set((await of_run(store, run_dir)).values()) == {1}


@pytest.mark.full
@pytest.mark.long  # a run killed there is in tests/system/test_training_resumes.py
@needs_peft
@pytest.mark.parametrize("owner, name", [(Serving, "push"), (Pushes, "forget")], ids=["before the push", "after the push"])
async def test_a_lora_run_that_is_stopped_about_a_push_ends_the_same_with_its_base_moved(
    store: LightningStore, tmp_path: Path, owner: type[Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither half a file of the push is read, nor an old version left."""
    folder, run_dir = make_policy(tmp_path / "policy", seed=1), tmp_path / "run"
    given: dict[str, Any] = {"max_steps": 3, "checkpoint_every_steps": 1, **LORA}
    await trained(KINDS[0], store, folder, tmp_path / "whole", by_place, **given)

    def stop(self: Any, what: Path | int) -> Any:
        if str(what).endswith("3"):
            raise StoppedError
        return real(self, what)

    real = getattr(owner, name)
    monkeypatch.setattr(owner, name, stop)
    with pytest.raises(StoppedError):
        await trained(KINDS[0], store, folder, run_dir, by_place, **given)
    monkeypatch.undo()
    pushed = run_dir / "weights" / "3"
    os.truncate(pushed / WEIGHTS_FILE, 1000)
    (pushed / ".new").mkdir()
    (pushed / ".new" / WEIGHTS_FILE).write_bytes(b"half")
    folder.rename(moved := tmp_path / "elsewhere")
    await trained(KINDS[0], store, moved, run_dir, by_place, **given)
    for place in checkpoints_of(tmp_path / "whole"):
        weights = Path(ADAPTER) / ADAPTER_FILE
        assert (run_dir / "checkpoints" / place.name / weights).read_bytes() == (place / weights).read_bytes()
    kept = [
        sorted(str(path.relative_to(run / "weights")) for path in (run / "weights").rglob("*")) for run in (run_dir, tmp_path / "whole")
    ]
    assert kept[0] == kept[1] == ["3", f"3/{WEIGHTS_FILE}", "4", f"4/{WEIGHTS_FILE}"]
