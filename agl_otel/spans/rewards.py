"""Read rewards from spans: ours, also in the forms of older releases, and OpenTelemetry's evaluations. Pure; used by adapters and emitters.

The column Rewards (traces/sql/schema.sql) says for SQL what `evaluations_of` says here: a test holds them together.

Each function takes a stored span, a span of the OpenTelemetry SDK, the result of an emitter, or a mapping of attributes.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar, cast

from agl_otel.spans.attributes import RewardPydanticModel
from agl_otel.spans.tolerant import json_of, number_of
from agl_otel.types import SpanLike
from agl_otel.types.scores import is_usable
from agl_otel_hook import conventions

AGENTOPS_OUTPUTS: Final = ("agentops.task.output", "agentops.entity.output")
"""AgentOps' attribute for the result of a reward function, as JSON."""
OLD_REWARD: Final = "reward"
"""The reward attribute of annotations before 0.3."""
LABELS: Final[Mapping[str, float]] = {
    **dict.fromkeys(("pass", "passed", "true", "yes", "correct", "relevant", "success", "succeeded"), 1.0),
    **dict.fromkeys(("fail", "failed", "false", "no", "incorrect", "not_relevant", "irrelevant", "failure"), 0.0),
}
"""What a label of an evaluation without a score stands for, in any case; other labels are no rewards."""
_DIMENSION: Final = re.compile(re.escape(conventions.REWARD) + r"\.(0|[1-9][0-9]{0,8})\.(name|value)")
_LABEL: Final = re.compile(re.escape(conventions.REWARD) + r"\.(0|[1-9][0-9]{0,8})\.label")
_log = logging.getLogger(__name__)
Readable = SpanLike | Mapping[str, Any]
AnySpan = TypeVar("AnySpan", bound=Readable)


def dimensions_of(attributes: Mapping[str, Any]) -> list[tuple[int, str, float]]:
    """Return (index, name, value) of each dimension, by index. Dimensions without a number are skipped; NaN and infinities are kept."""
    found: dict[int, dict[str, Any]] = {}
    for key, value in attributes.items():
        if match := _DIMENSION.fullmatch(key):
            found.setdefault(int(match[1]), {})[match[2]] = value
    return [
        (index, str(parts.get("name", "")), value)
        for index, parts in sorted(found.items())
        if (value := number_of(parts.get("value"))) is not None
    ]


def unread_of(rewards: Mapping[str, str]) -> list[str]:
    """Return the labels of the evaluations in a map of the column Rewards that have a label and no number."""
    labels = [(int(match[1]), label) for key, label in rewards.items() if (match := _LABEL.fullmatch(key))]
    return [label for index, label in labels if conventions.reward_value_key(index) not in rewards]


class Evaluation(NamedTuple):
    """An event `gen_ai.evaluation.result`."""

    time: int
    """Unix nanoseconds."""
    name: str
    value: float
    response_id: str
    """The id of the model call's response that it is about; empty: its span says what it is about."""
    is_record: bool
    """Whether it was sent as a log record, which counts whatever its span is."""
    is_of_attempt: bool
    """Whether it is of the whole attempt, and of no call."""


def place_of(time: int, name: str, value: float) -> tuple[int, str, bool, float]:
    """Return the key that orders evaluations: by time, then name, then value, NaN last: every reader takes the same for the last."""
    return time, name, math.isnan(value), value


def last_of(evaluations: Iterable[Evaluation]) -> Evaluation | None:
    """Return the last of some evaluations; None without any."""
    return max(evaluations, key=lambda each: place_of(*each[:3]), default=None)


def evaluation_events(span: Readable) -> list[Any]:
    """Return the events of a span that are evaluations; those of a span with reward values of ours repeat them, and are left out."""
    repeats = any((match := _DIMENSION.fullmatch(key)) and match[2] == "value" for key in attributes_of(span))
    events = [event for event in getattr(span, "events", None) or () if event.name == conventions.EVALUATION]
    return [event for event in events if not repeats or getattr(event, "is_record", False)]


def evaluations_of(span: Readable) -> list[Evaluation]:
    """Return the evaluations with a number on a span, the last first."""
    found = [each for each in map(_evaluation, evaluation_events(span)) if each is not None]
    return sorted(found, key=lambda each: place_of(*each[:3]), reverse=True)


def evaluations_by_call(spans: Iterable[Readable]) -> dict[str, Evaluation]:
    """Return {id of a span, or of a model call's response: the last evaluation of it}, of stored spans."""
    found: dict[str, list[Evaluation]] = {}
    for span in spans:
        for each in _counted(span):
            if each.is_of_attempt:
                continue
            response = each.response_id or str(attributes_of(span).get(conventions.RESPONSE_ID, ""))
            for key in {str(getattr(span, "span_id", "")), response} - {""}:
                found.setdefault(key, []).append(each)
    return {key: last for key, several in found.items() if (last := last_of(several))}


def _counted(span: Readable) -> list[Evaluation]:
    late = _is_late(span)
    return [each for each in evaluations_of(span) if each.is_record or not late]


