"""Run vLLM as the model server: starts, monitors and ends `vllm serve`, behind the same interface as server.py.

    python -m agl_otel.algorithms.grpo.vllm --model DIR --port 8000 [--vllm PATH] [-- more options of `vllm serve`]

vLLM may be installed in another environment, so `vllm serve` runs as a child process on its own port, and this front ends with it.
Requests to /v1 are forwarded; the response header `agl-model-version` names the weights that sampled. POST /weights {"path", "version"}
waits for the calls in flight, lets vLLM reload (`reload_weights`, through /collective_rpc of its development mode) and drops the prefix
cache; new calls wait meanwhile. So no reply is sampled by two versions.

Not every release of vLLM reloads models with a tied head completely: GRPO's `probe_tolerance` detects that.
vLLM's port must be reachable from this machine only: /collective_rpc executes arbitrary methods.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import aiohttp
from aiohttp import web

from agl_otel.algorithms.grpo.model_port import access_checks, counted, error_response, json_body, make_parser
from agl_otel.errors import AglError, DataError, ModelServerError, SettingsError, UnavailableError, UsageError, http_status
from agl_otel.net.bodies import body_of
from agl_otel.net.http_server import is_healthy, listen, make_runner
from agl_otel.service.main import Serving, until_stopped
from agl_otel.service.processes import Process, signal_group
from agl_otel.settings import free_port
from agl_otel.text import error_text
from agl_otel_hook.conventions import HEADER_MODEL_VERSION

START_SECONDS: Final = 600.0  # for reading a large model and compiling kernels
STOP_SECONDS: Final = 30.0
RELOAD_SECONDS: Final = 600.0
ENVIRONMENT: Final = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
_NOT_OURS: Final = frozenset({"host", "content-length", "transfer-encoding", "connection", "keep-alive", "date", "server"})


def vllm_command(given: str | None = None) -> str:
    """Find the program `vllm`: the given one, else that of this environment or the PATH. Raises SettingsError where there is none."""
    beside = Path(sys.executable).with_name("vllm")
    found = shutil.which(given) if given else str(beside) if beside.exists() else shutil.which("vllm")
    if found is None:
        raise SettingsError(
            f"there is no program {given or 'vllm'!r}: pip install vllm, in another environment if its dependencies conflict, "
            "and name its path ([policy] vllm = '/…/bin/vllm')"
        )
    return found


class Front:
    """Serves the routes of server.py over a vLLM server. Use `async with`."""

    def __init__(self, process: Process, url: str, version: str, *, name: str, weights: str | None = None) -> None:
        self.process, self.url, self.version, self._name = process, url, version, name
        self._initial_weights = weights
        self._calls = 0
        self._changed = asyncio.Condition()
        self._loading = False

    async def __aenter__(self) -> Front:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False)
        await self.process.start()
        try:
            await self.process.ready(self._is_healthy, timeout_seconds=START_SECONDS)
            await self._ask(
                "/v1/completions", {"model": self._name, "prompt": "a", "max_tokens": 1}
            )  # compiles kernels: minutes on some CPUs
            if self._initial_weights is not None:
                await self.load(self._initial_weights, self.version)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.process.stop(grace_seconds=STOP_SECONDS)
        signal_group(self.process.pid, signal.SIGKILL)  # its engine and workers survive a kill of the server process
        await self._session.close()

    def app(self, host: str = "127.0.0.1") -> web.Application:
        """Make the web application, for a port of `host`. Raises SettingsError."""
        app = web.Application(middlewares=[*access_checks(host), _errors, counted()])
        app.router.add_get("/health", self._health)
        app.router.add_post("/weights", self._weights)
        app.router.add_route("*", "/v1/{tail:.*}", self._forward)
        return app

    async def load(self, folder: str, version: str) -> None:
        """Load `folder`'s weights as `version`, after the calls in flight.

        Raises UsageError where vLLM refuses them; it does not report whether the old ones are still intact.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: not self._loading)
            self._loading = True
            await self._changed.wait_for(lambda: not self._calls)
        try:
            await self._ask("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})
            await self._ask("/reset_prefix_cache", {})
            self.version = version
        finally:
            async with self._changed:
                self._loading = False
                self._changed.notify_all()

    # --- the routes

    async def _health(self, request: web.Request) -> web.Response:
        well = await self._is_healthy()
        return web.json_response(
            {"status": "ok" if well else "vllm does not answer", "model_version": self.version}, status=200 if well else 503
        )

    async def _weights(self, request: web.Request) -> web.Response:
        body = await json_body(request)
        if not isinstance(body, dict) or not isinstance(body.get("path"), str) or not isinstance(body.get("version"), (str, int)):
            raise UsageError('POST /weights takes {"path": folder with model.safetensors, "version": string or integer}')
        if not await asyncio.to_thread((Path(body["path"]) / "model.safetensors").is_file):
            raise UsageError(f"cannot read weights from {body['path']}: it holds no model.safetensors")
        await self.load(body["path"], str(body["version"]))
        return web.json_response({"version": self.version})

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _NOT_OURS}
        body = await body_of(request, packed=True)
        async with self._call(), self._session.request(request.method, self.url + request.path_qs, data=body, headers=headers) as answer:
            response_headers = {name: value for name, value in answer.headers.items() if name.lower() not in _NOT_OURS}
            response = web.StreamResponse(status=answer.status, headers={**response_headers, HEADER_MODEL_VERSION: self.version})
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response

    @asynccontextmanager
    async def _call(self) -> AsyncGenerator[None]:
        """Count a call in flight; waits while weights are loaded."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._loading)
            self._calls += 1
        try:
            yield
        finally:
            async with self._changed:
                self._calls -= 1
                self._changed.notify_all()

    # --- vLLM

    async def _ask(self, path: str, body: dict[str, Any]) -> None:
        timeout = aiohttp.ClientTimeout(total=RELOAD_SECONDS)
        async with self._session.post(self.url + path, json=body, timeout=timeout) as answer:
            if answer.status != 200:
                raise UsageError(f"vLLM refused {path}: HTTP {answer.status} {(await answer.text())[:500]}")

    async def _is_healthy(self) -> bool:
        return await is_healthy(f"{self.url}/health", self._session, seconds=5)


@web.middleware
async def _errors(request: web.Request, handler: Any) -> web.StreamResponse:
    """Return errors in OpenAI's format."""
    try:
        return await handler(request)
    except (UsageError, DataError, UnavailableError) as error:
        return error_response(http_status(error), str(error))
    except (aiohttp.ClientError, TimeoutError) as error:
        return error_response(502, f"vLLM does not answer: {error_text(error)}")


