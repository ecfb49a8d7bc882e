"""Hold a GRPO job's memory and learning rate against its model and its device, for `agl-otel train JOB.toml --check` and before a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from agl_otel.algorithms.grpo.options import Objective, Updates
from agl_otel.algorithms.grpo.vllm_options import max_model_len
from agl_otel.jobs.job import Job
from agl_otel.jobs.memory import (
    BFLOAT16,
    FLOAT32,
    HELD,
    SAMPLING,
    VLLM,
    WORTH_SAYING,
    Estimate,
    Findings,
    Memory,
    Part,
    Plan,
    gigabytes,
    our_server,
    trainer,
)
from agl_otel.jobs.policy_server import gpu_share, is_shared
from agl_otel.jobs.served import SMALL_PARAMETERS

if TYPE_CHECKING:
    from agl_otel.jobs.model_check import ModelFacts

USUAL_LEARNING_RATE: Final = 1e-4
"""Greater ones, with LoRA greater than ten times this, are far beyond the published ones of real models (docs/real-models.md)."""
CGROUPS: Final = Path("/sys/fs/cgroup")


def look_at(job: Job, facts: ModelFacts) -> Findings:
    """Return the memory of the job, and what is wrong or unusual about it and about the learning rate."""
    warnings = learning_rate_warnings(job, facts)
    if job.has_wrong("[algorithm] device"):
        return Findings(warnings=warnings)
    device = str(job.options.get("device", Updates.device))
    free, total = device_bytes(device)
    plan = plan_of(job, facts)
    server = server_parts(job, facts, plan, total)
    memory = memory_of(facts, plan, server, device, free)
    if memory.fits is not False:
        return Findings(warnings=warnings, memory=memory)
    held = sum(part.bytes for part in memory.parts if part.name in HELD)
    if total is not None and held > total:
        problem = (
            f"[algorithm] device = {device!r}: weights, gradients and optimizer of {job.policy.model} take {gigabytes(held)}, and it has "
            f"{gigabytes(total)}; give lora_rank (8 to 64 are usual), or take a smaller model or a larger device"
        )
        return Findings([problem], warnings, memory=memory)
    help_ = "; ".join(remedies(facts, plan, server)) or "a smaller model, or a larger device"
    warning = (
        f"memory: {gigabytes(memory.peak_bytes)} may be needed on {device}, which has {gigabytes(free or 0)}. What helps most: {help_}"
    )
    return Findings(warnings=[*warnings, warning], memory=memory)


def learning_rate_warnings(job: Job, facts: ModelFacts) -> list[str]:
    """Return a warning where the learning rate is that of a toy and the model is none."""
    rate, adapted = float(job.options.get("learning_rate", Updates.learning_rate)), job.options.get("lora_rank") is not None
    if facts.parameters <= SMALL_PARAMETERS or rate <= USUAL_LEARNING_RATE * (10 if adapted else 1):
        return []
    default = "" if "learning_rate" in job.options else " (the default, which is for the tiny model)"
    return [
        f"learning_rate = {rate:g}{default}: a model of {facts.parameters / 1e6:,.0f} million parameters is usually trained with "
        f"{'1e-5 to 1e-4 (LoRA)' if adapted else '1e-6 to 1e-5'}; see docs/real-models.md"
    ]


def plan_of(job: Job, facts: ModelFacts) -> Plan:
    """Return what the memory of the job depends on."""
    from agl_otel.algorithms.grpo.logprobs import CHUNK_LOGITS

    given, device = job.options, job.options.get("device", Updates.device)
    return Plan(
        pass_tokens=given.get("micro_batch_tokens", Updates.micro_batch_tokens),
        row_tokens=min(facts.context, max_model_len(job.policy.vllm_options) or facts.context),
        bfloat16=Updates(dtype=given.get("dtype", Updates.dtype), device=device).in_bfloat16,
        lora_rank=given.get("lora_rank"),
        lora_targets=given.get("lora_targets", Updates.lora_targets),
        gradient_checkpointing=given.get("gradient_checkpointing", Updates.gradient_checkpointing),
        optimizer=given.get("optimizer", Updates.optimizer),
        eager=given.get("attention") == "eager",
        reference=given.get("kl", Objective.kl) > 0,
        on_gpu=not device.startswith("cpu"),
        chunk_logits=CHUNK_LOGITS,
    )


def memory_of(facts: ModelFacts, plan: Plan, server: tuple[Part, ...], device: str, free: int | None) -> Memory:
    """Estimate the memory of a plan beside a model server, against the bytes that the device has for both."""
    estimate = Estimate((*trainer(facts, plan).parts, *server))
    fits = None if free is None else estimate.peak <= free
    return Memory(device, plan.tokens, plan.row_tokens > plan.pass_tokens, estimate.parts, estimate.phase, estimate.peak, free, fits)


def server_parts(job: Job, facts: ModelFacts, plan: Plan, total: int | None) -> tuple[Part, ...]:
    """Return what the model server takes of the trainer's device, which has `total` bytes."""
    shared, asleep = is_shared(job), SAMPLING if job.policy.sleep else None
    if job.policy.server == "vllm":
        return (Part(VLLM, round(total * (gpu_share(job) or 0.0)), asleep),) if shared and total is not None else ()
    if plan.on_gpu and not shared:
        return ()
    pushed = BFLOAT16 if plan.bfloat16 else FLOAT32
    return (Part("model server", our_server(facts, row_tokens=plan.row_tokens, pushed_bytes=pushed)),)


