"""Decode span attributes: dotted keys to nested data, tags and links. Pure.

Names and results are those of Agent Lightning 0.3 (its utils/otel.py). agl_otel_hook/attributes.py writes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast

from pydantic import BaseModel, TypeAdapter

from agl_otel.spans.tolerant import MAX_DEPTH
from agl_otel.types import Span, SpanLike
from agl_otel_hook import conventions

AnySpan = TypeVar("AnySpan", bound=SpanLike)


class LinkPydanticModel(BaseModel):
    """A link to spans by a value that they have: of an attribute, `trace_id` or `span_id`."""

    key_match: str
    value_match: str


class RewardPydanticModel(BaseModel):
    """One dimension of a reward."""

    name: str
    value: float


class _HasContext(Protocol):
    trace_id: int
    span_id: int


def unflatten_attributes(flat: Mapping[str, Any]) -> dict[str, Any] | list[Any]:
    """Nest dotted keys; a mapping whose keys are exactly 0 … n-1 becomes a list.

    Raises ValueError for a key of more than MAX_DEPTH parts.
    """
    root: dict[str, Any] = {}
    for path, value in flat.items():
        if path.count(".") >= MAX_DEPTH:
            raise ValueError(f"attribute {path[:80]!r}… has {path.count('.') + 1} parts: more than {MAX_DEPTH} are not read")
        *parents, last = path.split(".")
        node = root
        for part in parents:
            if not isinstance(node.get(part), dict):
                node[part] = {}
            node = node[part]
        node[last] = value
    return cast("dict[str, Any] | list[Any]", _with_lists(root))


def _with_lists(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    made = {key: _with_lists(value) for key, value in cast("dict[str, Any]", node).items()}
    indices = [str(index) for index in range(len(made))]
    return [made[index] for index in indices] if made and made.keys() == set(indices) else made


def filter_attributes(attributes: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the attributes whose key is `prefix` or begins with `prefix.`."""
    return {key: value for key, value in attributes.items() if key == prefix or key.startswith(f"{prefix}.")}


def filter_and_unflatten_attributes(attributes: Mapping[str, Any], prefix: str) -> dict[str, Any] | list[Any]:
    """Return the attributes below `prefix`, nested. Raises ValueError if `prefix` itself is a key."""
    found = filter_attributes(attributes, prefix)
    if prefix in found:
        raise ValueError(f"attribute {prefix!r} has a value of its own, so nothing can stand under it")
    return unflatten_attributes({key[len(prefix) + 1 :]: value for key, value in found.items()})


def extract_tags_from_attributes(attributes: Mapping[str, Any]) -> list[str]:
    """Return the tags of a span; [] without any. Raises ValueError if they are malformed."""
    return TypeAdapter(list[str]).validate_python(filter_and_unflatten_attributes(attributes, conventions.TAG) or [])


def extract_links_from_attributes(attributes: Mapping[str, Any]) -> list[LinkPydanticModel]:
    """Return the links of a span; [] without any. Raises ValueError if they are malformed."""
    return TypeAdapter(list[LinkPydanticModel]).validate_python(filter_and_unflatten_attributes(attributes, conventions.LINK) or [])


def query_linked_spans(spans: Sequence[AnySpan], links: Sequence[LinkPydanticModel]) -> list[AnySpan]:
    """Return the spans that match all links; all spans without links."""
    return [span for span in spans if all(_matched(span, link.key_match) == link.value_match for link in links)]


def _matched(span: SpanLike, key: str) -> Any:
    if key not in ("trace_id", "span_id"):
        return (span.attributes or {}).get(key)
    if isinstance(span, Span):
        return getattr(span, key)
    context = cast("_HasContext | None", getattr(span, "context", None))  # a span of the SDK
    return None if context is None else f"{context.trace_id:032x}" if key == "trace_id" else f"{context.span_id:016x}"
