"""What a wire dialect is: a row of functions and names. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from agl_otel.proxy.reply import Json, Reply


@dataclass(frozen=True, slots=True)
class Dialect:
    """One route of one protocol."""

    path: str
    """Under the base URL."""
    operation: Literal["chat", "text_completion", "embeddings"]
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
