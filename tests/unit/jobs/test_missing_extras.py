"""A job with a missing extra names it before anything is started."""

from __future__ import annotations

import json
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


def check(job: str, folder: Path, *, without: str) -> tuple[int, list[str], list[str]]:
    """Return the exit code of a check without some packages, the problems, and the notes."""
    (folder / "job.toml").write_text(job)
    command = [sys.executable, "-c", WITHOUT, without, "train", "job.toml", "--check", "--json", "--data-dir", "data"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
    told = json.loads(done.stdout or "{}")
    return done.returncode, told["problems"], told["notes"]


TRAIN = "torch,transformers,safetensors,tokenizers,peft"
FAULTS = {
    "grpo": (
        'learing_rate = 1\ngroup_size = "8"\nlora_rank = 4\nconstant_tokens = 9\ndevice = "cuda:x"\n',
        [
            "[algorithm] unknown key learing_rate: did you mean learning_rate?",
            '[algorithm] group_size = "8": it must be an integer, at least 2',
            '[algorithm] device = "cuda:x": it is no device of torch',
            "training needs the [train] extra (torch is missing): pip install 'agl-otel[train]'",
            "lora_rank needs the [lora] extra (peft is missing)",
            '[algorithm] constant_tokens = 9 has no effect with average = "token"',
        ],
    ),
    "sft": (
        'epoch = 2\nbatch_rows = "8"\nbest_of_group = 9\n',
        [
            "[algorithm] unknown key epoch: did you mean epochs?",
            '[algorithm] batch_rows = "8": it must be an integer, at least 1',
            "training needs the [train] extra (torch is missing): pip install 'agl-otel[train]'",
            "[algorithm] best_of_group = 9: it must be at most group_size (8)",
        ],
    ),
    "verl": (
        'sead = 2\nfill_reward = "0"\nconfig = { "algorithm.adv_estimator" = "grpo" }\n',
        [
            "[algorithm] unknown key sead: did you mean seed?",
            '[algorithm] fill_reward = "0": it must be a number',
            "verl needs the [verl] extra (verl, ray, transfer_queue, torch is missing): pip install 'agl-otel[verl]'",
            "[algorithm] actor_rollout_ref.rollout.n is 1, and algorithm.adv_estimator = 'grpo' compares",
        ],
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_check_without_torch_lists_all_that_is_wrong(name: str, tmp_path: Path) -> None:
    options, of_algorithm = FAULTS[name]
    job = '[agent]\nfunction = "none.py:f"\ngrader = "none2.py:f"\nrunners = 0\n[data]\ntrain = "none.jsonl"\n'
    job += f'[policy]\nseed = -1\nsever = "vllm"\nmodel = "not/a/model"\n[algorithm]\nname = "{name}"\n{options}'
    code, problems, notes = check(job, tmp_path, without=f"{TRAIN},verl,ray,transfer_queue")
    wanted = [
        "[agent] runners = 0",
        "[policy] seed = -1",
        "[policy] unknown key sever: did you mean server?",
        "[policy] model = 'not/a/model': ",
        "[data] train = 'none.jsonl' cannot be read",
        "[data] val is missing",
        "[agent] function: ",
        "[agent] grader: ",
        *of_algorithm,
    ]
    assert code == 2 and not [words for words in wanted if not any(each.startswith(words) for each in problems)], problems
    assert len(problems) == len(wanted), problems
    assert not [note for note in notes if "not checked" in note], "there is no model that torch would have looked at"


def test_a_check_without_torch_names_what_it_could_not_check(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def agent(task): return 1.0\ndef tasks(): return [1]\n")
    job = '[agent]\nfunction = "mine.py:agent"\n[data]\ntrain = "mine.py:tasks"\nval = "mine.py:tasks"\n'
    code, problems, notes = check(f'{job}[policy]\ndevices = [0]\n[algorithm]\ndevice = "cuda"\n', tmp_path, without=TRAIN)
    assert (code, problems) == (2, ["training needs the [train] extra (torch is missing): pip install 'agl-otel[train]'"])
    assert [note for note in notes if "not checked" in note] == [
        "not checked without torch: whether the model of [policy] can be trained, and with these options",
        "not checked without torch: whether this machine has the `devices` of [policy] and the `device` of [algorithm]",
    ]


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
