"""How much memory GRPO's trainer needs: an estimate in bytes, by part, from a model's widths and a job's options. Pure.

What is held all the time (weights, gradients, the optimizer's state) is exact. What is needed for a while comes in phases, of which the
greatest counts: three moments of a forward and backward pass, the optimizer's step, a checkpoint, and sampling. The formulas are for
decoders of Llama's kind (RMSNorm, gated MLP; the experts that a token uses, where there are experts); tests/system/test_trainer_memory.py
holds them to measured peaks. Not counted: the process itself, and what an allocator keeps or cannot use (fragmentation).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from agl_otel.jobs.model_check import ModelFacts

FLOAT32: Final = 4
BFLOAT16: Final = 2
OPTIMIZER_BYTES: Final[Mapping[str, float]] = {"adamw": 8.0, "adamw_8bit": 2 + 8 / 256, "paged_adamw_8bit": 0.0}
"""{optimizer: bytes of its state on the device, for each trained parameter}: two moments in float32 (arXiv:1412.6980, algorithm 1), or in
8 bits with a float32 scale of each block of 256 (arXiv:2110.02861); pages move to the host where the device is full."""
VLLM: Final = "vLLM's share"
HEAD, LAYER, END = "log-probs", "backward pass of a layer", "end of the backward pass"
STEP, SAVE, SAMPLING = "optimizer's step", "checkpoint", "sampling"
WORTH_SAYING: Final = 0.01  # of the peak
PHASES: Final = (HEAD, LAYER, END, STEP, SAVE, SAMPLING)
HELD: Final = ("weights", "gradients", "optimizer")
"""The parts without which nothing is trained, whatever the length of a row."""
SERVER_ROWS: Final = 16
"""Rows of a batch of this package's model server: generate.SHAPE_ROWS."""
DRAW_BYTES: Final = 32
"""Of that server for each logit of a batch: logits and log-probs in float32, and three arrays in float64 (generate._draw)."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The options of a run that its memory depends on."""

    pass_tokens: int
    """Most tokens of one forward pass."""
    row_tokens: int
    """The longest row; a longer one than `pass_tokens` is a pass of its own."""
    bfloat16: bool
    lora_rank: int | None = None
    lora_targets: Sequence[str] | str = "all-linear"
    gradient_checkpointing: bool = False
    optimizer: str = "adamw"
    eager: bool = False
    """Whether attention keeps its probabilities."""
    reference: bool = False
    """Whether a KL term needs the initial weights."""
    on_gpu: bool = False
    chunk_logits: int
    """logprobs.CHUNK_LOGITS."""

    @property
    def tokens(self) -> int:
        """Tokens of the largest forward pass."""
        return max(self.pass_tokens, self.row_tokens)


@dataclass(frozen=True)
class Part:
    """One part of the estimate."""

    name: str
    bytes: int
    phase: str | None = None
    """In which of PHASES it is needed; None: always."""


@dataclass(frozen=True)
class Estimate:
    """The parts of the memory of one device."""

    parts: tuple[Part, ...]

    def of_phase(self, phase: str) -> int:
        """Return the bytes that a phase needs beside what is always held."""
        return sum(part.bytes for part in self.parts if part.phase == phase)

    @property
    def phase(self) -> str:
        """The phase that needs the most."""
        return max(PHASES, key=self.of_phase)

    @property
    def peak(self) -> int:
        """The most bytes that are needed at one time."""
        return sum(part.bytes for part in self.parts if part.phase is None) + self.of_phase(self.phase)


@dataclass(frozen=True)
class Memory:
    """The estimate for a job against its device."""

    device: str
    tokens: int
    """Of the largest forward pass."""
    row_alone: bool
    """Whether that is one row, longer than micro_batch_tokens."""
    parts: tuple[Part, ...]
    phase: str
    """The phase that counts."""
    peak_bytes: int
    available_bytes: int | None
    """What the device has for this job; None where that is unknown."""
    fits: bool | None


@dataclass(frozen=True)
class Findings:
    """What a check of a job found, beside errors that it raises."""

    problems: list[str] = field(default_factory=list[str])
    warnings: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])
    memory: Memory | None = None


def gigabytes(size: int) -> str:
    """Return a size for people: in MB below 0.1 GB."""
    return f"{size / 1e9:,.2f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"


