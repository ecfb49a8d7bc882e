"""An OpenAI-compatible model server in one process, for tests, examples and models that run on a CPU.

    python -m agl_otel.algorithms.grpo.server --model DIR --port 8000

POST /v1/chat/completions (plain and streamed), POST /tokenize, GET /v1/models, GET /health, and for the trainer POST /weights
{"path", "version"} and GET /weights. It samples on the CPU; with --device cuda on a GPU, in float32.
The header `agl-model-version` of a response is the version of the weights that sampled it. Any server with OpenAI's API that returns
token ids and log-probs (vLLM) can be used instead.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Final

from aiohttp import web
from transformers.utils.logging import disable_progress_bar

from agl_otel.algorithms.grpo.generate import Row
from agl_otel.algorithms.grpo.model_port import (
    ANSWERING,
    CALLS,
    Calls,
    Origin,
    access_checks,
    count_calls,
    counted,
    error_body,
    error_response,
    json_body,
    make_parser,
    weights_wanted,
)
from agl_otel.algorithms.grpo.policy import load_policy, load_weights
from agl_otel.algorithms.grpo.sampler import Engine, Job, Record
from agl_otel.algorithms.grpo.wire import Reply, parse, parse_scoring, scored, server_sent_event
from agl_otel.errors import DataError, UnavailableError, UsageError, http_status
from agl_otel.net.http_server import listen, make_runner
from agl_otel.service.main import Serving, until_stopped
from agl_otel_hook.conventions import HEADER_MODEL_VERSION, HEADER_SAMPLING

MAX_REPLY_TOKENS: Final = 256  # where the request names no limit; OpenAI's default is the whole context
HEEDED: Final = "temperature, top_p"
"""The sampling parameters that this server heeds."""
ENGINE: Final = web.AppKey("engine", Engine)
MODEL_NAME: Final = web.AppKey("model_name", str)


def make_app(engine: Engine, model_name: str = "policy", *, host: str = "127.0.0.1", key: str = "", loads: bool = True) -> web.Application:
    """Create the server's application over a running engine, for a port of `host`.

    `key`: required of clients, if not empty; `loads`: whether there is POST /weights. Raises SettingsError.
    """
    app = web.Application(middlewares=[*access_checks(host, key), count_calls, _errors, counted()])
    app[CALLS] = Calls()
    app[ENGINE] = engine
    app[MODEL_NAME] = model_name
    app.router.add_post("/v1/chat/completions", _chat)
    app.router.add_post("/v1/completions", _score)
    app.router.add_post("/tokenize", _tokenize)
    app.router.add_get("/v1/models", _models)
    app.router.add_get("/health", _health)
    if loads:
        app.router.add_post("/weights", _set_weights)
        app.router.add_get("/weights", _weights)
    return app


@web.middleware
async def _errors(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
    """Convert errors to OpenAI's format."""
    try:
        return await handler(request)
    except (UsageError, DataError, UnavailableError) as error:
        return error_response(http_status(error), str(error))
    except web.HTTPException as error:
        return error_response(error.status, f"{request.method} {request.path}: {error.reason}")


