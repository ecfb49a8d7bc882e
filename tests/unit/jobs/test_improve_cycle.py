"""A promotion needs a cycle's evidence as it was, nothing in it that speaks against it, and the weights that were made."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the [train] extra")

from agl_otel.algorithms.checked_files import file_digest, with_checksum
from agl_otel.algorithms.model_files import model_fingerprint
from agl_otel.errors import DataError
from agl_otel.jobs.improve_cycle import CycleFolder
from agl_otel.jobs.improve_evidence import Arms
from agl_otel.jobs.improve_progress import canary_waits, window_waits
from agl_otel.jobs.improve_prompts import read_prompts, write_prompts
from agl_otel.types import PromptTemplate


@pytest.fixture
def cycle(tmp_path: Path, tiny_policy: Path) -> CycleFolder:
    made = CycleFolder(tmp_path, 1)
    shutil.copytree(tiny_policy, made.model)
    made.write("window", {"rollout_ids": ["ro-1"]})
    made.write("update", {"weights": model_fingerprint(made.model)})
    made.write("gate", {"why": []})
    made.write("canary", {"why": "", "steps": []})
    made.write("verdict", {"verdict": "promoted", "why": [], "evidence": made.digests()})
    return made


def test_weights_with_their_evidence_may_be_served(cycle: CycleFolder) -> None:
    cycle.check_promotion()


def _other_weights(cycle: CycleFolder) -> None:
    path = cycle.model / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _without_checksum(cycle: CycleFolder) -> None:
    (cycle.folder / "gate.json").write_text(json.dumps({"why": []}))


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (_other_weights, "are not those that the cycle made"),
        (_without_checksum, r"gate\.json"),
        (lambda cycle: (cycle.folder / "canary.json").unlink(), r"canary\.json .* is not what its promotion rests on"),
        (lambda cycle: cycle.write("gate", {"why": [], "drift": 0.1}), r"gate\.json .* is not what its promotion rests on"),
        (
            lambda cycle: (
                cycle.write("canary", {"why": "canary_worse", "steps": []}),
                cycle.write("verdict", {"verdict": "promoted", "why": [], "evidence": cycle.digests()}),
            ),
            "says promoted, and canary_worse speaks against it",
        ),
        (
            lambda cycle: (cycle.folder / "verdict.json").write_text(json.dumps(with_checksum({"evidence": {}}))),
            "is not what its promotion rests on",
        ),
    ],
)
def test_nothing_is_served_without_its_evidence(cycle: CycleFolder, harm: Callable[[CycleFolder], object], told: str) -> None:
    harm(cycle)
    with pytest.raises(DataError, match=told):
        cycle.check_promotion()


def test_prompts_are_served_as_they_were_made_alone(tmp_path: Path) -> None:
    cycle = CycleFolder(tmp_path, 1)
    prompts = {"ask": PromptTemplate(template="Say {what}.", engine="f-string")}
    cycle.write("window", {"rollout_ids": ["ro-1"]})
    write_prompts(cycle.prompts, prompts)
    cycle.write("update", {"weights": file_digest(cycle.prompts)})
    cycle.check_made()
    assert cycle.made == cycle.prompts and read_prompts(cycle.made) == prompts
    write_prompts(cycle.prompts, {"ask": prompts["ask"].model_copy(update={"template": "Shout {what}."})})
    with pytest.raises(DataError, match=r"the prompts in .*prompts\.json are not those that the cycle made: restore them"):
        cycle.check_made()
    cycle.prompts.unlink()
    with pytest.raises(DataError, match="are not those that the cycle made"):
        cycle.check_made()


def test_a_window_says_what_it_waits_for() -> None:
    assert "AGL_UNIDENTIFIED=adopt" in window_waits(seen=0, rated=0, wanted=8, unrated=0, missing=0)
    assert window_waits(seen=9, rated=3, wanted=8, unrated=6, missing=0) == "3 of 8 attempts are rated, 6 have no reward"
    assert window_waits(seen=9, rated=9, wanted=8, unrated=0, missing=2).endswith("; 2 more need a trusted one")


def test_a_canary_says_what_it_has_and_until_when_it_waits() -> None:
    arms = Arms(14, canary=np.ones(5), promoted=np.ones(73), mixed=1)
    told = "5 of 12 rewards; 14 of at most 14 conversations; 73 rewards of what is promoted"
    assert canary_waits(arms, rated=12, most=14, wait=600.0) == told
    until = canary_waits(replace(arms, filled=1_700_000_000.0), rated=12, most=14, wait=600.0).removeprefix(f"{told}; until ")
    assert until == f"{time.strftime('%H:%M:%S', time.localtime(1_700_000_600))} at most"
