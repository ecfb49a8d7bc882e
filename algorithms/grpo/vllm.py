"""vLLM in the place of our own model server: started, watched and ended here, behind the same interface as server.py.

    python -m agl_otel.algorithms.grpo.vllm --model DIR --port 8000 [--vllm PATH] [-- more options of `vllm serve`]

A small front, because vLLM may live in an environment of its own: `vllm serve` is a child on a port of its own, whose end is the front's
end. What goes to /v1 is handed through, and every answer says in `agl-model-version` which weights sampled it. POST /weights
{"path", "version"} waits until the calls under way are answered, has vLLM reload (its `reload_weights`, through /collective_rpc of its
development mode), and drops the prefix cache; calls that come meanwhile wait. So no reply is sampled by two versions.

Models with a tied head are not reloaded whole by every release of vLLM: GRPO's `probe_tolerance` notices.
vLLM's server must be reached by this machine alone: /collective_rpc runs what it is asked.
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

from agl_otel.algorithms.grpo.model_port import MAX_BODY_BYTES, checks, error_response, parser_of
from agl_otel.errors import AglError, ModelServerError, SettingsError, UsageError
from agl_otel.net.http_server import bodies_in_time, is_well, listen, make_runner
from agl_otel.service.main import Serving, until_stopped
from agl_otel.service.processes import Process, signal_group
from agl_otel.settings import free_port
from agl_otel_hook.conventions import HEADER_MODEL_VERSION

START_SECONDS: Final = 600.0  # a large model is read from disk, and its kernels are compiled
STOP_SECONDS: Final = 30.0
RELOAD_SECONDS: Final = 600.0
ENVIRONMENT: Final = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
_NOT_OURS: Final = frozenset({"host", "content-length", "transfer-encoding", "connection", "keep-alive", "date", "server"})


def vllm_command(given: str | None = None) -> str:
    """The program `vllm`: the one that is given, or that of this environment or the PATH. Raises SettingsError that says what to do."""
    beside = Path(sys.executable).with_name("vllm")
    found = shutil.which(given) if given else str(beside) if beside.exists() else shutil.which("vllm")
    if found is None:
        raise SettingsError(
            f"there is no program {given or 'vllm'!r}: pip install vllm, in an environment of its own where it does not go with ours, "
            "and say where it is ([policy] vllm = '/…/bin/vllm')"
        )
    return found


class Front:
    """The routes of server.py over a vLLM server. Use `async with`."""

    def __init__(self, process: Process, url: str, version: str, *, name: str, weights: str | None = None) -> None:
        self.process, self.url, self.version, self._name = process, url, version, name
        self._weights_to_begin_with = weights
        self._calls = 0
        self._changed = asyncio.Condition()
        self._loading = False

    async def __aenter__(self) -> Front:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False)
        await self.process.start()
        try:
            await self.process.ready(self._well, timeout_seconds=START_SECONDS)
            await self._ask(
                "/v1/completions", {"model": self._name, "prompt": "a", "max_tokens": 1}
            )  # compiles kernels: minutes on some CPUs
            if self._weights_to_begin_with is not None:
                await self.load(self._weights_to_begin_with, self.version)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.process.stop(grace_seconds=STOP_SECONDS)
        signal_group(self.process.pid, signal.SIGKILL)  # its engine and workers outlive a server that was killed
        await self._session.close()

    def app(self, host: str = "127.0.0.1") -> web.Application:
        """Its routes, for a port of `host`. Raises SettingsError."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[*checks(host), _errors, bodies_in_time])
        app.router.add_get("/health", self._health)
        app.router.add_post("/weights", self._weights)
        app.router.add_route("*", "/v1/{tail:.*}", self._forward)
        return app

    async def load(self, folder: str, version: str) -> None:
        """Sample with `folder`'s weights under `version`, once the calls under way are answered.

        Raises UsageError where vLLM refuses them; whether the old ones are still whole it does not say.
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
        well = await self._well()
        return web.json_response(
            {"status": "ok" if well else "vllm does not answer", "model_version": self.version}, status=200 if well else 503
        )

    async def _weights(self, request: web.Request) -> web.Response:
        try:
            body: Any = await request.json()
        except ValueError as error:
            raise UsageError(f"the body is not JSON: {error}") from error
        if not isinstance(body, dict) or not isinstance(body.get("path"), str) or not isinstance(body.get("version"), (str, int)):
            raise UsageError('POST /weights takes {"path": folder with model.safetensors, "version": string or integer}')
        if not await asyncio.to_thread((Path(body["path"]) / "model.safetensors").is_file):
            raise UsageError(f"cannot read weights from {body['path']}: it holds no model.safetensors")
        await self.load(body["path"], str(body["version"]))
        return web.json_response({"version": self.version})

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _NOT_OURS}
        body = await request.read()
        async with self._call(), self._session.request(request.method, self.url + request.path_qs, data=body, headers=headers) as answer:
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in _NOT_OURS}
            response = web.StreamResponse(status=answer.status, headers={**kept, HEADER_MODEL_VERSION: self.version})
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response

    @asynccontextmanager
    async def _call(self) -> AsyncGenerator[None]:
        """A call under way; waits while weights are loaded."""
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

    async def _well(self) -> bool:
        return await is_well(f"{self.url}/health", self._session, seconds=5)


@web.middleware
async def _errors(request: web.Request, handler: Any) -> web.StreamResponse:
    """Errors in OpenAI's form."""
    try:
        return await handler(request)
    except UsageError as error:
        return error_response(400, str(error))
    except (aiohttp.ClientError, TimeoutError) as error:
        return error_response(502, f"vLLM does not answer: {error!r}")


