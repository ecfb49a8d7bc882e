"""Say evaluations, and feedback among them, for people. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from agl_otel.spans.rewards import score_of, usable
from agl_otel.types.feedback import StoredEvaluation
from agl_otel_hook import conventions

_TEXTS: Final = {
    "id": conventions.FEEDBACK_ID,
    "name": conventions.EVALUATION_NAME,
    "label": conventions.EVALUATION_LABEL,
    "text": conventions.EVALUATION_TEXT,
    "correction": conventions.FEEDBACK_CORRECTION,
    "source": conventions.FEEDBACK_SOURCE,
    "rubric": conventions.FEEDBACK_RUBRIC,
    "stored": conventions.FEEDBACK_STORED,
}
"""{field of StoredEvaluation: attribute}."""


def stored_evaluation(record: Mapping[str, Any]) -> StoredEvaluation:
    """Convert a record of TraceReader.evaluations."""
    event = record["event"]
    attributes: Mapping[str, Any] = event.attributes
    return StoredEvaluation(
        attempt_id=record["attempt_id"],
        span_id=record["span_id"],
        response_id=record["response_id"],
        time=event.timestamp,
        value=usable(score_of(attributes)),
        words=words_of(attributes),
        **_texts_of(attributes),
    )


def _texts_of(attributes: Mapping[str, Any]) -> dict[str, str]:
    return {field: str(attributes.get(name, "")) for field, name in _TEXTS.items()}


def words_of(attributes: Mapping[str, Any]) -> str:
    """Say what the attributes of an evaluation say: `feedback = 0.5 by ann (tone@2): "too short"; should have been "…"`."""
    texts = _texts_of(attributes)
    name, label, text, correction, source = (texts[key] for key in ("name", "label", "text", "correction", "source"))
    value = score_of(attributes)
    said = "" if value is None else f" = {value:g}"
    said += f" ({label})" if label and value is not None else f" = {label}, which is no reward" if label else ""
    how = ", ".join(filter(None, (texts["rubric"], texts["stored"] and f"stored {texts['stored']}")))
    given = f"{f' by {source}' if source else ''}{f' ({how})' if how else ''}"
    why = "; ".join([*([f'"{text}"'] if text else []), *([f'should have been "{correction}"'] if correction else [])])
    return f"{name or 'reward'}{said}{given}{f': {why}' if why else ''}"
