"""`python -m agl_otel.proxy`: the gateway as a service. On SIGTERM and SIGINT: drain calls in flight, seal, flush, exit with 0."""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Final

from agl_otel.adapters.otlp_masking import load_masker
from agl_otel.errors import InUseError, UnavailableError
from agl_otel.net.auth import own_names
from agl_otel.net.http_server import listen, listens, make_runner, require_certificate
from agl_otel.net.tls import Tls
from agl_otel.proxy.app import SCOPE_NAME, Proxy
from agl_otel.proxy.budget import Budget
from agl_otel.proxy.forward import Limits
from agl_otel.proxy.journal import FOLDER, Journal
from agl_otel.proxy.litellm import Litellm
from agl_otel.proxy.models import ModelList
from agl_otel.proxy.models import load as load_models
from agl_otel.proxy.recovery import JournalRecovery
from agl_otel.proxy.upstream import QueueUpstreams
from agl_otel.queue.client import QueueClient
from agl_otel.queue.registration import Registration
from agl_otel.service.main import Serving, run_service
from agl_otel.settings import DAY_SECONDS, Settings
from agl_otel.telemetry.otlp import OtlpExporter
from agl_otel.telemetry.reporting import served
from agl_otel.telemetry.setup import Telemetry

DRAIN_SECONDS: Final = 10.0
FIND_COLLECTOR_SECONDS: Final = 30.0
FIND_AGAIN_SECONDS: Final = 0.1
logger = logging.getLogger("agl_otel.proxy")


@asynccontextmanager
async def serving(settings: Settings) -> AsyncGenerator[Serving]:
    """Serve the gateway. Raises InUseError if the port is taken, SettingsError."""
    token = settings.token.get_secret_value()
    tls = Tls.load(settings)
    url = f"{'https' if tls else 'http'}://{settings.announced_host}:{settings.proxy_port}"
    async with QueueClient(settings.queue_address, token=token) as queue, AsyncExitStack() as closers:
        registration = Registration(queue, "proxy", url, {"proxy": url})
        closers.push_async_callback(registration.end)
        endpoint = await _collector(queue, settings)
        telemetry = Telemetry.start(otlp_endpoint=endpoint, token=token, service_name="agl-otel-proxy")
        journal, exporter = _journal(settings, telemetry), OtlpExporter(endpoint, token)
        if journal is not None:
            closers.push_async_callback(asyncio.to_thread, journal.close)
        closers.push_async_callback(asyncio.to_thread, telemetry.shutdown)
        recovery = JournalRecovery(
            settings.data_dir.absolute() / FOLDER,
            exporter.send,
            partial(_known, queue),
            oldest=time.time() - settings.retention_days * DAY_SECONDS if settings.retention_days else 0.0,
        )
        models = ModelList(load_models(settings.models))
        upstreams = QueueUpstreams(
            queue,
            models=models,
            fallback_url=settings.upstream_url,
            fallback_key=settings.upstream_key.get_secret_value(),
            own_urls=[url],
            resources_id=settings.upstream_resources,
        )
        litellm = Litellm(settings.litellm, settings.data_dir.absolute()) if settings.litellm else None
        proxy = Proxy(
            upstreams,
            telemetry,
            token=token,
            own_keys=settings.proxy_own_keys,
            limits=_limits(settings),
            models=models,
            litellm=litellm,
            names=own_names(settings),
            journal=journal,
            recovery=recovery,
            queue=queue,
            address=url,
        )
        with_certificates = tls is not None and settings.proxy_client_certificates
        app, context = proxy.app(fronted=not with_certificates), tls.anonymous if tls else None
        if tls is not None and with_certificates:
            app.middlewares.append(require_certificate({"/health"}))
            context = tls.context
        await closers.enter_async_context(served(proxy.meters, settings, "proxy"))
        runner = make_runner(app, handler_cancellation=True, shutdown_timeout=DRAIN_SECONDS)
        closers.push_async_callback(runner.cleanup)
        closers.callback(exporter.shutdown)
        await runner.setup()
        try:
            await listen(runner, settings.host, settings.proxy_port, context)
        except OSError as error:
            raise InUseError.of_port(settings.host, settings.proxy_port, error, "AGL_PROXY_PORT") from None
        registration.start()
        yield Serving(f"the proxy serves on {url}")


def _limits(settings: Settings) -> Limits:
    return Limits(
        budget=Budget(settings.attempt_max_calls, settings.attempt_max_tokens),
        litellm_url=settings.litellm_url,
        translate=settings.translate,
        held_bytes=settings.proxy_max_in_flight_bytes,
    )


def _journal(settings: Settings, telemetry: Telemetry) -> Journal | None:
    """Open the journal of this process; None if its folder is not writable. Raises SettingsError for unreadable masking rules."""
    folder = settings.data_dir.absolute() / FOLDER / secrets.token_hex(8)
    masker = load_masker(settings.mask)
    try:
        return Journal(folder, telemetry.ledger, telemetry.whole_spans(SCOPE_NAME).head(), masker=masker)
    except UnavailableError as error:
        logger.warning("%s: should this proxy be killed, the attempts that it serves count as incomplete", error)
        return None


async def _known(queue: QueueClient, rollout_ids: Sequence[str]) -> set[str]:
    """Return which of these rollouts the queue has. Raises AglError."""
    return {rollout.rollout_id for rollout in await queue.query_rollouts(rollout_id_in=rollout_ids)} if rollout_ids else set()


async def _collector(queue: QueueClient, settings: Settings) -> str:
    """Return host:port of the collector's gRPC: the stack's if `store` names one, else the local one.

    After a kill the queue returns the old address for up to a minute, so an address is used only once it accepts connections, or after
    FIND_COLLECTOR_SECONDS.
    """
    local = f"{'https://' if settings.tls_cert else ''}{settings.host}:{settings.otlp_grpc_port}"
    if not settings.store:
        return local
    deadline = asyncio.get_running_loop().time() + FIND_COLLECTOR_SECONDS
    while True:
        found = (await queue.describe()).collector_grpc or local
        if await listens(found):
            return found
        if asyncio.get_running_loop().time() > deadline:
            logger.warning("no collector listens at %s: calls are recorded when one does", found)
            return found
        await asyncio.sleep(FIND_AGAIN_SECONDS)


def main() -> int:
    """Run the service; return its exit code."""
    return run_service("proxy", serving, cancel_start=True)


if __name__ == "__main__":
    sys.exit(main())
