"""`python -m agl_otel.web`: run the web service. SIGTERM and SIGINT stop it gracefully, with exit code 0."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

from agl_otel.compat.stores import LightningStore
from agl_otel.errors import InUseError
from agl_otel.net.auth import own_names
from agl_otel.net.http_server import listen, make_runner, require_certificate
from agl_otel.net.tls import Tls
from agl_otel.queue.registration import Registration
from agl_otel.service.main import Serving, run_service
from agl_otel.settings import Settings
from agl_otel.telemetry.reporting import pushed
from agl_otel.web import relay
from agl_otel.web.app import OPEN_PATHS, build_app
from agl_otel.web.jaeger.service import JaegerServer


@asynccontextmanager
async def serving(settings: Settings) -> AsyncGenerator[Serving]:
    """Serve on `web_port` within the context. Raises InUseError if the port is in use, SettingsError, UnavailableError."""
    token = settings.token.get_secret_value()
    tls = Tls.load(settings)
    async with AsyncExitStack() as closers:
        store = await closers.enter_async_context(LightningStore(settings.queue_address, token=token))
        app = build_app(
            store,
            token,
            settings.cors_origins.split(","),
            own_names(settings),
            in_flight_bytes=settings.max_in_flight_bytes,
            feedback_per_minute=settings.feedback_per_minute,
        )
        if tls is not None and tls.client_authority is not None:
            app.middlewares.append(require_certificate(OPEN_PATHS))
        runner = make_runner(app)
        closers.push_async_callback(runner.cleanup)
        await runner.setup()
        jaeger = JaegerServer(store, token)
        closers.push_async_callback(jaeger.stop)
        if settings.jaeger_port:
            await jaeger.start(settings.host, settings.jaeger_port, tls)
        try:
            await listen(runner, settings.host, settings.web_port, tls.context if tls else None)
        except OSError as error:
            raise InUseError.of_port(settings.host, settings.web_port, error, "AGL_WEB_PORT") from None
        url = f"{'https' if tls else 'http'}://{settings.announced_host}:{settings.web_port}"
        registration = Registration(store.queue, "web", f"web@{settings.announced_host}:{settings.web_port}", {"web": url})
        registration.start()
        closers.push_async_callback(registration.end)
        await closers.enter_async_context(pushed("web", lambda: relay.families(app), settings))
        yield Serving(f"the web service is at {url}")


def main() -> int:
    """Run the service until it is stopped; return the exit code."""
    return run_service("web", serving)


if __name__ == "__main__":
    sys.exit(main())
