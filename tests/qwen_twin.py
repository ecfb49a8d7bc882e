"""A random model with the architecture of Qwen2.5-0.5B-Instruct, its vocabulary of 151,936 ids and tied head, but two layers.

Its tokenizer is made on the spot: byte-level BPE without merges, Qwen's special tokens, and a chat template that writes tools and tool
calls as Qwen2.5's does. The tokenizer uses the first ids; the others exist in the embedding alone, as in a padded vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from agl_otel.algorithms.grpo.policy import save_weights

VOCABULARY: Final = 151_936
END: Final = "<|im_end|>"
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


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Create the tokenizer: 256 bytes, the special tokens and the tool tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: place for place, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*SPECIAL])
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
        "eos_token_id": len(make_tokenizer()) - len(TOOL_TOKENS) - 1,
        "bos_token_id": None,
        "architectures": [Qwen2ForCausalLM.__name__],
    }
    return Qwen2ForCausalLM(Qwen2Config(**(sizes | widths)))


def make_twin(folder: Path, *, seed: int = 0, **widths: Any) -> Path:
    """Save the model and its tokenizer to `folder` in transformers' format; return its absolute path."""
    make_tokenizer().save_pretrained(folder)
    model = make_model(seed=seed, **widths)
    model.config.save_pretrained(folder)
    return save_weights(model, folder)
