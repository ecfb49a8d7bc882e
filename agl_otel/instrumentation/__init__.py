"""What runs inside processes that make spans: ids and marker onto spans, seals, flush at the end.

`pre_instrument` and `post_instrument` are entry points that `opentelemetry-instrument` calls in the agent's process (hook.py);
`Telemetry` (setup.py) is the same for processes of ours. Both are built from the same parts: context.py says whose span it is,
ledger.py counts, processor.py writes both onto spans, seal.py says how many there were, export.py sends them without loss.

Importing this package loads the OpenTelemetry API and nothing else: what is heavy is loaded by the call that needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agl_otel.instrumentation.context import AttemptContext, attempt_scope

if TYPE_CHECKING:
    from agl_otel.instrumentation.setup import Telemetry

__all__ = ["AttemptContext", "Telemetry", "attempt_scope", "instrument_all", "post_instrument", "pre_instrument", "uninstrument_all"]


def pre_instrument() -> None:
    """Entry point: set up ids, seals and, where nobody else did, the SDK. Never raises."""
    from agl_otel.instrumentation import hook

    hook.pre_instrument()


def post_instrument() -> None:
    """Entry point: the same again for a tracer provider that an instrumentation installed in between. Never raises."""
    from agl_otel.instrumentation import hook

    hook.post_instrument()


def __getattr__(name: str) -> Any:
    if name == "Telemetry":
        from agl_otel.instrumentation.setup import Telemetry

        return Telemetry
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def instrument_all() -> None:
    """0.3's: switch on, in this process, every instrumentation that is installed and knows model calls or carries baggage."""
    from agl_otel.instrumentation.setup import switch_on_installed

    switch_on_installed()


def uninstrument_all() -> None:
    """0.3's: switch those off that `instrument_all` switched on."""
    from agl_otel.instrumentation.setup import switch_off

    switch_off()
