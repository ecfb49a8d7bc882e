"""The trace reader's results for adapters: flat arrays with offsets, without a Python object per token.

A ground-floor module: it imports numpy and agl_otel.types only, and does no I/O.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from agl_otel.types import AttemptedRollout, Rollout, Verdict
from agl_otel.types.scores import AGENT

AttemptKey = tuple[str, str]
"""(rollout id, attempt id)."""
VOCABULARY: Final = 1 << 18
"""Token ids below this are shared; the largest vocabularies have about this size."""


def shared(ids: list[int]) -> list[int]:
    """Return the same token ids as shared int objects: 8 bytes of the list for each, and not 28 more for its own object."""
    try:
        return list(map(_numbers().__getitem__, ids)) if min(ids, default=0) >= 0 else ids  # a tuple takes negative numbers from its end
    except IndexError:  # not ids of a model
        return ids


@functools.cache
def _numbers() -> tuple[int, ...]:
    return tuple(range(VOCABULARY))


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths in one flat array: row i is `values[offsets[i]:offsets[i + 1]]`."""

    values: NDArray[np.generic]
    offsets: NDArray[np.int64]
    """n + 1 positions into `values`, starting at 0."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> NDArray[np.generic]:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def __iter__(self) -> Iterator[NDArray[np.generic]]:
        return (self[row] for row in range(len(self)))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return the length of each row."""
        return np.diff(self.offsets)

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int] | Sequence[float] | NDArray[np.generic]], dtype: type[np.generic]) -> Ragged:
        """Build from a sequence of rows (for tests and small data)."""
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        parts = [np.asarray(row, dtype=dtype) for row in rows if len(row)]
        return cls(np.concatenate(parts) if parts else np.zeros(0, dtype=dtype), offsets)


@dataclass(frozen=True)
class CallColumns:
    """Model calls, one row for each stored (call, choice), sorted by (rollout, attempt, process, call, choice).

    Calls that were sent without a rollout id come first in their process, with numbers above those of the others.
    Every sequence has one entry per row. Token ids are as stored: if `prefix_call` is not 0, `prompt` holds only what follows the prompt
    and response of the row (same rollout, attempt and process) with that call and `prefix_choice`.
    """

    rollout_id: list[str]
    attempt_id: list[str]
    process: list[str]
    span_id: list[str]
    parent_span_id: list[str]
    call: NDArray[np.int64]
    choice: NDArray[np.int64]
    sequence: NDArray[np.uint64]
    prefix_call: NDArray[np.int64]
    """0: the prompt is full."""
    prefix_choice: NDArray[np.int64]
    prompt: Ragged
    """int32 token ids."""
    response: Ragged
    """int32 token ids."""
    logprobs: Ragged
    """float32, natural log; a row shorter than its response means that they are missing."""
    model_version: list[str]
    agent: list[str]
    """Name of the agent that made the call; empty where unknown."""
    incomplete: list[str]
    """Why the reply is incomplete; empty for a complete one."""
    temperature: NDArray[np.float64]
    """The sampling temperature, NaN if it is unknown."""
    contract: list[str]
    """types.sampling.Contract.dumps; empty where none was recorded. Equal ones are one object."""
    has_media: NDArray[np.bool_] | None = None
    """Whether the stored part of the prompt seems to hold images, audio or video, which are in the texts; None: unknown."""
    truncated: NDArray[np.bool_] | None = None
    """Whether the reply reached its length limit (finish reason `length`); None: unknown."""
    top_p: NDArray[np.float64] | None = None
    """The request's `top_p`, NaN if its span has none; None: unknown for all."""
    response_id: list[str] | None = None
    """The id of the model call's response, which the agent's own span of the call has as well; None: unknown for all."""
    began: NDArray[np.int64] | None = None
    """In Unix nanoseconds, by the clock of what recorded the call; None: unknown for all."""
    ended: NDArray[np.int64] | None = None
    """Likewise."""

    def __len__(self) -> int:
        return len(self.rollout_id)

    @functools.cached_property
    def further_choice(self) -> NDArray[np.bool_]:
        """For each row, whether it is a further choice of the same call as the row before (n > 1)."""
        further = np.zeros(len(self), np.bool_)
        if len(self) > 1:  # numbers first, which leaves few candidates: texts are compared in Python
            further[1:] = (self.call[1:] == self.call[:-1]) & (self.call[1:] > 0) & (self.choice[1:] > self.choice[:-1])
        places = (self.process, self.attempt_id, self.rollout_id)
        for row in np.flatnonzero(further).tolist():
            further[row] = all(column[row] == column[row - 1] for column in places)
        return further

    @property
    def count(self) -> int:
        """Number of calls; the choices of one call count once."""
        return len(self) - int(self.further_choice.sum())

    @property
    def several_choices(self) -> NDArray[np.bool_]:
        """For each row, whether its call has more than one choice."""
        further = self.further_choice
        return further | np.append(further[1:], np.zeros(min(1, len(self)), np.bool_))