@asynccontextmanager
async def serving(front: Front, *, host: str, port: int) -> AsyncGenerator[Serving]:
    """Run the front. If vLLM ends, ModelServerError is raised with the end of its log."""

    async def failed() -> None:
        await front.process.wait()
        raise ModelServerError(f"vLLM ended with exit code {front.process.returncode}: {front.process.log_end()}")

    async with front:
        runner = make_runner(front.app(host), shutdown_timeout=5.0)
        try:
            await runner.setup()
            yield Serving(f"serving {front.url} on http://{host}:{await listen(runner, host, port, None)}", failed())
        finally:
            await runner.cleanup()


def make_front(options: argparse.Namespace, more: Sequence[str]) -> Front:
    """Make the front for `vllm serve` with these options, without starting it. Raises SettingsError where vLLM is not installed."""
    port = free_port()
    command = [vllm_command(options.vllm), "serve", options.model, "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    # processed_logprobs: of the distribution sampled from, at any temperature; generation-config vllm: no defaults from the model's folder
    command += ["--served-model-name", options.name, "--host", "127.0.0.1", "--port", str(port), "--seed", str(options.seed), *more]
    process = Process(
        "vLLM", command, log=Path(options.log), env={name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
    )
    return Front(process, f"http://127.0.0.1:{port}", options.version, name=options.name, weights=options.weights)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = make_parser("agl_otel.algorithms.grpo.vllm", "vLLM as a policy server.")
    parser.add_argument("--seed", type=int, default=0, help="of vLLM's engine")
    parser.add_argument("--vllm", help="the program  [default: that of this environment, or of the PATH]")
    parser.add_argument("--log", default="vllm.log", help="file for vLLM's output")
    known = list(sys.argv[1:] if arguments is None else arguments)
    place = known.index("--") if "--" in known else len(known)
    options = parser.parse_args(known[:place])
    try:
        front = make_front(options, known[place + 1 :])
        server = serving(front, host=options.host, port=options.port)
        asyncio.run(until_stopped(server, partial(print, flush=True), cancel_start=True))  # its start takes minutes
    except AglError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201  # the last line of its log
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
