"""Ids of traces and spans, drawn from the system and not from `random`.

An agent that seeds `random`, as training code does, would draw the same ids in every attempt and in each of its processes; so would a fork
that Python was not told of. And drawing from `random` would change what an agent draws that is traced.
"""

from __future__ import annotations

import os

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import SpanContext, TraceFlags


def trace_id() -> int:
    """A new one: 128 bits."""
    return _drawn(16)


def span_id() -> int:
    """A new one: 64 bits."""
    return _drawn(8)


def new_root() -> SpanContext:
    """The context of a sampled span that begins a trace."""
    return SpanContext(trace_id(), span_id(), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def draw_from_system(provider: TracerProvider) -> None:
    """Have `provider` draw ids so, for tracers that are made from now on, unless its user has chosen another way."""
    if type(provider.id_generator) is RandomIdGenerator:
        provider.id_generator = SystemIds()


class SystemIds(RandomIdGenerator):
    """Draws the ids of an SDK's spans."""

    def generate_span_id(self) -> int:
        """A new one."""
        return span_id()

    def generate_trace_id(self) -> int:
        """A new one."""
        return trace_id()


def _drawn(length: int) -> int:
    return int.from_bytes(os.urandom(length), "big") or 1  # 0 is no id
