"""Tokenisers with the chat templates of model families (tests/templates), small enough to be made where they are used."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "templates"
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {"at": {}}}}}
]
WORDS = ("yes", "no", "Tōkyō", "look at", "the answer is 42", "\n\n", " ", "{'a': 1}", "line\nline", "", "x", "<b>", "…")


@dataclass(frozen=True)
class Family:
    template: str
    ends: tuple[str, ...]
    """With which the model ends an answer: without and with a tool call."""
    specials: tuple[str, ...] = ()
    thinks: bool = False
    most_calls: int = 0
    spelled: bool = False
    """Whether the template takes arguments as text."""
    systems: bool = True
    """Whether a system message may stand in the middle."""
    opened: str = ""
    """What the generation prompt writes of the answer."""


CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
FAMILIES = {
    "qwen2_5": Family("qwen2_5", ("<|im_end|>",) * 2, CHATML, most_calls=3),
    "qwen3": Family("qwen3", ("<|im_end|>",) * 2, (*CHATML, "<think>", "</think>"), thinks=True, most_calls=3),
    "llama3": Family("llama3", ("<|eot_id|>",) * 2, ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    "llama3_1": Family(
        "llama3_1", ("<|eot_id|>",) * 2, ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), most_calls=1
    ),
    "glm4moe": Family(
        "glm4moe",
        ("<|user|>", "<|observation|>"),
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<think>", "</think>"),
        thinks=True,
        most_calls=2,
    ),
    "deepseekv3": Family(
        "deepseekv3",
        ("<｜end▁of▁sentence｜>",) * 2,
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
        thinks=True,
        systems=False,
    ),
    "phi3": Family("phi3", ("<|end|>",) * 2, ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>")),
}


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE of a few merges, so that a text has many token sequences, with the family's special tokens and template."""
    family = FAMILIES[name]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=list(family.specials), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    bpe.train_from_iterator([*WORDS, (TEMPLATES / f"{family.template}.jinja").read_text(), json.dumps(TOOLS)] * 3, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=family.specials[0], eos_token=family.specials[-1])
    fast.chat_template = (TEMPLATES / f"{family.template}.jinja").read_text()
    return fast
