"""A job with a missing extra names it before anything is started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"
WITHOUT = """
import sys
for name in sys.argv[1].split(","):
    sys.modules[name] = None
from agl_otel.cli import main
main(sys.argv[2:])
"""
GRPO = (EXAMPLES / "first_light" / "job.toml").read_text()
CASES = {
    "grpo": ("torch,transformers", GRPO, "training needs the [train] extra (torch is missing): pip install 'agl-otel[train]'"),
    "sft": (
        "torch,transformers",
        GRPO.split("[algorithm]")[0] + '[algorithm]\nname = "sft"\n',
        "training needs the [train] extra (torch is missing): pip install 'agl-otel[train]'",
    ),
    "lora": ("peft", GRPO + "lora_rank = 4\n", "lora_rank needs the [lora] extra (peft is missing): pip install 'agl-otel[lora]'"),
    "wandb": (
        "wandb",
        GRPO + 'metrics = ["wandb"]\n',
        "metrics = 'wandb' needs the [wandb] extra (wandb is missing): pip install 'agl-otel[wandb]'",
    ),
    "apo": (
        "openai",
        (EXAMPLES / "apo" / "job.toml").read_text(),
        "the editor needs the [apo] extra (openai is missing): pip install 'agl-otel[apo]'",
    ),
}


@pytest.mark.parametrize("name", ["grpo", "sft", "verl"])
def test_a_check_without_torch_also_lists_all_else_that_is_wrong(name: str, tmp_path: Path) -> None:
    job = '[agent]\nfunction = "none.py:f"\ngrader = "none2.py:f"\nrunners = 0\n[data]\ntrain = "none.jsonl"\n'
    (tmp_path / "job.toml").write_text(f'{job}[policy]\nseed = -1\n[algorithm]\nname = "{name}"\n')
    command = [sys.executable, "-c", WITHOUT, "torch,transformers,verl", "train", "job.toml", "--check", "--data-dir", "data"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 2, done.stderr
    told = " ".join(done.stdout.split())
    for words in ("extra (torch is missing): pip install", "runners = 0", "seed = -1", "none.jsonl", "none.py", "none2.py"):
        assert words in told, told
    assert "not checked without it" in told


def test_the_demo_names_a_missing_extra(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT, "torch,transformers", "demo", "--data-dir", str(tmp_path / "data")]
    done = subprocess.run(command, cwd=EXAMPLES.parent, capture_output=True, text=True, check=False, timeout=300)
    assert "error: the demo needs the [train] extra (torch is missing)" in done.stderr
    assert not (tmp_path / "data").exists()


# lora and wandb are looked for when torch has been loaded
@pytest.mark.parametrize("name", [pytest.param(each, marks=pytest.mark.full if each in ("lora", "wandb") else ()) for each in CASES])
def test_a_job_with_a_missing_extra_names_what_to_install(name: str, tmp_path: Path) -> None:
    missing, job, words = CASES[name]
    (tmp_path / "job.toml").write_text(job)
    command = [sys.executable, "-c", WITHOUT, missing, "train", "job.toml", "--data-dir", "data"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, words in " ".join(done.stderr.split())) == (2, True), done.stderr
    assert not (tmp_path / "data").exists()
