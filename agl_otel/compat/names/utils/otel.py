"""0.3's `utils.otel`: agl_otel.spans.attributes, and the tracer that emitters use."""

from __future__ import annotations

from opentelemetry import trace

from agl_otel.spans.attributes import (
    extract_links_from_attributes,
    extract_tags_from_attributes,
    filter_and_unflatten_attributes,
    filter_attributes,
    query_linked_spans,
    unflatten_attributes,
)
from agl_otel_hook.attributes import (
    check_attributes_sanity,
    flatten_attributes,
    format_exception_attributes,
    full_qualified_name,
    make_link_attributes,
    make_tag_attributes,
    sanitize_attribute_value,
    sanitize_attributes,
    sanitize_list_attribute_sanity,
)
from agl_otel_hook.emit.emitters import TRACER

__all__ = [
    "check_attributes_sanity",
    "extract_links_from_attributes",
    "extract_tags_from_attributes",
    "filter_and_unflatten_attributes",
    "filter_attributes",
    "flatten_attributes",
    "format_exception_attributes",
    "full_qualified_name",
    "get_tracer",
    "get_tracer_provider",
    "make_link_attributes",
    "make_tag_attributes",
    "query_linked_spans",
    "sanitize_attribute_value",
    "sanitize_attributes",
    "sanitize_list_attribute_sanity",
    "unflatten_attributes",
]


def get_tracer_provider(inspect: bool = True) -> trace.TracerProvider:
    """Return the process's tracer provider; `inspect` has no effect."""
    return trace.get_tracer_provider()


def get_tracer(use_active_span_processor: bool = True) -> trace.Tracer:
    """Return the tracer of the emitters; without the active span processor, a no-op tracer."""
    return trace.get_tracer(TRACER) if use_active_span_processor else trace.NoOpTracer()