def lines_of(memory: Memory) -> list[str]:
    """Return the table of the estimate: the greatest phase and what is always held by part, the other phases in a line each.

    Parts below WORTH_SAYING are left out.
    """
    parts = [part for part in memory.parts if part.bytes >= WORTH_SAYING * memory.peak_bytes]
    shown = [part for part in parts if part.phase in (None, memory.phase)]
    width = max(len(part.name) for part in shown)
    found = [f"memory on {memory.device}, estimated, at its most ({memory.phase}):"]
    found += [f"  {part.name:<{width}} {gigabytes(part.bytes):>12}" for part in shown]
    has = f" of {gigabytes(memory.available_bytes)} available" if memory.available_bytes is not None else ""
    row = "one row as long as the context" if memory.row_alone else "micro_batch_tokens"
    verdict = {True: "fits", False: "does not fit", None: "what the device has is unknown"}[memory.fits]
    found.append(f"  {'together':<{width}} {gigabytes(memory.peak_bytes):>12}{has}: {verdict} (a pass of {memory.tokens:,} tokens: {row})")
    for phase in (phase for phase in PHASES if phase != memory.phase):
        if of_phase := [part for part in parts if part.phase == phase]:
            listed = ", ".join(f"{part.name} {gigabytes(part.bytes)}" for part in of_phase)
            found.append(f"  in another phase, {phase}: {listed}")
    return found


def trainer(facts: ModelFacts, plan: Plan) -> Estimate:
    """Estimate the memory of the trainer of a model."""
    adapter = plan.lora_rank * facts.adapter_inputs(plan.lora_targets) if plan.lora_rank is not None else 0
    frozen = plan.lora_rank is not None
    stored = BFLOAT16 if frozen and plan.bfloat16 else FLOAT32
    trained = adapter if frozen else facts.parameters
    weights = facts.parameters * stored + adapter * FLOAT32  # peft keeps adapters in float32
    parts = [
        Part("weights", weights),
        Part("gradients", trained * FLOAT32),
        Part("optimizer", round(trained * OPTIMIZER_BYTES[plan.optimizer])),
        Part("reference copy", facts.parameters * FLOAT32 if plan.reference and not frozen else 0),
        *_pass(facts, plan),
        Part("temporaries of the update", _update_bytes(facts, plan, trained), STEP),
        Part("checkpoint's copies", _save_bytes(facts, plan, trained), SAVE),
    ]
    return Estimate(tuple(part for part in parts if part.bytes))


def our_server(facts: ModelFacts, *, row_tokens: int, pushed_bytes: int) -> int:
    """Estimate the bytes of this package's model server, in the machine's memory: float32 weights, the file with new ones while it is
    loaded, keys and values of a batch of the longest rows, and the distributions that a batch's tokens are drawn from."""
    cache = SERVER_ROWS * row_tokens * facts.layers * 2 * facts.kv_heads * facts.head_size * FLOAT32
    return facts.parameters * (FLOAT32 + pushed_bytes) + cache + SERVER_ROWS * facts.vocabulary * DRAW_BYTES


def _pass(facts: ModelFacts, plan: Plan) -> list[Part]:
    """Return the parts of the three moments of a forward and backward pass that may need the most.

    These are the head's backward pass, where all activations are kept; that of the last layer, where with gradient checkpointing its
    activations are there again; and the end, where the gradient of the embedding is as large as itself, twice where it is the head, too.
    """
    embedding = facts.vocabulary * facts.hidden
    trains_head, mixed = plan.lora_rank is None, plan.bfloat16 and plan.lora_rank is None
    kept = plan.tokens * facts.hidden * (BFLOAT16 if plan.bfloat16 and not mixed else FLOAT32)
    layer = plan.tokens * _layer_bytes(facts, plan)
    if mixed:  # autocast casts each weight once, and the graph keeps the cast until it is used
        layer += facts.linear_parameters // facts.layers * BFLOAT16
    at_head = 3 * kept + facts.layers * (kept if plan.gradient_checkpointing else layer)  # the last norm keeps three states
    in_layer = facts.layers * kept + layer if plan.gradient_checkpointing else facts.layers * layer
    head = embedding * FLOAT32 if trains_head else 0
    mlp = plan.tokens * 2 * facts.intermediate * (BFLOAT16 if plan.bfloat16 else FLOAT32)
    return [
        Part("activations", at_head, HEAD),
        Part("logits", _logit_bytes(facts, plan), HEAD),
        Part("head's gradient", head + (embedding * BFLOAT16 if mixed else 0), HEAD),
        Part("activations", in_layer, LAYER),
        Part("gradients of activations", mlp, LAYER),
        Part("head's gradient", head if facts.tied else 0, LAYER),
        Part("embedding's gradient", head * (2 if facts.tied else 1), END),
    ]


