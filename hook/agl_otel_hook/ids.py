"""Ids of traces and spans, drawn from the operating system and not from `random`.

With `random`, an agent that seeds it, as training code does, would get the same ids in every attempt and in each of its processes, and so
would a fork made outside Python. Tracing would also change the agent's own random numbers.
"""

from __future__ import annotations

import os

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import SpanContext, TraceFlags


def trace_id() -> int:
    """Return a new trace id of 128 bits."""
    return _drawn(16)


def span_id() -> int:
    """Return a new span id of 64 bits."""
    return _drawn(8)


def both() -> tuple[int, int]:
    """Return a new trace id and a new span id, drawn at once."""
    drawn = os.urandom(24)
    return int.from_bytes(drawn[:16], "big") or 1, int.from_bytes(drawn[16:], "big") or 1


def new_root() -> SpanContext:
    """Return the context of a sampled root span."""
    return SpanContext(*both(), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def draw_from_system(provider: TracerProvider) -> None:
    """Set the id generator of `provider` for tracers made from now on, unless its user has chosen another than the SDK's default."""
    if type(provider.id_generator) is RandomIdGenerator:
        provider.id_generator = SystemIds()


class SystemIds(RandomIdGenerator):
    """Id generator for the SDK."""

    def generate_span_id(self) -> int:
        """Return a new span id."""
        return span_id()

    def generate_trace_id(self) -> int:
        """Return a new trace id."""
        return trace_id()


def _drawn(length: int) -> int:
    return int.from_bytes(os.urandom(length), "big") or 1  # 0 is not a valid id
