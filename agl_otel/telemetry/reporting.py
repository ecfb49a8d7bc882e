"""The destinations of a service's metrics: a port for Prometheus (http.py), an OTLP endpoint (push.py). Both are imported on use."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable

from agl_otel.settings import Settings
from agl_otel.telemetry.meters import Family, Meters


@contextlib.asynccontextmanager
async def served(meters: Meters, settings: Settings, service: str, port: int = 0, setting: str = "") -> AsyncGenerator[None]:
    """Serve the metrics on `port` (http.py) and push them to `metrics_otlp` (push.py) while the block runs. `setting` is the port's.

    A destination that is not configured is not imported. Raises InUseError, SettingsError.
    """
    async with contextlib.AsyncExitStack() as exits:
        if port:
            from agl_otel.telemetry.http import metrics_port

            await exits.enter_async_context(metrics_port(meters, settings, port, setting))

        async def families() -> list[Family]:
            return meters.families()

        await exits.enter_async_context(pushed(service, families, settings))
        yield


def pushed(
    service: str, families: Callable[[], Awaitable[Iterable[Family]]], settings: Settings
) -> contextlib.AbstractAsyncContextManager[None]:
    """Push the metrics of `families` to `metrics_otlp` while the block runs; if that is unset, import nothing. Raises SettingsError."""
    if not settings.metrics_otlp:
        return contextlib.nullcontext()
    from agl_otel.telemetry.push import Pushed, pushing

    return pushing(Pushed(service, families).data, settings)
