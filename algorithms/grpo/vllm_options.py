"""Arguments of `vllm serve`, such as `vllm_options` of a job's [policy]: those that a run cannot have, and what it reads of the others.

Without torch and without vLLM: by the arguments' names and values alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Final

from agl_otel.algorithms.options import shown

_SET: Final = (
    *("--model", "--host", "--port", "--served-model-name", "--seed", "--logprobs-mode", "--generation-config"),
    *("--enable-sleep-mode", "--enable-lora", "--max-lora-rank", "--max-loras"),
)
SET_BY_FRONT: Final = dict.fromkeys(_SET, "the front sets it itself")
SET_BY_RUN: Final = dict.fromkeys(
    (*_SET, "--gpu-memory-utilization"),
    "the run sets it itself (model, seed, gpu_memory_utilization, sleep and adapters are keys of [policy])",
)
"""{argument of `vllm serve`: why it is refused}: what its front (vllm.py) sets, and what a run does."""
NOT_THE_POLICY: Final = {
    **dict.fromkeys(("--load-format", "--model-loader-extra-config"), "the server must load the weights that the run writes"),
    **dict.fromkeys(("--quantization", "-q"), "quantised weights sample other tokens than those that are trained"),
    **dict.fromkeys(
        ("--tokenizer", "--tokenizer-mode", "--tokenizer-revision", "--skip-tokenizer-init"), "the trainer has the model's own tokenizer"
    ),
    **dict.fromkeys(
        ("--hf-overrides", "--hf-config-path", "--revision", "--code-revision", "--rope-scaling", "--rope-theta"),
        "the trainer reads the model's own config.json",
    ),
    **dict.fromkeys(
        ("--sliding-window", "--disable-sliding-window"), "the trainer's attention has the window of the model's own config.json"
    ),
    "--enable-prompt-embeds": "a prompt of embeddings has no token ids to train on",
    **dict.fromkeys(("--runner", "--task", "--convert"), "the policy generates text"),
    **dict.fromkeys(
        ("--tool-strict-level", "--override-generation-config", "--logits-processors", "--logits-processor-pattern"),
        "the trainer assumes samples of the model's own distribution",
    ),
    "--max-logprobs": "the run asks for the log-prob of each sampled token",
    "--lora-modules": "the run loads its own adapters",
    **dict.fromkeys(("--help", "-h", "--version", "-v"), "vLLM would print and end"),
    **dict.fromkeys(("--api-key", "--config"), "the run sets the server's arguments and its access, and knows nothing of those in there"),
    **dict.fromkeys(
        ("--uds", "--root-path", "--ssl-keyfile", "--ssl-certfile", "--headless"), "the run calls the server at an address of its own"
    ),
}
"""{argument of `vllm serve`: why it is refused: the server would sample from another model than is trained, or not be reached}."""
_KV_OF_MODEL: Final = frozenset({"auto", "bfloat16", "float16", "float32", "half", "float"})
SAMPLES_OTHERWISE: Final[Mapping[str, tuple[str, Collection[str]]]] = {
    "--kv-cache-dtype": ("keys and values are rounded to fewer bits than the trainer's", _KV_OF_MODEL),
    "--calculate-kv-scales": ("keys and values are scaled, which the trainer does not do", ()),
    **dict.fromkeys(("--speculative-config", "-sc"), ("not every release gives the log-probs of tokens that a draft proposed", ())),
    "--model-impl": ("vLLM then computes with another implementation of the model", ("auto", "vllm")),
    "--dtype": ("its range is smaller than that of the trainer's bfloat16 or float32", ("auto", "bfloat16", "float", "float32")),
}
"""{argument of `vllm serve`: why the sampler's probabilities may differ from the trainer's, and the values with which they do not}."""
_SIZES: Final = ("--swap-space", "--cpu-offload-gb")
_COUNTS: Final = ("--max-num-seqs", "--max-num-batched-tokens", "--block-size")
_SPLITS: Final = {"-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-dp": "--data-parallel-size"}
_DTYPES_OF_VLLM: Final = ("auto", "half", "float16", "bfloat16", "float", "float32")
_NUMBER: Final = re.compile(r"\d+(?:\.\d+)?")
_CONTEXT: Final = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG]?)")
_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
"""As vLLM reads --max-model-len."""


def check_options(options: Sequence[str], *, gpus: int) -> None:
    """Raise ValueError, which names the argument, the reason and the remedy, for one with which a run on so many GPUs cannot work."""
    if options and not options[0].startswith("-"):
        raise ValueError(f'vllm_options = {shown(options)}: the first must begin with "--", as in ["--dtype", "float32"]')
    if any(not option.strip() for option in options):
        raise ValueError(f"vllm_options = {shown(options)}: an argument is empty; leave it out")
    check_names(options, "vllm_options", SET_BY_RUN)
    _check_values(options, gpus)


def check_names(options: Sequence[str], where: str, taken: Mapping[str, str]) -> None:
    """Raise ValueError, which names the argument, the reason and the remedy, for one that is `taken`, or of NOT_THE_POLICY."""
    for option in options:
        name = option.partition("=")[0].replace("_", "-").partition(".")[0]  # vLLM takes both; --hf-overrides.rope_theta
        no = "no-" if name.startswith("--no-") else ""
        for known, why in {**taken, **NOT_THE_POLICY}.items():
            if _means(name.replace("--no-", "--", 1), known):
                raise ValueError(f"{where} has {f'--{no}{known[2:]}' if no else known}, but {why}: leave it out")


def _means(name: str, known: str) -> bool:
    """Whether vLLM reads an argument as the known one: its parser takes the beginning of a long one, and a short one with its value."""
    if known.startswith("--"):
        return len(name) > len("--") and known.startswith(name)
    return name.startswith(known)


def _check_values(options: Sequence[str], gpus: int) -> None:
    context = _value_of(options, "--max-model-len")
    if context is not None and context not in ("auto", "-1") and max_model_len(options) is None:
        raise ValueError(
            f"vllm_options has --max-model-len {context}: it must be a number of tokens, at least 1, such as 4096 or 4k; "
            "give one, or leave it out for the model's own"
        )
    dtype = _value_of(options, "--dtype")
    if dtype is not None and dtype not in _DTYPES_OF_VLLM:
        raise ValueError(f"vllm_options has --dtype {dtype}: it must be one of {', '.join(_DTYPES_OF_VLLM)}; give one, or leave it out")
    for name in _COUNTS:
        if (value := _value_of(options, name)) is not None and not (value.isdecimal() and int(value) > 0):
            raise ValueError(
                f"vllm_options has {name} {value}: it must be at least 1, because it counts calls or tokens; give such a value, "
                "or leave it out"
            )
    for name in _SIZES:
        if (value := _value_of(options, name)) is not None and not _NUMBER.fullmatch(value):
            raise ValueError(
                f"vllm_options has {name} {value}: it must be at least 0, because it is a size in GiB; give such a value, or leave it out"
            )
    split = {name: _value_of(options, name, short) for short, name in _SPLITS.items()}
    given = {name: value for name, value in split.items() if value is not None}
    sizes = [int(value) if value.isdecimal() else 0 for value in given.values()]
    if given and math.prod(sizes) * (1 if "--tensor-parallel-size" in given else gpus) != gpus:
        listed = " ".join(f"{name} {value}" for name, value in given.items())
        raise ValueError(
            f"vllm_options has {listed}: the product must be {gpus}, the number of GPUs in devices (without --tensor-parallel-size the "
            "run gives it that value); name as many devices, or leave it out"
        )


def _value_of(options: Sequence[str], *names: str) -> str | None:
    """Return the last value of an argument of `vllm serve`, "" where it is missing; None where the argument is not given."""
    parts = [option.partition("=") for option in options]
    words = [word for name, equals, value in parts for word in ((name.replace("_", "-"), value) if equals else (name,))]
    found = [value for name, value in pairwise([*words, ""]) if name.replace("_", "-") in names]
    return found[-1] if found else None


def samples_otherwise(options: Sequence[str]) -> list[str]:
    """Return a warning for each argument by which the sampler's probabilities may differ from the trainer's."""
    given = {
        name: (value, why) for name, (why, same) in SAMPLES_OTHERWISE.items() if (value := _value_of(options, name)) not in (None, *same)
    }
    return [
        f"[policy] vllm_options has {name}{f' {value}' if value and not value.startswith('-') else ''}: {why}; the run ends at the "
        "first step whose worst ratios differ by more than ratio_error_limit of [algorithm]"
        for name, (value, why) in given.items()
    ]


def max_model_len(options: Sequence[str]) -> int | None:
    """Return the context, in tokens, that the arguments set; None where they set none, or vLLM computes it."""
    match = _CONTEXT.fullmatch(_value_of(options, "--max-model-len") or "")
    return (int(float(match[1]) * _UNITS[match[2]]) or None) if match else None
