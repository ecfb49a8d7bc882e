"""Read rewards from spans, also in the forms of older releases. Pure; used by adapters and emitters.

Each function takes a stored span, a span of the OpenTelemetry SDK, the result of an emitter, or a mapping of attributes.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar, cast

from agl_otel.spans.attributes import RewardPydanticModel
from agl_otel.spans.tolerant import json_of, number_of
from agl_otel.types import SpanLike
from agl_otel_hook import conventions

AGENTOPS_OUTPUTS: Final = ("agentops.task.output", "agentops.entity.output")
"""AgentOps' attribute for the result of a reward function, as JSON."""
OLD_REWARD: Final = "reward"
"""The reward attribute of annotations before 0.3."""
_DIMENSION: Final = re.compile(re.escape(conventions.REWARD) + r"\.(0|[1-9][0-9]{0,8})\.(name|value)")
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


def get_rewards_from_span(span: Readable) -> list[RewardPydanticModel]:
    """Return all dimensions of a span's reward, the primary one first; [] without a primary one.

    A dimension whose value is not a finite number is ignored.
    """
    found = [each for each in dimensions_of(attributes_of(span)) if math.isfinite(each[2])]
    return [RewardPydanticModel(name=name, value=value) for _, name, value in found] if found and found[0][0] == 0 else []


def get_reward_value(span: Readable) -> float | None:
    """Return the primary reward of a span; None without one, and where the span began after its attempt had ended, when none counts.

    Also reads AgentOps' form and that of releases before 0.3.
    """
    if attributes_of(span).get(conventions.LATE) in (True, "true"):  # text, where a collector stores no types
        return None
    if rewards := get_rewards_from_span(span):
        return rewards[0].value
    attributes = attributes_of(span)
    for key in AGENTOPS_OUTPUTS:
        legacy = _mapping(attributes.get(key))
        if legacy.get("type") == "reward":
            return _legacy(legacy.get("value"), key)
    if getattr(span, "name", None) == conventions.SPAN_ANNOTATION:
        return _legacy(attributes.get(OLD_REWARD), OLD_REWARD)
    return None


def is_reward_span(span: Readable) -> bool:
    """Whether a span has a reward."""
    return get_reward_value(span) is not None


def find_reward_spans(spans: Sequence[AnySpan]) -> list[AnySpan]:
    """Return the spans with a reward, in order."""
    return [span for span in spans if is_reward_span(span)]


def find_final_reward(spans: Sequence[Readable]) -> float | None:
    """Return the reward of the last span that has one, in the given order; None without one.

    If the runner set rewards, only those count.
    """
    last = [span for span in reversed(spans) if get_reward_value(span) is not None]
    given = (span for span in last if conventions.REWARD_GIVEN in attributes_of(span))
    return next((get_reward_value(span) for span in (*given, *last)), None)


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
