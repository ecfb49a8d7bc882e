"""Feedback on what an agent did, given by a person or a program after the fact."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BeforeValidator, Field, StrictBool, ValidationError, model_validator

from agl_otel.errors import UsageError
from agl_otel.types.model import Model, check_id, describe_invalid
from agl_otel.types.scores import AGENT, MAX_REWARD, RUNNER, is_usable

NAME: Final = "feedback"
TARGETS: Final = frozenset({"rollout_id", "attempt_id", "conversation_id", "response_id"})
"""The fields that say what feedback is about."""
LONGEST_TEXT: Final = 100_000  # characters
EARLIEST_SECONDS: Final = 946_684_800.0
"""2000-01-01: before it a collector takes no time."""
AHEAD_SECONDS: Final = 60.0
"""How far a clock may be ahead of ours."""


def _number(value: Any) -> Any:
    if isinstance(value, str):
        raise ValueError("must be a number, true or false, and no text")
    return value


def _usable(value: float | None) -> float | None:
    if value is not None and not is_usable(value):
        raise ValueError(f"must be a number of at most {MAX_REWARD:g}, of either sign")
    return value


def _person(source: str) -> str:
    if source in (RUNNER, AGENT):
        raise ValueError(f"{source!r} stands for rewards that came with the attempt: name who gives this one")
    return source


_Id = Annotated[str, AfterValidator(lambda value: check_id(value, "the id"))]
_Named = Annotated[str, Field(min_length=1, max_length=500)]
_Text = Annotated[str, Field(max_length=LONGEST_TEXT)]


class Feedback(Model):
    """A reward, a text or a corrected answer for an attempt, a conversation or a model call, which may have ended long ago.

    It names one of rollout, conversation and response, and has at least one of value, label, text and correction.
    """

    rollout_id: _Id | None = None
    attempt_id: _Id | None = None
    """With `rollout_id`; default: the latest attempt."""
    conversation_id: _Named | None = None
    """`gen_ai.conversation.id` of the spans; the attempt, or the adopted trace, that continued it last is meant."""
    response_id: _Named | None = None
    """`gen_ai.response.id` of the model call that is meant."""
    value: Annotated[float | StrictBool | None, BeforeValidator(_number), AfterValidator(_usable)] = None
    """The reward; true is 1, false 0."""
    label: Annotated[str, Field(max_length=500)] = ""
    """Without a value: `pass`, `fail` and others are 1 and 0 (docs/otlp.md); any other is no reward, but kept."""
    text: _Text = ""
    """An explanation."""
    correction: _Text = ""
    """What the agent should have answered."""
    name: _Named = NAME
    """The reward's name, by which training and exports choose."""
    source: Annotated[_Named, AfterValidator(_person)] = NAME
    """Who gave it, by which training chooses whom it trusts."""
    rubric: Annotated[str, Field(max_length=500)] = ""
    """By which rules, with their version."""
    time: Annotated[float | None, Field(ge=EARLIEST_SECONDS)] = None
    """When, in Unix seconds since 2000; default: now. Of several rewards the last counts."""
    id: _Id = Field(default_factory=lambda: uuid.uuid4().hex)
    """Names it: what is sent again with the same id and target is the same feedback."""

    @classmethod
    def of(cls, given: Mapping[str, Any] | str, what: str) -> Feedback:
        """Make feedback of fields, or of one object of JSON. Raises UsageError, which calls it `what`."""
        try:
            return cls.model_validate_json(given) if isinstance(given, str) else cls.model_validate(given)
        except ValidationError as error:
            raise UsageError(f"{what} is wrong: {describe_invalid(error)}") from None

    @model_validator(mode="after")
    def _whole(self) -> Feedback:
        targets = [each for each in (self.rollout_id, self.conversation_id, self.response_id) if each is not None]
        if len(targets) != 1:
            raise ValueError("name one of rollout_id, conversation_id and response_id")
        if self.attempt_id is not None and self.rollout_id is None:
            raise ValueError("attempt_id needs rollout_id")
        if self.value is None and not (self.label or self.text or self.correction):
            raise ValueError("give a value, a label, a text or a correction")
        if self.time is not None and self.time > time.time() + AHEAD_SECONDS:
            raise ValueError("time is in the future")
        return self


class StoredEvaluation(Model):
    """An evaluation that was sent as a log record, feedback among them."""

    attempt_id: str
    span_id: str
    """The span that it is of; empty: the call of `response_id`, and without that the whole attempt."""
    response_id: str
    id: str
    """The id of the feedback; empty where an evaluator sent the record itself."""
    time: float
    name: str
    value: float | None
    """The reward; of a known label its number. None where there is none, or it does not count (types/scores.py)."""
    label: str
    text: str
    correction: str
    source: str
    rubric: str
    stored: str
    """When it was stored (RFC 3339), where it counts as given at another time; else empty."""
    words: str
    """All of it in one sentence."""


class GivenFeedback(Model):
    """Feedback that was stored."""

    id: str
    rollout_id: str | None = None
    """None while it is not known whose model call or trace is meant; the collector finds out (docs/late-rewards.md)."""
    attempt_id: str | None = None
    is_new: bool = True
    """False if it was stored before."""
