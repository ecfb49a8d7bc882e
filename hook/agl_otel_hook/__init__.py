"""Code in processes that make spans: sets ids and marker, counts, seals, flushes at exit; the emitters. Imports nothing of agl_otel.

`pre_instrument` and `post_instrument` are entry points that `opentelemetry-instrument` calls in the agent's process (hook.py).
context.py finds the attempt of a span, ledger.py counts spans, processor.py sets ids and marker, seal.py sends the counts, export.py
exports spans without loss. conventions.py has every name on the wire, emit/ the emitters.

agl_otel sets up its own processes with the same modules (agl_otel/telemetry/setup.py). Importing this package loads the OpenTelemetry API
and nothing else; heavier modules are imported by the calls that need them.
"""

from __future__ import annotations

import os

from agl_otel_hook import conventions
from agl_otel_hook.context import AttemptContext, attempt_scope

__all__ = ["AttemptContext", "attempt_scope", "post_instrument", "pre_instrument"]


def pre_instrument() -> None:
    """Entry point: set up ids, seals and, unless it is configured already, the SDK; nothing where AGL_HOOK is off. Never raises."""
    if os.environ.get(conventions.ENV_HOOK) == conventions.HOOK_OFF:
        return
    from agl_otel_hook import hook

    hook.pre_instrument()


def post_instrument() -> None:
    """Entry point: adopt a tracer provider that an instrumentation has installed since `pre_instrument`. Never raises."""
    if os.environ.get(conventions.ENV_HOOK) == conventions.HOOK_OFF:
        return
    from agl_otel_hook import hook

    hook.post_instrument()
