"""The tiny model's warm start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from agl_otel.algorithms.grpo import tiny
from agl_otel.algorithms.grpo.policy import Policy, load_policy

pytestmark = pytest.mark.full


@pytest.mark.parametrize("which", ["made", "committed"])
def test_a_warm_started_model_gives_the_four_answers_in_their_shares(which: str, tiny_policy: Path, tmp_path: Path) -> None:
    """For numbers that were not in its training data."""
    policy = load_policy(tiny_policy if which == "committed" else tiny.make_policy(tmp_path))
    prompts = torch.tensor(tiny.prompt_ids(policy.tokenizer, tiny.HELD_OUT_NUMBERS))
    digits = torch.tensor([policy.tokenizer(str(digit))["input_ids"][0] for digit in range(10)])
    shares = tiny.answer_shares()[torch.tensor(tiny.HELD_OUT_NUMBERS) % 10]
    with torch.no_grad():
        answers = policy.model(input_ids=prompts, logits_to_keep=1).logits[:, 0].softmax(-1)
        answered = torch.cat([prompts, digits[torch.arange(len(prompts)) % 10, None]], dim=1)
        ends = policy.model(input_ids=answered, logits_to_keep=1).logits[:, 0].softmax(-1)[:, policy.tokenizer.eos_token_id]
    torch.testing.assert_close(answers[:, digits], shares, atol=0.08, rtol=0)
    assert answers[:, digits].argmax(1).tolist() == shares.argmax(1).tolist()
    assert ends.min() > 0.99


def test_the_same_seed_gives_the_same_weights() -> None:
    tokenizer = tiny.make_tokenizer()
    made = []
    for seed in (3, 3, 4):
        model = tiny.make_model(tokenizer, seed=seed)
        tiny.warm_start(model, tokenizer, seed=seed, steps=2)
        made.append(torch.cat([weight.detach().flatten() for weight in model.parameters()]))
    assert torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2])


def test_its_chat_template_takes_tools_and_is_otherwise_the_committed_one(tiny_policy: Path) -> None:
    tokenizer = tiny.make_tokenizer()
    model = tiny.make_model(tokenizer)
    policy = Policy(model, tokenizer, frozenset(), tiny.CONTEXT_TOKENS)
    parameters = {"type": "object", "properties": {"city": {"type": "string"}, "year": {"type": "integer"}}}
    tools = [
        {"type": "function", "function": {"name": "population", "parameters": parameters}},
        {"type": "function", "function": {"name": "now"}},
    ]
    call = {"id": "a", "type": "function", "function": {"name": "population", "arguments": {"city": "A1"}}}
    asked = [{"role": "system", "content": "Count."}, {"role": "user", "content": "digit 437"}]
    answered = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "tool_call_id": "a", "content": "7"}]
    shown = policy.decode(policy.prompt_ids([*asked, *answered], tools), skip_special_tokens=False)
    assert shown == (
        "<|bos|><|system|>population(city, year)\nnow()\n<|end|><|system|>Count.<|end|><|user|>digit 437<|end|>"
        '<|assistant|><tool_call>{"name": "population", "arguments": {"city": "A1"}}</tool_call><|end|><|tool|>7<|end|><|assistant|>'
    )
    assert policy.prompt_ids(asked) == load_policy(tiny_policy).prompt_ids(asked)
