"""Say evaluations, and feedback among them, for people. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agl_otel.spans.rewards import score_of, usable
from agl_otel.types.feedback import StoredEvaluation
from agl_otel_hook import conventions


def stored_evaluation(record: Mapping[str, Any]) -> StoredEvaluation:
    """Convert a record of TraceReader.evaluations."""
    event = record["event"]
    attributes: Mapping[str, Any] = event.attributes
    texts = {
        "id": conventions.FEEDBACK_ID,
        "name": conventions.EVALUATION_NAME,
        "label": conventions.EVALUATION_LABEL,
        "text": conventions.EVALUATION_TEXT,
        "correction": conventions.FEEDBACK_CORRECTION,
        "source": conventions.FEEDBACK_SOURCE,
        "rubric": conventions.FEEDBACK_RUBRIC,
    }
    return StoredEvaluation(
        attempt_id=record["attempt_id"],
        span_id=record["span_id"],
        response_id=record["response_id"],
        time=event.timestamp,
        value=usable(score_of(attributes)),
        words=words_of(attributes),
        **{field: str(attributes.get(name, "")) for field, name in texts.items()},
    )


def words_of(attributes: Mapping[str, Any]) -> str:
    """Say what the attributes of an evaluation say: `feedback = 0.5 by ann (tone@2): "too short"; should have been "…"`."""
    name, label, text, correction, source, rubric = (
        str(attributes.get(key, ""))
        for key in (
            conventions.EVALUATION_NAME,
            conventions.EVALUATION_LABEL,
            conventions.EVALUATION_TEXT,
            conventions.FEEDBACK_CORRECTION,
            conventions.FEEDBACK_SOURCE,
            conventions.FEEDBACK_RUBRIC,
        )
    )
    value = score_of(attributes)
    said = "" if value is None else f" = {value:g}"
    said += f" ({label})" if label and value is not None else f" = {label}, which is no reward" if label else ""
    given = f"{f' by {source}' if source else ''}{f' ({rubric})' if rubric else ''}"
    why = "; ".join([*([f'"{text}"'] if text else []), *([f'should have been "{correction}"'] if correction else [])])
    return f"{name or 'reward'}{said}{given}{f': {why}' if why else ''}"
