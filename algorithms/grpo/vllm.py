"""Run vLLM as the model server: starts, monitors and ends `vllm serve`, behind the same interface as server.py.

    python -m agl_otel.algorithms.grpo.vllm --model DIR --port 8000 [--vllm PATH] [-- more options of `vllm serve`]

vLLM may be installed in another environment, so `vllm serve` runs as a child process on its own port, and this front ends with it.
Requests to /v1 are forwarded; the response header `agl-model-version` names the weights that sampled. POST /weights {"path", "version"}
takes, and no reply is sampled by two versions:

- a folder with model.safetensors: waits for the calls in flight, lets vLLM reload (`reload_weights`, through /collective_rpc of its
  development mode) and drops the prefix cache; new calls wait meanwhile;
- with --lora-rank, a folder with a LoRA adapter in peft's format: vLLM loads it under a name of its own, which new calls then ask for, and
  calls in flight go on with the earlier one. Only calls of the one before that are waited for (--max-loras 2).

With --sleep, POST /sleep waits for the calls in flight and frees the GPU's memory, weights being kept in the machine's; POST /wake, or the
next POST /weights, takes it again. New calls wait meanwhile.

What releases of vLLM take, by their source: weights from a folder since 0.16 (`weights_path`), which is the oldest that is accepted;
adapters at run time, /sleep, processed_logprobs and token ids longer. /pause (0.12; mode keep 0.16) would let a reply go on under new
weights, and the weight transfer engine (0.16; /start_weight_update 0.22) pushes through NCCL or CUDA IPC: neither is used.
Not every release reloads models with a tied head completely: GRPO's `probe_tolerance` detects that.
vLLM's port must be reachable from this machine only: /collective_rpc executes arbitrary methods.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final

import aiohttp
from aiohttp import web

from agl_otel.algorithms.grpo.model_port import (
    ANSWERING,
    CALLS,
    Calls,
    Origin,
    access_checks,
    count_calls,
    counted,
    error_response,
    json_body,
    make_parser,
    weights_wanted,
)
from agl_otel.algorithms.grpo.vllm_options import SET_BY_FRONT, check_names
from agl_otel.algorithms.model_files import ADAPTER_CONFIG, WEIGHTS_FILE
from agl_otel.errors import AglError, DataError, ModelServerError, SettingsError, UnavailableError, UsageError, http_status
from agl_otel.net.bodies import body_of
from agl_otel.net.http_server import is_healthy, listen, make_runner
from agl_otel.service.main import Serving, until_stopped
from agl_otel.service.processes import Process, signal_group
from agl_otel.settings import free_port
from agl_otel.text import error_text
from agl_otel.types.sampling import HONOURS_ALL, LENIENT
from agl_otel_hook.conventions import HEADER_MODEL_VERSION, HEADER_SAMPLING

START_SECONDS: Final = 600.0  # for reading a large model and compiling kernels
STOP_SECONDS: Final = 30.0
RELOAD_SECONDS: Final = 600.0
OLDEST: Final = (0, 16)
STRICT: Final = "VLLM_ENFORCE_STRICT_TOOL_CALLING"
"""Whether vLLM holds the arguments of strict tools to their schemas, with tool_choice auto, too: by default from 0.24 on."""
ENVIRONMENT: Final = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    STRICT: "0",  # the trainer assumes samples of the model's own distribution
}
LORA_RANKS: Final = (8, 16, 32, 64, 128, 256, 512)
"""The values of --max-lora-rank that all releases take."""
SLEEP_LEVEL: Final = 1  # the weights go to the machine's memory, so that waking needs no file; 2 would discard them
TOOL_PARSERS: Final = (
    ("<function=", "qwen3_coder"),
    ("<|tool_call_start|>", "lfm2"),
    ("<start_function_call>", "functiongemma"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama3_json"),
    ("functools", "phi4_mini_json"),
)
"""(part of a chat template, vLLM's parser of such tool calls), the first that fits first; the parsers' source names the same parts."""
MISTRALS_OWN: Final = ("tekken.json", "tokenizer.model.v*")
"""Files of a model for which vLLM takes the tokenizer of mistral_common by default. With that, its parser of Mistral's tool calls sets a
grammar for every chat, also with tool_choice auto and without tools; the trainer has the tokenizer of transformers anyway."""
_ARGUMENTS: Final = re.compile(r"<arg_key>|<\|tool_call\|>")  # of GLM and Granite, whose calls only look like Hermes'
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


def tool_parser(model: Path) -> str | None:
    """Return the name of vLLM's parser of the tool calls that a model folder's chat template asks for; None where it is not known."""
    try:
        template = (model / "chat_template.jinja").read_text(encoding="utf-8")
    except OSError:
        try:
            template = json.dumps(json.loads((model / "tokenizer_config.json").read_bytes()).get("chat_template"), ensure_ascii=False)
        except (OSError, ValueError, AttributeError):
            return None
    if "tools" not in template or _ARGUMENTS.search(template):
        return None
    return next((name for mark, name in TOOL_PARSERS if mark in template), None)


class Front:
    """Serves the routes of server.py over a vLLM server. Use `async with`.

    Args:
        process: vLLM's, not started.
        url: vLLM's.
        version: of the weights that it starts with.
        name: of the model in requests.
        model: the folder that it starts with.
        weights: a folder with other initial weights.
        adapter_rank: the greatest rank of adapters that it takes; 0: it takes none.
        sleeps: whether it was started with --enable-sleep-mode.
        strict: whether it enforces strict tools.
    """

    def __init__(
        self,
        process: Process,
        url: str,
        version: str,
        *,
        name: str,
        model: Path | None = None,
        weights: Path | None = None,
        adapter_rank: int = 0,
        sleeps: bool = False,
        strict: bool = False,
    ) -> None:
        self.process, self.url, self.version, self._name = process, url, version, name
        self._initial_weights = weights
        self._adapter_rank, self._sleeps = adapter_rank, sleeps
        self.heeds = HONOURS_ALL if strict else LENIENT  # --generation-config vllm: it fills in nothing
        self._origin = Origin(model) if model is not None else None
        self._base_replaced = False
        self._current = name
        """What new calls ask vLLM for: `name`, or an adapter."""
        self._adapters: list[str] = []
        self._numbers = count(1)
        self._calls = Counter[str]()
        """The calls in flight, by what they asked for."""
        self._changed = asyncio.Condition()
        self._changing = asyncio.Lock()
        self._asleep = False
        self.held = False
        """Whether new calls wait."""

    async def __aenter__(self) -> Front:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False)
        await self.process.start()
        try:
            await self.process.ready(self._is_healthy, timeout_seconds=START_SECONDS)
            await self._check_release()
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
        app = web.Application(middlewares=[*access_checks(host), count_calls, _errors, counted()])
        app[CALLS] = Calls()
        app.router.add_get("/health", self._health)
        app.router.add_get("/weights", self._weights)
        app.router.add_post("/weights", self._set_weights)
        if self._sleeps:
            app.router.add_post("/sleep", self._sleep_route)
            app.router.add_post("/wake", self._wake_route)
        app.router.add_route("*", "/v1/{tail:.*}", self._forward)
        app.router.add_post("/tokenize", self._forward)
        return app

    async def load(self, folder: Path, version: str) -> None:
        """Load the weights or the adapter in `folder` as `version`; where these are the active ones, only the version changes.

        Raises UsageError where the folder holds neither, or vLLM refuses them; it does not report whether the old ones are still intact.
        """
        is_adapter = await asyncio.to_thread((folder / ADAPTER_CONFIG).is_file)
        if self._origin is not None and await asyncio.to_thread(self._origin.is_still, folder):
            await self.wake()
            self.version = version
        elif is_adapter:
            await self.wake()
            async with self._changing:
                await self._load_adapter(folder, version)
        elif await asyncio.to_thread((folder / WEIGHTS_FILE).is_file):
            async with self._alone():
                await self._wake()
                origin = Origin(folder)
                await self._ask("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
                await self._ask("/reset_prefix_cache", {})
                self._origin, self._base_replaced, self._current, self.version = origin, True, self._name, version
        else:
            raise UsageError(f"cannot read weights from {folder}: it holds no {WEIGHTS_FILE}")

    async def _load_adapter(self, folder: Path, version: str) -> None:
        if not self._adapter_rank or self._base_replaced:
            why = "its own weights were replaced" if self._adapter_rank else "it was started without --lora-rank"
            raise UsageError(f"the model server takes no adapter ({folder}), because {why}: start it again, with --lora-rank")
        async with self._changed:  # at most two adapters are in use: the current one, and then the new one
            await self._changed.wait_for(lambda: not any(self._calls[name] for name in self._adapters if name != self._current))
        for name in [each for each in self._adapters if each != self._current]:
            await self._ask("/v1/unload_lora_adapter", {"lora_name": name})
            self._adapters.remove(name)
        name, origin = f"{self._name}-{next(self._numbers)}", Origin(folder)
        await self._ask("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        self._adapters.append(name)
        self._origin, self._current, self.version = origin, name, version

    async def sleep(self) -> None:
        """Free the GPU's memory after the calls in flight; new ones wait until `wake` or `load`. Raises UsageError."""
        async with self._alone():
            if not self._asleep:
                await self._ask(f"/sleep?level={SLEEP_LEVEL}", {})
                self._asleep = True

    async def wake(self) -> None:
        """Take the GPU's memory again, where it was freed. Raises UsageError."""
        if self._asleep:
            async with self._alone():
                await self._wake()

    async def _wake(self) -> None:
        if self._asleep:
            await self._ask("/wake_up", {})
            self._asleep = False

    @asynccontextmanager
    async def _alone(self) -> AsyncGenerator[None]:
        """Run the block without calls in flight; new ones wait, and after it, too, where vLLM then sleeps."""
        async with self._changing:
            self.held = True
            try:
                async with self._changed:
                    await self._changed.wait_for(lambda: not self._calls.total())
                yield
            finally:
                async with self._changed:
                    self.held = self._asleep
                    self._changed.notify_all()

    # --- the routes

    async def _health(self, request: web.Request) -> web.Response:
        well = await self._is_healthy()
        told = {"status": "ok" if well else "vllm does not answer", "model_version": self.version, ANSWERING: request.app[CALLS].now}
        return web.json_response(told, status=200 if well else 503)

    async def _weights(self, request: web.Request) -> web.Response:
        path = await asyncio.to_thread(lambda: self._origin.path if self._origin is not None else None)
        rank = 0 if self._base_replaced else self._adapter_rank
        return web.json_response({"version": self.version, "path": path, "adapter_rank": rank, "sleeps": self._sleeps})

    async def _set_weights(self, request: web.Request) -> web.Response:
        await self.load(*await weights_wanted(request))
        return web.json_response({"version": self.version})

    async def _sleep_route(self, request: web.Request) -> web.Response:
        await self.sleep()
        return web.json_response({"asleep": True})

    async def _wake_route(self, request: web.Request) -> web.Response:
        await self.wake()
        return web.json_response({"asleep": False})

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _NOT_OURS}
        content: Any = None
        if self._adapter_rank and request.method == "POST":  # the model's name is replaced by an adapter's
            content = await json_body(request)
            headers = {name: value for name, value in headers.items() if name.lower() != "content-encoding"}
        body = await body_of(request, packed=True) if content is None else b""
        async with self._call() as (model, version):
            if content is not None:
                # vLLM takes a call without a model as one to the model without an adapter; an agent may repeat a reply's model
                is_ours = isinstance(content, dict) and content.get("model") in (None, "", self._name, *self._adapters)
                body = json.dumps({**content, "model": model} if is_ours else content).encode()
            async with self._session.request(request.method, self.url + request.path_qs, data=body, headers=headers) as answer:
                response_headers = {name: value for name, value in answer.headers.items() if name.lower() not in _NOT_OURS}
                told = {HEADER_MODEL_VERSION: version, HEADER_SAMPLING: self.heeds}
                response = web.StreamResponse(status=answer.status, headers={**response_headers, **told})
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response

    @asynccontextmanager
    async def _call(self) -> AsyncGenerator[tuple[str, str]]:
        """Count a call in flight; waits while weights are loaded or vLLM sleeps. Yields what it asks vLLM for, and its version."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self.held)
            model, version = self._current, self.version
            self._calls[model] += 1
        try:
            yield model, version
        finally:
            async with self._changed:
                self._calls[model] -= 1
                self._changed.notify_all()

    # --- vLLM

    async def _check_release(self) -> None:
        """Raise SettingsError where this release of vLLM cannot load weights from a folder."""
        async with self._session.get(f"{self.url}/version") as answer:
            given = (await answer.json()).get("version", "") if answer.status == 200 else ""
        found = re.match(r"(\d+)\.(\d+)", given)  # builds of its own main branch are 0.1.dev…
        if found and (int(found[1]), int(found[2])) < OLDEST and "dev" not in given:
            raise SettingsError(
                f"vLLM {given} cannot load weights from a folder, as each step of a training does: install "
                f"{OLDEST[0]}.{OLDEST[1]} or a newer release"
            )

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
    """Make the front for `vllm serve` with these options, without starting it.

    Raises SettingsError where vLLM is not installed, and for an option that would belie what the front says of its answers.
    """
    try:
        check_names(more, "vllm serve", SET_BY_FRONT)
    except ValueError as error:
        raise SettingsError(str(error)) from None
    port, model = free_port(), Path(options.model)
    command = [vllm_command(options.vllm), "serve", options.model, "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    # processed_logprobs: of the distribution sampled from, at any temperature; generation-config vllm: no defaults from the model's folder
    command += ["--served-model-name", options.name, "--host", "127.0.0.1", "--port", str(port), "--seed", str(options.seed)]
    if any(next(model.glob(each), None) for each in MISTRALS_OWN):
        command += ["--tokenizer-mode", "hf"]
    rank = next((each for each in LORA_RANKS if each >= options.lora_rank), 0) if options.lora_rank else 0
    command += ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", "2"] if rank else []
    command += ["--enable-sleep-mode"] if options.sleep else []
    if not any(each.startswith("--tool-call-parser") for each in more) and (parser := tool_parser(model)) is not None:
        command += ["--enable-auto-tool-choice", "--tool-call-parser", parser]
    command += more
    process = Process(
        "vLLM", command, log=Path(options.log), env={name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
    )
    return Front(
        process,
        f"http://127.0.0.1:{port}",
        options.version,
        name=options.name,
        model=model,
        weights=Path(options.weights) if options.weights else None,
        adapter_rank=rank,
        sleeps=options.sleep,
        strict=os.environ.get(STRICT, ENVIRONMENT[STRICT]).lower() in ("true", "1"),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = make_parser("agl_otel.algorithms.grpo.vllm", "vLLM as a policy server.")
    parser.add_argument("--seed", type=int, default=0, help="of vLLM's engine")
    parser.add_argument("--vllm", help="the program  [default: that of this environment, or of the PATH]")
    parser.add_argument("--lora-rank", type=int, help="take LoRA adapters up to this rank  [default: merged weights only]")
    parser.add_argument("--sleep", action="store_true", help="offer POST /sleep, which frees the GPU's memory, and POST /wake")
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
