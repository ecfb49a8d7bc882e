"""Run litellm's proxy server as a child process, in an environment of its own (it needs an older openai than agents use).

It serves two kinds of models. `agl/NAME` is forwarded to our capture side by chat/completions (translation.py makes a NAME for each call);
every other name is `provider/model`: litellm knows the address, and the key comes with the request (from the resource) or from the
environment. Addresses in a request's body are refused. The process starts and stops with the proxy, and is restarted when it exits.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from agl_otel.errors import InUseError, RefusedError, SettingsError, UnavailableError
from agl_otel.net.http_server import is_healthy
from agl_otel.service.processes import Process
from agl_otel.service.retry import Backoff
from agl_otel.settings import free_port

READY_SECONDS: Final = 300.0  # its imports alone take half a minute of CPU
WAIT_SECONDS: Final = 60.0  # the longest that a call waits while it is starting
STOP_SECONDS: Final = 10.0
RESTART: Final = Backoff(1.0, 30.0, jitter=0.0)
PREFIX: Final = "agl/"
PROVIDER: Final = "hosted_vllm/"
"""litellm's provider for servers with OpenAI's protocol; it keeps parameters that only vLLM and the like know."""
KEY_FIELD: Final = "api_key"
"""The field of a request's body with the provider's key."""
HOW: Final = "`uv venv DIR && uv pip install --python DIR/bin/python 'litellm[proxy]'`, then AGL_LITELLM=DIR/bin/python"
_ENVIRONMENT: Final = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"}  # no downloads at start
_BOOT: Final = """
import contextlib, importlib
for name in ("httpx", "httpx2"):
    with contextlib.suppress(ImportError):  # no redirect is followed, as in outgoing.py: to their clients none looks like one
        importlib.import_module(name).Response.has_redirect_location = property(lambda _: False)
from litellm import run_server
run_server()
"""
State = Literal["starting", "up", "down"]
logger = logging.getLogger("agl_otel.proxy")


@dataclass(frozen=True, slots=True)
class Address:
    """The address and the key of the running litellm."""

    url: str
    """Base URL, with /v1."""
    key: str


class Litellm:
    """The process. `start` it in a running event loop; `stop` it.

    Args:
        python: the interpreter of an environment that has litellm[proxy].
        folder: where its configuration and its log (logs/litellm.log) are written.

    Raises SettingsError if `python` is not executable.
    """

    def __init__(self, python: str, folder: Path) -> None:
        if not os.access(python, os.X_OK) or Path(python).is_dir():
            raise SettingsError(f"AGL_LITELLM names {python!r}, which is no Python interpreter: {HOW}")
        self._python = python
        self._folder = folder
        self._key = f"sk-{secrets.token_hex(24)}"
        self._process: Process | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._url = ""
        self.state: State = "starting"
        self.why = ""
        """Why litellm is down."""

    @property
    def pid(self) -> int:
        """The process id; 0 before the start."""
        return self._process.pid if self._process is not None else 0

    def start(self, capture_url: str) -> None:
        """Start the process without waiting for it. `capture_url` is the server for `agl/…` models."""
        self._watcher = asyncio.create_task(self._watch(capture_url), name="litellm")

    async def stop(self) -> None:
        """Stop the process."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        if self._process is not None:
            await self._process.stop(grace_seconds=STOP_SECONDS)
        self._is("down", "it was stopped")

    async def address(self) -> Address:
        """Wait until litellm is up and return its address. Raises RefusedError (503 with Retry-After) if it is down."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT_SECONDS):
                while self.state == "starting":
                    self._changed.clear()
                    await self._changed.wait()
        if self.state != "up":
            raise self.absent("is still starting" if self.state == "starting" else f"is not running ({self.why})")
        return Address(self._url, self._key)

    def absent(self, what: str) -> RefusedError:
        """The error for a call that needs litellm."""
        log = self._process.log if self._process is not None else self._folder
        message = f"litellm, which translates this call, {what}; it is restarted by itself. See {log}; AGL_LITELLM is {self._python}"
        return RefusedError(message, status=503, code="litellm_down", retry_seconds=1)

    async def _watch(self, capture_url: str) -> None:
        failures = 0  # consecutive
        while True:
            try:
                await self._launch(capture_url)
            except (UnavailableError, InUseError, OSError) as error:
                self._is("down", str(error))
                if self._process is not None:
                    await self._process.kill()
            else:
                failures = 0
                self._is("up")
                assert self._process is not None
                self._is("down", f"it ended with exit code {await self._process.wait()}")
            failures += 1
            logger.warning("litellm is down: %s; it is restarted in %.0f s", self.why, RESTART.seconds(failures))
            await asyncio.sleep(RESTART.seconds(failures))

    async def _launch(self, capture_url: str) -> None:
        self._is("starting")
        port = free_port()
        config = self._folder / "litellm.json"
        config.parent.mkdir(parents=True, exist_ok=True)
        config.write_text(json.dumps(_config(capture_url)))  # JSON is YAML
        arguments = ["--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
        argv = [self._python, "-c", _BOOT, *arguments]
        environment = {**_ENVIRONMENT, "LITELLM_MASTER_KEY": self._key}
        self._process = Process("litellm", argv, log=self._folder / "logs" / "litellm.log", env=environment)
        await self._process.start()
        await self._process.ready(lambda: is_healthy(f"http://127.0.0.1:{port}/health/liveliness"), timeout_seconds=READY_SECONDS)
        self._url = f"http://127.0.0.1:{port}/v1"

    def _is(self, state: State, why: str = "") -> None:
        self.state, self.why = state, why
        self._changed.set()


def _config(capture_url: str) -> dict[str, object]:
    ours = {"model": f"{PROVIDER}*", "api_base": capture_url, "api_key": "none", "use_chat_completions_api": True}
    others = {"model": "*", "configurable_clientside_auth_params": [KEY_FIELD]}
    return {
        "model_list": [{"model_name": f"{PREFIX}*", "litellm_params": ours}, {"model_name": "*", "litellm_params": others}],
        "litellm_settings": {"drop_params": True, "num_retries": 0, "telemetry": False},
        "router_settings": {"num_retries": 0, "disable_cooldowns": True},
    }
