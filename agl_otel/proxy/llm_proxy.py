"""Handing a list of models to a running proxy, which answers to their names at once: also in calls of no rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import aiohttp

from agl_otel.errors import ModelServerError, UnavailableError
from agl_otel.net.tls import connector
from agl_otel.proxy.outgoing import RedirectedError, ask
from agl_otel.text import error_text

TIMEOUT_SECONDS: Final = 30.0


async def hand_over(proxy: str, models: Sequence[Mapping[str, Any]], *, token: str = "") -> None:
    """Make these the models that the proxy at `proxy` (its base URL) knows by itself; the form is that of models.py.

    Raises ModelServerError where it does not take them, UnavailableError where it cannot be reached.
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
        raise ModelServerError(f"what is said to be the proxy is none: {error}") from None
    except (aiohttp.ClientError, OSError) as error:
        raise UnavailableError(f"the proxy {proxy} cannot be reached: {error_text(error)}") from error
