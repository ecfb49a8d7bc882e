"""A tiny model that trains on one CPU core: a character-level Llama with 0.2 M parameters.

The task: the answer to `digit 437` is one digit, which depends on the last digit of the number. The warm-started model gives one of four
answers with about equal probability (BEHAVIOURS); reinforcement learning rewards one of them. Nothing is downloaded, and equal seeds give
equal weights. The embeddings are untied unless asked for, because some servers do not reload a tied head. Requests may offer tools, so that
any agent can be tried with it, but the warm start teaches it none.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from agl_otel.algorithms.grpo.policy import save_weights

BEHAVIOURS: Final[tuple[Callable[[int], int], ...]] = (
    lambda digit: digit,
    lambda digit: (digit + 1) % 10,
    lambda digit: (digit + 2) % 10,
    lambda digit: 9 - digit,
)
"""The possible answers of the warm-started model, by the number's last digit; a training target is an index in this tuple."""

PAD: Final = "<|pad|>"
BOS: Final = "<|bos|>"
END: Final = "<|end|>"
UNKNOWN: Final = "<|unk|>"
ROLES: Final = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
SPECIAL_TOKENS: Final = (PAD, BOS, END, *ROLES, UNKNOWN)
CHARACTERS: Final = (*(chr(code) for code in range(32, 127)), "\n")
CHAT_TEMPLATE: Final = (
    "{{ bos_token }}"
    "{% if tools %}{{ '<|system|>' }}{% for tool in tools %}{{ tool.function.name }}"
    "({{ ((tool.function.parameters or {}).properties or {}) | join(', ') }})\n{% endfor %}{{ '<|end|>' }}{% endif %}"
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}{{ message['content'] or '' }}"
    "{% for call in message.tool_calls or [] %}{{ '<tool_call>' }}"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}{{ '</tool_call>' }}{% endfor %}"
    "{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""Of tools the names and those of their parameters, as a character is a token here; calls as Hermes and Qwen write them (tools.py)."""
CONTEXT_TOKENS: Final = 1024
NUMBERS: Final = range(100, 1000)
HELD_OUT_NUMBERS: Final = tuple(sorted(n for last in range(10) for n in random.Random(last).sample(range(100 + last, 1000, 10), 20)))
"""Used in neither the warm start nor the training tasks, to test whether the rule was learnt rather than the examples."""
TRAIN_NUMBERS: Final = tuple(sorted(set(NUMBERS) - set(HELD_OUT_NUMBERS)))

PREFERRED: Final = (0, 2, 0, 2, 1, 0, 2, 1, 3, 3)
"""For each last digit, the behaviour that the warm start makes more likely, so that the greedy answer is determined: for every target it
is right for three of ten last digits (behaviours 1 and 3 agree on 4 and 9)."""
PREFERENCE: Final = 1.4  # its probability relative to that of each other behaviour
WARM_START_STEPS: Final = 300  # until the four answers are close to their shares; three to four seconds


def question(number: int) -> str:
    """Return the agent's question about `number`."""
    return f"digit {number}"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Create a tokenizer with one token for each character and special token, and with a chat template."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        additional_special_tokens=list(ROLES),
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(tokenizer: PreTrainedTokenizerFast, *, seed: int = 0, tied: bool = False) -> LlamaForCausalLM:
    """Create an untrained Llama with 0.2 M parameters for `tokenizer`'s vocabulary; `seed` determines the weights.

    With `tied` the head is the embedding, as in many small models.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        architectures=[LlamaForCausalLM.__name__],  # needed by vLLM, which reads the folder
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=tied,
        pad_token_id=SPECIAL_TOKENS.index(PAD),
        bos_token_id=SPECIAL_TOKENS.index(BOS),
        eos_token_id=SPECIAL_TOKENS.index(END),
    )
    return LlamaForCausalLM(config)


def prompt_ids(tokenizer: Any, numbers: Sequence[int]) -> list[list[int]]:
    """Return the token ids of the question about each number in the chat template, up to the assistant's reply."""
    conversations = [[{"role": "user", "content": question(number)}] for number in numbers]
    texts: list[str] = tokenizer.apply_chat_template(conversations, add_generation_prompt=True, tokenize=False)
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def answer_shares() -> Tensor:
    """Return the answer distribution of the warm start: float [10, 10], row = last digit, column = answer digit, rows sum to 1."""
    shares = torch.zeros(10, 10)
    for digit in range(10):
        for place, behave in enumerate(BEHAVIOURS):
            shares[digit, behave(digit)] += PREFERENCE if place == PREFERRED[digit] else 1.0
    return shares / shares.sum(dim=1, keepdim=True)


def warm_start(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, *, seed: int = 0, steps: int = WARM_START_STEPS) -> float:
    """Train the model to answer with a digit distributed as `answer_shares`, and then to end the reply. Returns the last loss.

    The target is the distribution rather than samples of it, and each step has one number for each last digit, so that no noise favours
    one behaviour.
    """
    source = random.Random(seed)
    end: Any = tokenizer.eos_token_id
    digits = torch.tensor([tokenizer(str(digit))["input_ids"][0] for digit in range(10)])
    prompts = [torch.tensor(prompt_ids(tokenizer, [number for number in TRAIN_NUMBERS if number % 10 == last])) for last in range(10)]
    target = torch.zeros(10, len(tokenizer)).index_add(1, digits, answer_shares())
    ends = torch.full((10,), end)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0, fused=True)
    loss = torch.zeros(())
    for _ in range(steps):
        asked = torch.stack([source.choice(of_digit) for of_digit in prompts])
        shown = digits[torch.tensor([source.randrange(10) for _ in range(10)])]
        logits = model(input_ids=torch.cat([asked, shown[:, None]], dim=1), logits_to_keep=2).logits
        loss = F.cross_entropy(logits[:, 0], target) + F.cross_entropy(logits[:, 1], ends)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def make_policy(folder: str | Path, *, seed: int = 0, tied: bool = False) -> Path:
    """Save the warm-started model and its tokenizer to `folder` in transformers' format; return the folder's absolute path."""
    path = Path(folder)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed=seed, tied=tied)
    warm_start(model, tokenizer, seed=seed)
    tokenizer.save_pretrained(path)
    model.config.save_pretrained(path)
    return save_weights(model, path)
