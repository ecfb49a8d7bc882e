"""Run inside processes that make spans: ids and marker onto spans, counts, seals, flush at the end; the emitters. Imports nothing of ours.

`pre_instrument` and `post_instrument` are entry points that `opentelemetry-instrument` calls in the agent's process (hook.py).
context.py finds the attempt of a span, ledger.py counts, processor.py writes both onto spans, seal.py sends the counts, export.py sends
spans without loss. conventions.py has every name on the wire, emit/ the emitters.

agl_otel sets up its own processes with the same parts (agl_otel/telemetry/setup.py). Importing this package loads the OpenTelemetry API and
nothing else: what is heavy is loaded by the call that needs it.
"""

from __future__ import annotations

from agl_otel_hook.context import AttemptContext, attempt_scope

__all__ = ["AttemptContext", "attempt_scope", "post_instrument", "pre_instrument"]


def pre_instrument() -> None:
    """Entry point: set up ids, seals and, where nobody else did, the SDK. Never raises."""
    from agl_otel_hook import hook

    hook.pre_instrument()


def post_instrument() -> None:
    """Entry point: the same again for a tracer provider that an instrumentation installed in between. Never raises."""
    from agl_otel_hook import hook

    hook.post_instrument()