@dataclass(frozen=True)
class CallTexts:
    """The content of model calls, as JSON by OpenTelemetry's conventions: one entry per row of CallColumns, empty if not read."""

    instructions: list[str]
    """`gen_ai.system_instructions`."""
    asked: list[str]
    """`gen_ai.input.messages`."""
    answered: list[str]
    """`gen_ai.output.messages`."""
    tools: list[str]
    """`gen_ai.tool.definitions`."""
    versions: list[str]
    """`agentlightning.llm.weight_versions`."""
    experts: list[str]
    """`agentlightning.llm.routed_experts`."""
    bridges: list[str]
    """`agentlightning.llm.bridge`."""


@dataclass(frozen=True)
class SpanColumns:
    """The tree of spans: one row for each span, in no order."""

    rollout_id: list[str]
    attempt_id: list[str]
    span_id: list[str]
    parent_span_id: list[str]
    name: list[str]
    sequence: NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.rollout_id)


@dataclass(frozen=True)
class Reward:
    """One dimension of one reward annotation, or an evaluation."""

    sequence: int
    span_id: str
    index: int
    """0 is the primary dimension; an evaluation is one of its own."""
    name: str
    value: float
    time: int | None = None
    """When an evaluation was made, in Unix nanoseconds; None for other rewards."""
    response_id: str = ""
    """Of an evaluation the model call's response: that it names, else that of its span."""
    source: str = AGENT
    """Who gave it: RUNNER, AGENT (all that came as telemetry), or the source of feedback."""

    def is_of(self, dimension: str | None) -> bool:
        """Whether it belongs to the dimension `name`; None: the primary one."""
        return self.index == 0 if dimension is None else self.name == dimension


@dataclass(frozen=True)
class Traces:
    """Everything observed of a set of rollouts, read at once behind a barrier, together with the rollouts from the queue."""

    rollouts: list[Rollout | AttemptedRollout]
    """From the queue, in the requested order; each with its latest attempt if it has one."""
    calls: CallColumns
    rewards: dict[AttemptKey, list[Reward]]
    """By attempt, in order: the last one counts."""
    verdicts: dict[AttemptKey, Verdict]
    """For every attempt of the rollouts, including those without spans."""
    texts: CallTexts | None = None
    """The calls' content, if requested or needed (to explain split reasons, or for images); else None."""
    tree: SpanColumns | None = None
    """All spans, if requested; else None."""
    call_errors: Counter[str] = field(default_factory=Counter[str])
    """What model servers answered instead of a reply, as "HTTP 400: stop is not supported": {text: number of calls}."""
    spans: int = 0
    """Number of spans read."""
    highest_sequence: dict[str, int] = field(default_factory=dict[str, int])
    """{rollout id: highest sequence number read}; with `digest` it identifies the data read."""
    digest: str = ""
    """Hash of the spans' identities; it changes when a late span arrives."""
    evaluations: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    """{rollout id: identities of its evaluations that came as log records}; without those that have none."""

    def trusting(self, sources: Collection[str] | None) -> Traces:
        """Return the traces with the rewards of these sources alone; None: of all."""
        if sources is None:
            return self
        kept = {key: [each for each in found if each.source in sources] for key, found in self.rewards.items()}
        return replace(self, rewards={key: found for key, found in kept.items() if found})

    @classmethod
    def joined(cls, first: Traces, second: Traces) -> Traces:
        """Join the results of two reads of different rollouts into that of one read."""
        texts = None
        if first.texts is not None or second.texts is not None:
            texts = _joined(first.texts or _no_texts(first.calls), second.texts or _no_texts(second.calls))
        return cls(
            [*first.rollouts, *second.rollouts],
            _joined(first.calls, second.calls),
            first.rewards | second.rewards,
            first.verdicts | second.verdicts,
            texts,
            _joined(first.tree, second.tree) if first.tree is not None and second.tree is not None else None,
            first.call_errors + second.call_errors,
            spans=first.spans + second.spans,
            highest_sequence=first.highest_sequence | second.highest_sequence,
            digest=joined_digest(first.digest, second.digest),
            evaluations=first.evaluations | second.evaluations,
        )

    @property
    def alarms(self) -> list[AttemptKey]:
        """Attempts that are unproven although their runner reported a hooked agent."""
        return [key for key, verdict in self.verdicts.items() if verdict.alarm]


def digest_of(identities: int, spans: int) -> str:
    """Return Traces.digest for `spans` spans; `identities` is the exclusive or of the hashes of their identities."""
    return f"{identities:016x}-{spans}"


def joined_digest(first: str, second: str) -> str:
    """Return the digest of two reads of different rollouts; an empty one is of no read."""
    (left, spans), (right, more) = (
        (int(identities or "0", 16), int(count or "0")) for identities, _, count in (first.partition("-"), second.partition("-"))
    )
    return digest_of(left ^ right, spans + more)


def _joined(first: Any, second: Any) -> Any:
    """Concatenate two sets of columns."""
    return type(first)(**{each.name: _column(getattr(first, each.name), getattr(second, each.name)) for each in fields(first)})


def _column(first: Any, second: Any) -> Any:
    if first is None or second is None:
        return None
    if isinstance(first, Ragged):
        values = np.concatenate([first.values, second.values])
        return Ragged(values, np.concatenate([first.offsets, second.offsets[1:] + first.offsets[-1]]))
    return np.concatenate([first, second]) if isinstance(first, np.ndarray) else [*first, *second]


def _no_texts(calls: CallColumns) -> CallTexts:
    return CallTexts(*([""] * len(calls) for _ in fields(CallTexts)))
