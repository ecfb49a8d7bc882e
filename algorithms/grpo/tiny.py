"""A model small enough to train on one CPU core while you watch: a 0.2 M-parameter Llama that reads and writes characters.

The task: `digit 437` has one answer digit, which depends on the last digit asked. Warm-started, the model gives one of four answers,
each about equally likely (BEHAVIOURS); reinforcement learning on a reward for one of them must then find that one. Everything is made
here, nothing is downloaded, and the same seed gives the same weights. Embeddings are untied: some servers do not reload a tied head.
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
"""What the warm-started model may answer, by the last digit asked; a target of training is the index of one of them."""

PAD: Final = "<|pad|>"
BOS: Final = "<|bos|>"
END: Final = "<|end|>"
UNKNOWN: Final = "<|unk|>"
ROLES: Final = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
SPECIAL_TOKENS: Final = (PAD, BOS, END, *ROLES, UNKNOWN)
CHARACTERS: Final = (*(chr(code) for code in range(32, 127)), "\n")
CHAT_TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' }}{{ message['content'] }}{{ '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
CONTEXT_TOKENS: Final = 1024
NUMBERS: Final = range(100, 1000)
HELD_OUT_NUMBERS: Final = tuple(sorted(n for last in range(10) for n in random.Random(last).sample(range(100 + last, 1000, 10), 20)))
"""In neither the warm start nor the training tasks: answers to these show that the rule was learnt, not the examples."""
TRAIN_NUMBERS: Final = tuple(sorted(set(NUMBERS) - set(HELD_OUT_NUMBERS)))

PREFERRED: Final = (0, 2, 0, 2, 1, 0, 2, 1, 3, 3)
"""By last digit, the behaviour that the warm start makes a little likelier, so that the greedy answer is no coin toss: it is right for
three last digits of ten, whatever the target (behaviours 1 and 3 agree on 4 and 9)."""
PREFERENCE: Final = 1.4  # how much likelier it is than each other one
WARM_START_STEPS: Final = 300  # enough for the four answers to come close to their shares; three to four seconds


def question(number: int) -> str:
    """What the agent asks about `number`."""
    return f"digit {number}"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each character and special token, with a chat template of roles; no network."""
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


def make_model(tokenizer: PreTrainedTokenizerFast, *, seed: int = 0) -> LlamaForCausalLM:
    """An untrained Llama of 0.2 M parameters for `tokenizer`'s vocabulary; `seed` decides the weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        architectures=[LlamaForCausalLM.__name__],  # what else than transformers reads the folder asks for it
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=False,
        pad_token_id=SPECIAL_TOKENS.index(PAD),
        bos_token_id=SPECIAL_TOKENS.index(BOS),
        eos_token_id=SPECIAL_TOKENS.index(END),
    )
    return LlamaForCausalLM(config)


def prompt_ids(tokenizer: Any, numbers: Sequence[int]) -> list[list[int]]:
    """The agent's question about each number through the chat template, ready for the assistant's reply, as token ids."""
    conversations = [[{"role": "user", "content": question(number)}] for number in numbers]
    texts: list[str] = tokenizer.apply_chat_template(conversations, add_generation_prompt=True, tokenize=False)
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def answer_shares() -> Tensor:
    """What to teach: float [10, 10], row = last digit of the number, column = answer digit, rows sum to 1."""
    shares = torch.zeros(10, 10)
    for digit in range(10):
        for place, behave in enumerate(BEHAVIOURS):
            shares[digit, behave(digit)] += PREFERENCE if place == PREFERRED[digit] else 1.0
    return shares / shares.sum(dim=1, keepdim=True)


def warm_start(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, *, seed: int = 0, steps: int = WARM_START_STEPS) -> float:
    """Teach the answer digit's distribution (`answer_shares`) and that a reply ends after it. Returns the last loss.

    The loss is against the whole distribution, not against samples of it, so no noise favours one behaviour; for the same reason each step
    shows one number of each last digit.
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


def make_policy(folder: str | Path, *, seed: int = 0) -> Path:
    """Write the warm-started model and its tokenizer to `folder`, as transformers does; returns its absolute path."""
    path = Path(folder)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed=seed)
    warm_start(model, tokenizer, seed=seed)
    tokenizer.save_pretrained(path)
    model.config.save_pretrained(path)
    return save_weights(model, path)