async def _health(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok", "model_version": request.app[ENGINE].version, ANSWERING: request.app[CALLS].now})


async def _models(request: web.Request) -> web.Response:
    limit = request.app[ENGINE].policy.context_tokens
    card = {"id": request.app[MODEL_NAME], "object": "model", "created": 0, "owned_by": "agl-otel", "max_model_len": limit}
    return web.json_response({"object": "list", "data": [card]})


async def _weights(request: web.Request) -> web.Response:
    engine = request.app[ENGINE]
    path = engine.origin.path if engine.origin is not None else None
    return web.json_response({"version": engine.version, "path": path, "adapter_rank": 0, "sleeps": False})


async def _set_weights(request: web.Request) -> web.Response:
    folder, version = await weights_wanted(request)
    await request.app[ENGINE].set_weights(folder, version)
    return web.json_response({"version": version})


async def _chat(request: web.Request) -> web.StreamResponse:
    engine = request.app[ENGINE]
    chat = parse(await json_body(request))
    prompt = chat.prompt_token_ids or engine.policy.prompt_ids(chat.messages, chat.tools)
    _check_vocabulary(engine, "prompt_token_ids", chat.prompt_token_ids)
    room = engine.policy.context_tokens - len(prompt)
    if room < 1:
        raise UsageError(f"the prompt has {len(prompt)} tokens; the model's context is {engine.policy.context_tokens}, reply included")
    sampling = chat.sampling(room if chat.max_tokens else min(room, MAX_REPLY_TOKENS))
    top = chat.top_logprobs if chat.logprobs else 0
    rows = [Row(prompt, sampling, engine.row_random(chat.seed, choice), chat.seed is not None, top) for choice in range(chat.n)]
    reply = Reply(chat, rows, request.app[MODEL_NAME], engine.policy.decode)
    job = Job(reply.id, rows, asyncio.get_running_loop().create_future())
    if chat.stream:
        return await _stream(request, engine, job, reply)
    version = await engine.submit(job)
    return web.json_response(reply.whole(), headers={HEADER_MODEL_VERSION: version, HEADER_SAMPLING: HEEDED})


async def _score(request: web.Request) -> web.Response:
    """Answer with the log-probs of a prompt's tokens at temperature 1, as vLLM's /v1/completions does with `echo`."""
    engine = request.app[ENGINE]
    token_ids = parse_scoring(await json_body(request))
    _check_vocabulary(engine, "prompt", token_ids)
    if len(token_ids) > engine.policy.context_tokens:
        raise UsageError(f"the prompt has {len(token_ids)} tokens; the model's context is {engine.policy.context_tokens}")
    version, logprobs = await engine.score(token_ids)
    answer = scored(token_ids, logprobs, request.app[MODEL_NAME], engine.policy.decode)
    return web.json_response(answer, headers={HEADER_MODEL_VERSION: version})


def _check_vocabulary(engine: Engine, name: str, token_ids: Sequence[int]) -> None:
    if (most := max(token_ids, default=0)) >= engine.policy.vocabulary:
        raise UsageError(f"{name} has {most}: the model's tokens are 0 to {engine.policy.vocabulary - 1}")


async def _tokenize(request: web.Request) -> web.Response:
    """Answer with the token ids of a conversation, as vLLM's /tokenize does."""
    body, policy = await json_body(request), request.app[ENGINE].policy
    known = ("model", "messages", "tools", "tool_choice")
    chat = parse({name: body[name] for name in known if name in body} if isinstance(body, dict) else body)
    ids = policy.prompt_ids(chat.messages, chat.tools, generation_prompt=body.get("add_generation_prompt") is not False)
    return web.json_response({"tokens": ids, "count": len(ids), "max_model_len": policy.context_tokens})


async def _stream(request: web.Request, engine: Engine, job: Job, reply: Reply) -> web.StreamResponse:
    """Respond with server-sent events; the headers are sent with the first tokens, because the version is not known earlier."""
    ready: asyncio.Queue[tuple[str, list[int]]] = asyncio.Queue()
    job.on_tokens = lambda version, tokens: ready.put_nowait((version, tokens))
    running = asyncio.create_task(engine.submit(job))
    running.add_done_callback(lambda task: ready.put_nowait(("", [])))
    version, tokens = await ready.get()
    if not version:
        running.result()
    headers = {HEADER_MODEL_VERSION: version, HEADER_SAMPLING: HEEDED, "Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    await response.write(server_sent_event(reply.first_chunk()))
    while version:
        if chunks := reply.next_chunks(tokens):
            await response.write(b"".join(server_sent_event(chunk) for chunk in chunks))
        version, tokens = await ready.get()
    try:
        await running
        last = reply.last_chunk()
        await response.write((server_sent_event(last) if last else b"") + server_sent_event("[DONE]"))
    except UnavailableError as error:  # the status of the response is sent already
        await response.write(server_sent_event(error_body(http_status(error), str(error))))
    await response.write_eof()
    return response


@asynccontextmanager
async def serving(engine: Engine, model: str, *, host: str, port: int, model_name: str = "policy") -> AsyncGenerator[Serving]:
    """Serve `model` during the block."""
    async with engine:
        runner = make_runner(make_app(engine, model_name, host=host), shutdown_timeout=5.0)
        try:
            await runner.setup()
            yield Serving(f"serving {model} on http://{host}:{await listen(runner, host, port, None)}")
        finally:
            await runner.cleanup()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server from the command line; return its exit code."""
    parser = make_parser("agl_otel.algorithms.grpo.server", "An OpenAI-compatible model server.")
    parser.add_argument("--record", help="append a JSON line for every choice sampled to this file")
    parser.add_argument("--seed", type=int, default=0, help="seed of requests without one")
    parser.add_argument("--device", default="cpu", help='of torch, as "cuda"; a GPU suits models of some size')
    options = parser.parse_args(arguments)
    disable_progress_bar()
    origin = Origin(Path(options.weights or options.model))
    policy = load_policy(options.model, device=options.device)
    if options.weights is not None:
        load_weights(policy.model, Path(options.weights))
    with closing(Record(Path(options.record))) if options.record else nullcontext() as record:
        engine = Engine(policy, options.version, record=record, seed=options.seed, origin=origin)
        server = serving(engine, options.model, host=options.host, port=options.port, model_name=options.name)
        asyncio.run(until_stopped(server, partial(print, flush=True)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
