"""Replace the model list of a running proxy. It takes effect at once, also for calls of no rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import aiohttp

from agl_otel.errors import ModelServerError, UnavailableError
from agl_otel.net.tls import connector
from agl_otel.proxy.outgoing import RedirectedError, ask
from agl_otel.text import error_text

TIMEOUT_SECONDS: Final = 30.0


async def replace_models(proxy: str, models: Sequence[Mapping[str, Any]], *, token: str = "") -> None:
    """Replace the model list of the proxy at `proxy` (its base URL); models.py describes the form.

    Raises ModelServerError if the proxy rejects it, UnavailableError if it cannot be reached.
    """
    headers = {"accept-encoding": "identity"} | ({"authorization": f"Bearer {token}"} if token else {})
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, connector=connector()) as session,
            ask(session, "POST", f"{proxy}/model_list", json={"model_list": list(models)}, headers=headers) as answer,
        ):
            if answer.status != 200:
                raise ModelServerError(f"the proxy {proxy} did not take the models (HTTP {answer.status}): {await answer.text()}")
    except RedirectedError as error:
        raise ModelServerError(f"the address of the proxy is not that of a proxy: {error}") from None
    except (aiohttp.ClientError, OSError) as error:
        raise UnavailableError(f"the proxy {proxy} cannot be reached: {error_text(error)}") from error