def remedies(facts: ModelFacts, plan: Plan, server: tuple[Part, ...]) -> list[str]:
    """Return the options that lower the peak, the most effective first, each with the peak that it alone would give."""

    def peak(changed: Plan, beside: tuple[Part, ...] = server) -> int:
        return Estimate((*trainer(facts, changed).parts, *beside)).peak

    short = min(2048, plan.pass_tokens)
    tries = {
        f"micro_batch_tokens = {short}": peak(replace(plan, pass_tokens=short)),
        f"rows of at most {plan.pass_tokens} tokens (max_tokens, --max-model-len)": peak(replace(plan, row_tokens=plan.pass_tokens)),
        "gradient_checkpointing = true": peak(replace(plan, gradient_checkpointing=True)),
        "lora_rank = 16": peak(replace(plan, lora_rank=plan.lora_rank or 16)),
        'dtype = "bfloat16"': peak(replace(plan, bfloat16=True)),
        'optimizer = "adamw_8bit"': peak(replace(plan, optimizer="adamw_8bit")),
        "half of gpu_memory_utilization": peak(
            plan, tuple(replace(part, bytes=part.bytes // 2) if part.name == VLLM else part for part in server)
        ),
        "sleep = true": peak(plan, tuple(replace(part, phase=SAMPLING) if part.name == VLLM else part for part in server)),
    }
    tries = {words: bytes_ for words, bytes_ in tries.items() if bytes_ < (1 - WORTH_SAYING) * peak(plan)}
    return [f"{words} ({gigabytes(bytes_)})" for words, bytes_ in sorted(tries.items(), key=lambda each: each[1])]


# --- the device


def device_bytes(device: str) -> tuple[int | None, int | None]:
    """Return the bytes that a device has for a job, and its total; None where unknown.

    A GPU has its total, because a job that is checked runs alone on it; the CPU what is available of the machine's memory, within the
    limits of the process's control groups.
    """
    if device.startswith("cuda"):
        import torch

        total = torch.cuda.mem_get_info(device)[1]
        return total, total
    return machine_bytes() if device.startswith("cpu") else (None, None)


def machine_bytes(proc: Path = Path("/proc"), cgroups: Path = CGROUPS) -> tuple[int | None, int | None]:
    """Return (available, total) bytes of the machine's memory, by /proc/meminfo and the limits of control groups (v2, v1)."""
    try:
        lines = (line.partition(":") for line in (proc / "meminfo").read_text().splitlines())
        sizes = {name: int(rest.split()[0]) << 10 for name, _, rest in lines if name in ("MemTotal", "MemAvailable")}
        available, total = sizes["MemAvailable"], sizes["MemTotal"]
    except (OSError, ValueError, LookupError):
        return None, None
    for limit, used in _limits(proc, cgroups):
        available, total = min(available, max(0, limit - used)), min(total, limit)
    return available, total


def _limits(proc: Path, cgroups: Path) -> list[tuple[int, int]]:
    """Return (limit, bytes in use without the cache of files) of each control group above this process that has a limit."""
    found: list[tuple[int, int]] = []
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        names = {"": ("", "memory.max", "memory.current"), "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes")}
        place = next((names[each] for each in controllers.split(",") if each in names), None)
        if place is None:
            continue
        top, limit, used = cgroups / place[0], place[1], place[2]
        own = top / path.lstrip("/")
        for folder in (own, *(parent for parent in own.parents if parent.is_relative_to(top))):
            most = _text(folder / limit).strip()
            if most.isdecimal():
                cache = [int(each.split()[1]) for each in _text(folder / "memory.stat").splitlines() if each.startswith("inactive_file ")]
                found.append((int(most), int(_text(folder / used).strip() or 0) - sum(cache)))
    return found


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
