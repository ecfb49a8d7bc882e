"""The type of a wire dialect: a row of functions and names. Pure."""

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
        *("return_weight_versions", "return_input_ids_in_sglext", "return_output_ids_in_sglext", "enable_response_messages"),
        *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "regex", "ebnf"),
    }
)
"""Sampling fields of vLLM and SGLang beyond the protocols; litellm passes them on."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """One route of one protocol."""

    path: str
    """Path below the base URL."""
    operation: Literal["chat", "text_completion", "embeddings"]
    fields: frozenset[str]
    """Fields allowed in requests to litellm: those of the protocol, and sampling fields of model servers."""
    extras: Mapping[str, Any]
    """{field: value} that make the answer contain token ids and log-probs; set if the agent did not."""
    take: Callable[[Reply, Json], None]
    """Add a whole answer, or a chunk of one, to the reply."""
    messages: Callable[[Mapping[str, Any]], Sequence[Any]]
    """The messages of a request, oldest first, as the agent sent them."""
    convert: Callable[[Any], Json]
    """Convert one of them to the OpenTelemetry conventions."""
    engine_extras: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Those for what only some engines say; a server that refuses them is asked for the others alone."""
    stream_extras: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Those for a stream of a server that refuses `extras` there (SGLang)."""
    smallest_request: Json = field(default_factory=dict[str, Any])
    """The smallest request that samples something, without a model."""
    provider: str = "openai"
    several_prompts: Callable[[Mapping[str, Any]], bool] = lambda _: False
    """Whether a request has more than one prompt."""
    sampling: Mapping[str, str] | None = None
    """{sampling parameter of a resource: its name in this dialect}; None: all, with unchanged names."""
    samples: bool = True
    """Whether a call samples tokens: it then has a number and counts against budgets."""
    via_chat: bool = False
    """Whether litellm can translate it to chat/completions for servers that lack it."""
    key_headers: tuple[str, ...] = ("authorization",)
    """Headers for the server's key."""
    levels: Sequence[Mapping[str, Any]] = field(init=False)
    """What may be requested for capture, the most first and nothing last: the next where a server refuses one."""

    def __post_init__(self) -> None:
        most = [{**self.extras, **self.engine_extras}] if self.engine_extras else []
        object.__setattr__(self, "levels", [*most, *([self.extras] if self.extras else []), {}])

    def conversation(self, body: Mapping[str, Any]) -> list[Json]:
        """The request as messages of the OpenTelemetry conventions."""
        return [self.convert(message) for message in self.messages(body)]