@asynccontextmanager
async def serving(front: Front, *, host: str, port: int) -> AsyncGenerator[Serving]:
    """The front while it serves. The end of vLLM raises ModelServerError with the end of its log."""

    async def failed() -> None:
        await front.process.wait()
        raise ModelServerError(f"vLLM ended with exit code {front.process.returncode}: {front.process.last_words()}")

    async with front:
        runner = make_runner(front.app(host), shutdown_timeout=5.0)
        try:
            await runner.setup()
            yield Serving(f"serving {front.url} on http://{host}:{await listen(runner, host, port, None)}", failed())
        finally:
            await runner.cleanup()


def make_front(options: argparse.Namespace, more: Sequence[str]) -> Front:
    """`vllm serve` with these options, not started yet. Raises SettingsError where there is none."""
    port = free_port()
    command = [vllm_command(options.vllm), "serve", options.model, "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    # processed: of the distribution that was sampled from, whatever the temperature; that no default of the model's changes for a call
    command += ["--served-model-name", options.name, "--host", "127.0.0.1", "--port", str(port), "--seed", str(options.seed), *more]
    process = Process(
        "vLLM", command, log=Path(options.log), env={name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
    )
    return Front(process, f"http://127.0.0.1:{port}", options.version, name=options.name, weights=options.weights)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit status."""
    parser = parser_of("agl_otel.algorithms.grpo.vllm", "vLLM as a policy server.")
    parser.add_argument("--seed", type=int, default=0, help="of vLLM's engine")
    parser.add_argument("--vllm", help="the program  [default: that of this environment, or of the PATH]")
    parser.add_argument("--log", default="vllm.log", help="where what vLLM prints goes")
    known = list(sys.argv[1:] if arguments is None else arguments)
    place = known.index("--") if "--" in known else len(known)
    options = parser.parse_args(known[:place])
    try:
        front = make_front(options, known[place + 1 :])
        server = serving(front, host=options.host, port=options.port)
        asyncio.run(until_stopped(server, partial(print, flush=True), cancel_start=True))  # it starts for minutes
    except AglError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201  # the end of its log
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
