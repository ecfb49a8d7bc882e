"""When a GRPO run writes checkpoints, and that they are those of a run that writes one after each step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agl_otel.algorithms.grpo.policy import WEIGHTS_FILE
from agl_otel.algorithms.run_folder import model_fingerprint
from agl_otel.errors import UsageError
from agl_otel.store import LightningStore
from tests.contract.algorithms.test_bad_input import KINDS, by_place, checkpoints_of, make_policy, steps_of, trained

STEPS = 3


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, [3]),
        ({"checkpoint_every_minutes": 0}, [1, 2, 3]),
        ({"checkpoint_every_steps": 2}, [2, 3]),
        ({"checkpoint_every_minutes": 0, "checkpoint_every_steps": 3}, [3]),
    ],
    ids=["by time", "each step", "by steps", "steps before time"],
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


async def test_a_schedule_that_decays_is_resumed_with_its_own_length_only(store: LightningStore, tmp_path: Path) -> None:
    folder = make_policy(tmp_path / "policy", seed=1)
    decay: dict[str, Any] = {"learning_rate_schedule": "linear"}
    await trained(KINDS[0], store, folder, tmp_path / "run", by_place, max_steps=1, **decay)
    with pytest.raises(UsageError, match="begun with another max_steps"):
        await trained(KINDS[0], store, folder, tmp_path / "run", by_place, max_steps=2, **decay)


@pytest.mark.parametrize("changed", ["chat_template.jinja", "tokenizer.json", "model.safetensors"])
def test_a_models_fingerprint_is_of_all_that_a_run_reads(tmp_path: Path, changed: str) -> None:
    folder = make_policy(tmp_path / "policy", seed=1)
    with (folder / "model.safetensors").open("ab") as file:
        file.truncate(64 << 20)  # so that its end does not tell
    before = model_fingerprint(folder)
    with (folder / changed).open("r+b") as file:
        file.write(b"#other")
    assert model_fingerprint(folder) != before


async def test_a_run_that_is_resumed_after_an_early_checkpoint_ends_with_the_same_weights(store: LightningStore, tmp_path: Path) -> None:
    folder = make_policy(tmp_path / "policy", seed=1)
    await trained(KINDS[0], store, folder, tmp_path / "run", by_place, max_steps=4, checkpoint_every_steps=1, keep_checkpoints=9)
    *_, last = places = checkpoints_of(tmp_path / "run")
    lines = [{name: line[name] for name in ("step", "loss", "gradient_norm", "rollout_ids")} for line in steps_of(tmp_path / "run")]
    expected = (last / WEIGHTS_FILE).read_bytes()
    for place in places[1:]:  # as after a kill, when these were not written yet
        place.rename(tmp_path / place.name)
    await trained(KINDS[0], store, folder, tmp_path / "run", by_place, max_steps=4)
    assert [place.name for place in checkpoints_of(tmp_path / "run")] == ["step-000001", "step-000004"]
    assert (last / WEIGHTS_FILE).read_bytes() == expected
    assert [{name: line[name] for name in lines[0]} for line in steps_of(tmp_path / "run")] == lines
