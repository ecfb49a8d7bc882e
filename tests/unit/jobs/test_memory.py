"""The memory table of `agl-otel train --check`: what counts, what helps, and what a machine has."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the [train] extra")

from agl_otel.jobs import memory_check
from agl_otel.jobs.check import check_job
from agl_otel.jobs.job import Job
from agl_otel.jobs.memory import HEAD, SAMPLING, SAVE, STEP, VLLM, Estimate, Part, Plan, lines_of, trainer
from agl_otel.jobs.memory_check import learning_rate_warnings, look_at, machine_bytes, plan_of, remedies, server_parts
from agl_otel.jobs.model_check import Linear, ModelFacts

GIB = 1 << 30
HIDDEN, INTERMEDIATE, LAYERS, VOCABULARY = 896, 4864, 24, 151_936
MLP = Linear(LAYERS * (HIDDEN + INTERMEDIATE), LAYERS * HIDDEN * INTERMEDIATE)
QWEN = ModelFacts(
    parameters=494_032_768,
    layers=LAYERS,
    hidden=HIDDEN,
    vocabulary=VOCABULARY,
    context=32_768,
    tied=True,
    dtype="bfloat16",
    heads=14,
    kv_heads=2,
    head_size=64,
    intermediate=INTERMEDIATE,
    linear={
        **dict.fromkeys(("q_proj", "o_proj"), Linear(LAYERS * 2 * HIDDEN, LAYERS * HIDDEN * HIDDEN)),
        **dict.fromkeys(("k_proj", "v_proj"), Linear(LAYERS * (HIDDEN + 128), LAYERS * HIDDEN * 128)),
        **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), MLP),
    },
    whole_logits=False,
)
"""Qwen2.5-0.5B."""
PLAN = Plan(pass_tokens=8192, row_tokens=2048, bfloat16=True, on_gpu=True, chunk_logits=1 << 25)


def part(estimate: Estimate, name: str) -> int:
    return sum(each.bytes for each in estimate.parts if each.name == name and each.phase in (None, estimate.phase))


def job(folder: Path, policy: str = "", algorithm: str = "") -> Job:
    (folder / "job.toml").write_text(
        f'[agent]\nfunction = "a.py:b"\n[data]\ntrain = "t"\n[policy]\nmodel = "m"\n{policy}\n[algorithm]\n{algorithm}'
    )
    return Job.load(folder / "job.toml")


def test_what_is_held_is_counted_exactly() -> None:
    estimate = trainer(QWEN, PLAN)
    parameters = QWEN.parameters
    assert [part(estimate, name) for name in ("weights", "gradients", "optimizer")] == [4 * parameters, 4 * parameters, 8 * parameters]
    assert part(trainer(QWEN, replace(PLAN, reference=True)), "reference copy") == 4 * parameters
    assert part(trainer(QWEN, replace(PLAN, optimizer="adamw_8bit")), "optimizer") == pytest.approx(2 * parameters, rel=0.02)


def test_lora_counts_the_adapter_in_float32_and_the_frozen_weights_at_their_precision() -> None:
    adapter = 8 * sum(layer.widths for layer in QWEN.linear.values())
    estimate = trainer(QWEN, replace(PLAN, lora_rank=8, reference=True))
    assert part(estimate, "weights") == 2 * QWEN.parameters + 4 * adapter
    assert (part(estimate, "gradients"), part(estimate, "optimizer"), part(estimate, "reference copy")) == (4 * adapter, 8 * adapter, 0)
    on_cpu = trainer(QWEN, replace(PLAN, lora_rank=8, on_gpu=False))
    assert on_cpu.of_phase(SAVE) == 3 * part(on_cpu, "gradients"), "a checkpoint copies the adapter and two moments"
    some = trainer(QWEN, replace(PLAN, lora_rank=8, lora_targets=["q_proj", "v_proj"]))
    assert part(some, "gradients") == 4 * 8 * (QWEN.linear["q_proj"].widths + QWEN.linear["v_proj"].widths)


def test_a_row_longer_than_a_pass_goes_alone_and_counts() -> None:
    assert trainer(QWEN, replace(PLAN, row_tokens=16_384)) == trainer(QWEN, replace(PLAN, pass_tokens=16_384, row_tokens=16_384))
    assert trainer(QWEN, PLAN).peak < trainer(QWEN, replace(PLAN, row_tokens=16_384)).peak


def test_the_greatest_phase_counts_alone() -> None:
    many, few = trainer(QWEN, PLAN), trainer(QWEN, replace(PLAN, pass_tokens=256, row_tokens=256, bfloat16=False))
    assert (many.phase, few.phase) == (HEAD, STEP)
    assert few.peak == sum(each.bytes for each in few.parts if each.phase in (None, STEP)) < many.peak


def test_whole_logits_and_kept_probabilities_grow_with_the_rows() -> None:
    plain = trainer(QWEN, PLAN)
    assert trainer(replace(QWEN, whole_logits=True), PLAN).peak - plain.peak > 8192 * VOCABULARY * 8
    assert trainer(QWEN, replace(PLAN, eager=True)).peak - plain.peak > LAYERS * 14 * 8192 * 2048 * 6


def test_remedies_are_in_the_order_of_their_effect_and_none_is_without_one() -> None:
    found = remedies(QWEN, replace(PLAN, bfloat16=False), ())
    peaks = [float(words.rsplit("(", 1)[1].removesuffix(" GB)")) for words in found]
    assert peaks == sorted(peaks) and peaks[-1] < trainer(QWEN, replace(PLAN, bfloat16=False)).peak / 1e9
    assert not any(words.startswith(("rows of", "half of", "sleep")) for words in found)
    small = replace(PLAN, pass_tokens=1024, gradient_checkpointing=True, lora_rank=4, row_tokens=1024)
    assert remedies(QWEN, small, ()) == []


@pytest.mark.parametrize(
    ("total", "problems", "warnings", "fits"), [(80 * GIB, 0, 0, True), (14 * GIB, 0, 1, False), (6 * GIB, 1, 0, False)]
)
def test_a_device_that_is_too_small_is_a_warning_and_for_the_weights_alone_a_problem(
    total: int, problems: int, warnings: int, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_check, "device_bytes", lambda device: (total, total))
    model = replace(QWEN, context=2048)
    found = look_at(job(tmp_path, algorithm="learning_rate = 1e-6\nmicro_batch_tokens = 2048"), model)
    assert found.memory is not None and found.memory.fits is fits
    assert (len(found.problems), len(found.warnings)) == (problems, warnings), found
    assert all("gradient_checkpointing = true" in warning for warning in found.warnings)
    assert all("weights, gradients and optimizer of m take 7.90 GB, and it has 6.44 GB" in problem for problem in found.problems)
    table = "\n".join(lines_of(found.memory))
    assert all(name in table for name in ("weights", "gradients", "optimizer", "activations", "logits", "model server", "together"))
    assert ("does not fit" in table) is not fits


def test_vllms_share_counts_on_its_own_gpu_only_and_not_while_it_sleeps(tmp_path: Path) -> None:
    options = 'server = "vllm"\ngpu_memory_utilization = 0.25\nvllm_options = ["--max-model-len", "2048"]\n'
    served, sleeping = job(tmp_path, policy=options), job(tmp_path, policy=options + "sleep = true")
    plan = replace(plan_of(served, QWEN), on_gpu=True)
    assert plan.row_tokens == 2048 and server_parts(served, QWEN, plan, 80 * GIB) == ()
    for each in (served, sleeping):
        each.algorithm["device"] = "cuda:0"
    [share], [asleep] = (server_parts(each, QWEN, plan, 80 * GIB) for each in (served, sleeping))
    assert (share, asleep) == (Part(VLLM, 20 * GIB), Part(VLLM, 20 * GIB, SAMPLING))
    assert "sleep = true (" in "; ".join(remedies(QWEN, plan, (share,)))
    served.algorithm["device"] = "cuda:1"
    assert server_parts(served, QWEN, plan, 80 * GIB) == ()


@pytest.mark.parametrize(
    ("options", "parameters", "words"),
    [
        ("", 494_032_768, "the default, which is for the tiny model"),
        ("learning_rate = 2e-4", 494_032_768, r"learning_rate = 0\.0002: a model of 494 million parameters"),
        ("learning_rate = 2e-4\nlora_rank = 8", 494_032_768, None),
        ("lora_rank = 8\nlearning_rate = 2e-3", 494_032_768, "LoRA"),
        ("learning_rate = 1e-5", 494_032_768, None),
        ("", 210_368, None),
    ],
)
def test_a_learning_rate_for_toys_is_warned_of_with_a_real_model(options: str, parameters: int, words: str | None, tmp_path: Path) -> None:
    found = learning_rate_warnings(job(tmp_path, algorithm=options), replace(QWEN, parameters=parameters))
    assert len(found) == (words is not None)
    if words is not None:
        assert re.search(words, found[0])


def test_the_machines_memory_is_what_is_available_within_its_control_groups(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (groups / "a" / "b").mkdir(parents=True)
    assert machine_bytes(proc, groups) == (None, None)
    (proc / "meminfo").write_text(f"MemTotal: {16 << 20} kB\nMemFree: 1 kB\nMemAvailable: {12 << 20} kB\n")
    assert machine_bytes(proc, groups) == (12 * GIB, 16 * GIB)
    (proc / "self" / "cgroup").write_text("0::/a/b\n")
    (groups / "a" / "b" / "memory.max").write_text("max\n")
    (groups / "a" / "memory.max").write_text(f"{8 * GIB}\n")
    (groups / "a" / "memory.current").write_text(f"{3 * GIB}\n")
    (groups / "a" / "memory.stat").write_text(f"anon 1\ninactive_file {GIB}\n")
    assert machine_bytes(proc, groups) == (6 * GIB, 8 * GIB)
    (proc / "self" / "cgroup").write_text("5:cpu,memory:/a\n")
    (groups / "memory" / "a").mkdir(parents=True)
    (groups / "memory" / "a" / "memory.limit_in_bytes").write_text(f"{4 * GIB}\n")
    (groups / "memory" / "a" / "memory.usage_in_bytes").write_text(f"{GIB}\n")
    assert machine_bytes(proc, groups) == (3 * GIB, 4 * GIB)


async def test_the_check_reports_the_memory_of_a_grpo_job() -> None:
    found = await check_job(Path(__file__).parents[3] / "examples" / "first_light" / "job.toml")
    assert found.memory is not None and found.memory.device == "cpu" and found.memory.fits and found.warnings == []
    assert found.memory.tokens == 16_384