def _evaluation(event: Any) -> Evaluation | None:
    attributes: Mapping[str, Any] = event.attributes or {}
    value = score_of(attributes)
    if value is None:
        return None
    time = getattr(event, "time_unix_nano", None) or event.timestamp or 0
    name, response = (str(attributes.get(key, "")) for key in (conventions.EVALUATION_NAME, conventions.RESPONSE_ID))
    nanoseconds = time if isinstance(time, int) else int(time * 10**9)  # the SDK's are nanoseconds
    is_record, is_of_attempt = (bool(getattr(event, key, False)) for key in ("is_record", "is_of_attempt"))
    return Evaluation(nanoseconds, name, value, response, is_record, is_of_attempt)


def score_of(attributes: Mapping[str, Any]) -> float | None:
    """Return the number of an evaluation, or that which its label stands for; None without either."""
    value = number_of(attributes.get(conventions.EVALUATION_SCORE))
    return LABELS.get(str(attributes.get(conventions.EVALUATION_LABEL)).lower()) if value is None else value


def get_rewards_from_span(span: Readable) -> list[RewardPydanticModel]:
    """Return all dimensions of a span's reward, the primary one first, or its evaluations, the last first; [] without a usable first one.

    Other dimensions that are not usable (types/scores.py) are left out.
    """
    found = dimensions_of(attributes_of(span)) or [(0, each.name, each.value) for each in evaluations_of(span)]
    if not found or found[0][0] != 0 or not is_usable(found[0][2]):
        return []
    return [RewardPydanticModel(name=name, value=value) for _, name, value in found if is_usable(value)]


def get_reward_value(span: Readable) -> float | None:
    """Return the primary reward of a span, else its last evaluation; None without one, or if it is not usable (types/scores.py).

    None of a span that began after its attempt had ended counts. Also reads AgentOps' form and that of releases before 0.3.
    """
    value = _emitted(span)
    if value is None and (found := _counted(span)):
        value = found[0].value
    return usable(value)


def emitted_reward(span: Readable) -> float | None:
    """Return the reward of a span as `get_reward_value`, evaluations left out: those are of their span, or of a call."""
    return usable(_emitted(span))


def usable(value: float | None) -> float | None:
    """Return a reward, or None if it does not count (types/scores.py)."""
    return value if value is not None and is_usable(value) else None


def _emitted(span: Readable) -> float | None:
    if _is_late(span):
        return None
    found = dimensions_of(attributes_of(span))
    if found and found[0][0] == 0:
        return found[0][2]
    attributes = attributes_of(span)
    for key in AGENTOPS_OUTPUTS:
        legacy = _mapping(attributes.get(key))
        if legacy.get("type") == "reward":
            return _legacy(legacy.get("value"), key)
    if getattr(span, "name", None) == conventions.SPAN_ANNOTATION:
        return _legacy(attributes.get(OLD_REWARD), OLD_REWARD)
    return None


def _is_late(span: Readable) -> bool:
    return attributes_of(span).get(conventions.LATE) in (True, "true")  # text, where a collector stores no types


def is_reward_span(span: Readable) -> bool:
    """Whether a span has a reward."""
    return get_reward_value(span) is not None


def find_reward_spans(spans: Sequence[AnySpan]) -> list[AnySpan]:
    """Return the spans with a reward, in order."""
    return [span for span in spans if is_reward_span(span)]


def find_final_reward(spans: Sequence[Readable]) -> float | None:
    """Return the reward of the last span that has one, in the given order; None without one, or if it is not usable (types/scores.py).

    The last evaluation counts instead if it is not earlier than that span. If the runner set rewards, only those count. An evaluation that
    came as a log record is found on its span, and of an attempt without any on one of its own.
    """
    emitted = [(span, value) for span in reversed(spans) if (value := _emitted(span)) is not None]
    if given := [value for span, value in emitted if conventions.REWARD_GIVEN in attributes_of(span)]:
        return usable(given[0])
    last = last_of(each for span in spans for each in _counted(span))
    if emitted and (last is None or _began(emitted[0][0]) > last.time):
        return usable(emitted[0][1])
    return None if last is None else usable(last.value)


def _began(span: Readable) -> float:
    """Return the start of a span in Unix nanoseconds, as a float; 0 if it has none."""
    start: float | None = getattr(span, "start_time_unix_nano", None) or getattr(span, "start_time", None)
    return 0 if start is None else start if isinstance(start, int) else start * 10**9


def attributes_of(span: Readable) -> Mapping[str, Any]:
    """Return the attributes of a span in any of these forms."""
    return span if isinstance(span, Mapping) else span.attributes or {}


def _mapping(value: Any) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = json_of(value)
        except ValueError:
            return {}
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def _legacy(value: Any, key: str) -> float | None:
    if value is None:
        return None
    number = None if isinstance(value, str) else number_of(value)
    if number is None or not math.isfinite(number):
        _log.error("the reward in %r is %.100r, which is no finite number: it is left out", key, value)
        return None
    _log.warning("a reward was read from %r, a form that is no longer written: use emit_reward", key)
    return number
