"""What a wire dialect is: a row of functions and names. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from agl_otel.proxy.reply import Json, Reply

SAMPLING: Final = frozenset(
    {
        *("top_k", "min_p", "repetition_penalty", "length_penalty", "min_tokens", "stop_token_ids", "ignore_eos", "bad_words"),
        *("allowed_token_ids", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens"),
        *("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "separate_reasoning", "return_token_ids"),
        *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "regex", "ebnf"),
    }
)
"""Fields beyond the protocols by which vLLM and SGLang are told how to sample; litellm hands them on."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """One route of one protocol."""

    path: str
    """Under the base URL."""
    operation: Literal["chat", "text_completion", "embeddings"]
    fields: frozenset[str]
    """What a request may hold where litellm reads it: the protocol's own fields, and those of model servers that say how to sample."""
    extras: Mapping[str, Any]
    """{field: the value that makes the answer hold what capture needs}, put where the agent did not ask for it."""
    take: Callable[[Reply, Json], None]
    """Add a whole answer, or a chunk of one, to the reply."""
    said: Callable[[Mapping[str, Any]], Sequence[Any]]
    """The messages of a request, oldest first, as the agent sent them."""
    shown: Callable[[Any], Json]
    """One of them as the OpenTelemetry conventions write it."""
    least: Json = field(default_factory=dict[str, Any])
    """The smallest request that samples something, without a model."""
    provider: str = "openai"
    several_prompts: Callable[[Mapping[str, Any]], bool] = lambda _: False
    """Whether a request asks for replies to more than one prompt."""
    sampling: Mapping[str, str] | None = None
    """{sampling parameter of a resource: this dialect's name of it}; None: all, under the names they have."""
    samples: bool = True
    """Whether a model writes tokens: such a call has a number and counts against budgets."""
    via_chat: bool = False
    """Whether a server that does not speak it can be asked by chat/completions instead (litellm translates)."""
    key_headers: tuple[str, ...] = ("authorization",)
    """Where the server's key goes."""

    def conversation(self, body: Mapping[str, Any]) -> list[Json]:
        """The request as messages of the OpenTelemetry conventions."""
        return [self.shown(message) for message in self.said(body)]