def _layer_bytes(facts: ModelFacts, plan: Plan) -> int:
    """Return the bytes that a decoder layer keeps of each token for its backward pass.

    H, Q, K, I: the widths of hidden states, all query heads, all key heads, and the MLP. In float32 a norm keeps its input, the normalised
    states and its output, which is the input of the projections (3 H, twice); attention its queries, keys, values and output (2 Q + 2 K);
    the gated MLP the gate, its activation, the up projection and their product (4 I). Mixed precision keeps norms in float32 without
    their output, and a bfloat16 copy of that for each projection that reads it (3 of attention, 2 of the MLP). Frozen weights need no
    normalised states, but an adapter keeps its input, in float32: where the model is in bfloat16, a copy for each projection.
    """
    hidden, intermediate = facts.hidden, facts.intermediate
    query, key = facts.heads * facts.head_size, facts.kv_heads * facts.head_size
    if plan.eager:
        key = query  # keys and values are repeated for each query head
    if plan.lora_rank is None and not plan.bfloat16:
        found = FLOAT32 * (6 * hidden + 2 * query + 2 * key + 4 * intermediate)
    elif plan.lora_rank is None:
        found = FLOAT32 * 4 * hidden + BFLOAT16 * (5 * hidden + 2 * query + 2 * key + 4 * intermediate)
    elif not plan.bfloat16:
        found = FLOAT32 * (4 * hidden + 2 * query + 2 * key + 4 * intermediate + 7 * plan.lora_rank)
    else:
        inputs = FLOAT32 * (5 * hidden + query + intermediate + 7 * plan.lora_rank)
        found = FLOAT32 * 2 * hidden + inputs + BFLOAT16 * (2 * query + 2 * key + 3 * intermediate)
    if plan.eager:  # the probabilities [heads, row, row] in float32, and a cast of them
        found += facts.heads * min(plan.row_tokens, plan.tokens) * (FLOAT32 + (BFLOAT16 if plan.bfloat16 else 0))
    return found


def _logit_bytes(facts: ModelFacts, plan: Plan) -> int:
    """Return the bytes of logits: those of a chunk and of the one before it; of all tokens where the head is not only linear."""
    if facts.whole_logits:
        return plan.tokens * facts.vocabulary * 3 * FLOAT32  # logits, their scaled copy, and the gradient
    chunk = min(plan.tokens, max(1, plan.chunk_logits // facts.vocabulary)) * facts.vocabulary
    return chunk * (2 * FLOAT32 + (BFLOAT16 if plan.bfloat16 else 0))


def _update_bytes(facts: ModelFacts, plan: Plan, trained: int) -> int:
    """Return the bytes of AdamW's temporaries: on a GPU one number for each parameter (torch.optim.AdamW: `foreach` takes about the
    parameters' size more), on the CPU two for each of the largest tensor, parameter by parameter."""
    if plan.on_gpu:
        return trained * FLOAT32
    return 2 * FLOAT32 * (facts.vocabulary * facts.hidden if plan.lora_rank is None else 0)


def _save_bytes(facts: ModelFacts, plan: Plan, trained: int) -> int:
    """Return the bytes of a checkpoint's copies, from which it is written while rollouts run (checkpoint.Checkpoints.save).

    They are in the machine's memory: the optimizer's state, and an adapter, or all weights in float32 where the file for the model server
    is in bfloat16; another file is linked.
    """
    if plan.on_gpu:
        return 0
    weights = trained * FLOAT32 if plan.bfloat16 or plan.lora_rank is not None else 0
    return round(trained * OPTIMIZER_BYTES[plan.optimizer]) + weights
