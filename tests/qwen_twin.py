"""A random model with the architecture of Qwen2.5-0.5B-Instruct, its vocabulary of 151,936 ids and tied head, but two layers.

Its tokenizer is made on the spot: byte-level BPE, Qwen's special tokens, and a chat template that writes tools and tool
calls as Qwen2.5's does. The tokenizer uses the first ids; the others exist in the embedding alone, as in a padded vocabulary.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from agl_otel.algorithms.grpo.policy import save_weights

VOCABULARY: Final = 151_936
END: Final = "<|im_end|>"
NO_LOSS: Final = -100
MOST_MERGED: Final = 640
"""Ids of bytes, merges and special tokens."""
SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", END)
TOOL_TOKENS: Final = ("<tool_call>", "</tool_call>")
"""Single ids, as in Qwen2.5's tokenizer, but text: they are kept where special tokens are left out."""
CHAT_TEMPLATE: Final = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] + '\n\n' }}{%- endif %}
    {{- '# Tools\n\nFunctions:\n<tools>' }}
    {%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\n</tools>\n\nCall one by <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call><|im_end|>\n' }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls %}
            {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}{{- call.function.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""


def make_tokenizer(lines: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Create the tokenizer: special and tool tokens, the 256 bytes, and merges learnt from `lines`."""
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated")  # as transformers does when it loads a tokenizer of Qwen2
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=MOST_MERGED, initial_alphabet=alphabet, special_tokens=[*SPECIAL], show_progress=False)
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.add_tokens([AddedToken(each, normalized=False) for each in TOOL_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=SPECIAL[0], clean_up_tokenization_spaces=False, model_max_length=1 << 15
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(*, seed: int = 0, **widths: Any) -> Qwen2ForCausalLM:
    """Create the model with random weights; `widths`: options of Qwen2Config other than those of Qwen2.5-0.5B."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 2,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1 << 15,
        "tie_word_embeddings": True,
        "eos_token_id": SPECIAL.index(END),
        "bos_token_id": None,
        "architectures": [Qwen2ForCausalLM.__name__],
    }
    return Qwen2ForCausalLM(Qwen2Config(**(sizes | widths)))


def make_twin(folder: Path, *, seed: int = 0, **widths: Any) -> Path:
    """Save the model and its tokenizer to `folder` in transformers' format; return its absolute path."""
    return _save(folder, make_model(seed=seed, **widths), make_tokenizer())


def make_caller(
    folder: Path, conversations: Sequence[Sequence[dict[str, Any]]], tools: list[dict[str, Any]], *, steps: int, **widths: Any
) -> Path:
    """Save a twin that replies as the assistant of these conversations does, where these are equal in it; return its absolute path.

    It is trained with an embedding of the ids that the tokenizer uses and of one more, whose copies all others become.
    """
    tokenizer = make_tokenizer([_rendered(make_tokenizer(), conversation, tools) for conversation in conversations])
    used = len(tokenizer)
    small, twin = make_model(vocab_size=used + 1, **widths), make_model(**widths)
    others = torch.zeros(used + 1).index_fill_(0, torch.tensor(used), math.log(VOCABULARY - used))
    samples = [_sample(tokenizer, conversation, tools) for conversation in conversations]
    optimizer, source = torch.optim.AdamW(small.parameters(), lr=2e-3, weight_decay=0.0), random.Random(0)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    for _ in range(steps):
        batch = source.sample(samples, min(4, len(samples)))
        width = max(len(ids) for ids, _ in batch)
        ids = torch.tensor([row + [0] * (width - len(row)) for row, _ in batch])
        labels = torch.tensor([row + [NO_LOSS] * (width - len(row)) for _, row in batch])
        logits = small(input_ids=ids, use_cache=False).logits[:, :-1] + others
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=NO_LOSS).backward()
        torch.nn.utils.clip_grad_norm_(small.parameters(), 1.0)
        optimizer.step()
        decay.step()
    weights = small.state_dict()
    with torch.no_grad():
        for name, tensor in twin.state_dict().items():
            rows = torch.arange(len(tensor)).clamp(max=len(weights[name]) - 1)
            tensor.copy_(weights[name][rows])
    return _save(folder, twin, tokenizer)


def _rendered(tokenizer: Any, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]], *, prompt: bool = False) -> str:
    return tokenizer.apply_chat_template([*messages], tools=tools, add_generation_prompt=prompt, tokenize=False)


def _sample(tokenizer: Any, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """Return the token ids of a conversation, and as labels those that the assistant wrote."""
    ids: list[int] = []
    labels: list[int] = []
    done = ""
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            before = _rendered(tokenizer, messages[:place], tools, prompt=True)
            after = _rendered(tokenizer, messages[: place + 1], tools).removesuffix("\n")
            told, written = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (before[len(done) :], after[len(before) :]))
            ids, labels, done = ids + told + written, labels + [NO_LOSS] * len(told) + written, after
    return ids, labels


def _save(folder: Path, model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> Path:
    tokenizer.save_pretrained(folder)
    model.config.save_pretrained(folder)
    return save_weights(model, folder)
