"""`vllm serve` without a model: answers the routes that grpo/vllm.py uses as release 0.32 does, after its source (as of 0.33, too).

    python -m tests.vllm_stand_in serve DIR --port PORT [more options of vllm serve]

For tests: GET /asked answers [[path, body], …], all that it was asked, its arguments first, once there are as many chats as ?chats= says. A
chat whose text is "wait" is answered after POST /go. $STAND_IN_RELEASE is the release that it claims to be. $STAND_IN_FAULT is /sleep or
/wake_up, which it then answers by 500.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from aiohttp import web


def option(name: str, default: str = "") -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


class StandIn:
    def __init__(self) -> None:
        self.base = option("--served-model-name", sys.argv[2])
        self.weights = sys.argv[2]
        self.adapters: dict[str, str] = {}
        self.asleep = False
        self.requests: list[Any] = [["argv", sys.argv[1:]]]
        self.came = asyncio.Condition()
        self.go = asyncio.Event()

    async def note(self, path: str, body: Any) -> None:
        async with self.came:
            self.requests.append([path, body])
            self.came.notify_all()

    async def asked(self, request: web.Request) -> web.Response:
        chats = int(request.query.get("chats", 0))
        async with self.came:
            await self.came.wait_for(lambda: sum(path == "/v1/chat/completions" for path, _ in self.requests) >= chats)
        return web.json_response(self.requests)

    async def set_go(self, request: web.Request) -> web.Response:
        self.go.set()
        return web.Response()

    async def version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": os.environ.get("STAND_IN_RELEASE", "0.32.0+cpu")})

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def models(self, request: web.Request) -> web.Response:
        limit = int(option("--max-model-len", "4096"))
        cards = [{"id": self.base, "object": "model", "root": sys.argv[2], "parent": None, "max_model_len": limit}]
        cards += [{"id": name, "object": "model", "root": path, "parent": self.base} for name, path in self.adapters.items()]
        return web.json_response({"object": "list", "data": cards})

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        name = body.get("model") or self.base
        sampled_by = self.weights if name == self.base else self.adapters.get(name)
        if sampled_by is None:
            message = f"The model `{name}` does not exist."
            return web.json_response({"error": {"message": message, "type": "NotFoundError", "param": "model", "code": 404}}, status=404)
        if self.asleep:
            return web.Response(status=500, text="the stand-in is asleep")  # the real one does not answer
        text = str(body.get("messages", [{}])[-1].get("content"))
        await self.note(request.path_qs, body)
        if text == "wait":
            await self.go.wait()
        message = {"role": "assistant", "content": sampled_by}
        return web.json_response({"object": "chat.completion", "model": name, "choices": [{"index": 0, "message": message}]})

    async def rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        await self.note(request.path_qs, body)
        self.weights = body["kwargs"]["weights_path"]
        return web.json_response({"results": [None]})

    async def reset(self, request: web.Request) -> web.Response:
        await self.note(request.path_qs, None)
        return web.json_response({"success": True})

    async def load_adapter(self, request: web.Request) -> web.Response:
        body = await request.json()
        await self.note(request.path_qs, body)
        name, place = body["lora_name"], Path(body["lora_path"])
        if name in self.adapters or name == self.base:
            message = (
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set 'load_inplace' to True."
            )
            return web.json_response({"error": {"message": message, "type": "InvalidUserInput", "param": None, "code": 400}}, status=400)
        if not (place / "adapter_config.json").exists():
            return web.json_response({"error": {"message": f"No adapter found for {place}", "code": 404}}, status=404)
        self.adapters[name] = str(place)
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def unload_adapter(self, request: web.Request) -> web.Response:
        body = await request.json()
        await self.note(request.path_qs, body)
        if self.adapters.pop(body["lora_name"], None) is None:
            return web.json_response({"error": {"message": "The lora adapter cannot be found.", "code": 404}}, status=404)
        return web.Response(text=f"Success: LoRA adapter '{body['lora_name']}' removed successfully.")

    async def sleep(self, request: web.Request) -> web.Response:
        await self.note(request.path_qs, None)
        if os.environ.get("STAND_IN_FAULT") == request.path:
            return web.Response(status=500, text="CUDA error: out of memory")
        self.asleep = True
        return web.json_response({"status": "sleeping", "level": int(request.query["level"])})

    async def wake(self, request: web.Request) -> web.Response:
        await self.note(request.path_qs, None)
        if os.environ.get("STAND_IN_FAULT") == request.path:
            return web.Response(status=500, text="CUDA error: out of memory")
        self.asleep = False
        return web.json_response({"status": "awake", "tags": None})

    def app(self) -> web.Application:
        made = web.Application()
        made.router.add_get("/health", self.health)
        made.router.add_get("/version", self.version)
        made.router.add_get("/asked", self.asked)
        made.router.add_post("/go", self.set_go)
        made.router.add_get("/v1/models", self.models)
        for path in ("/v1/completions", "/v1/chat/completions"):
            made.router.add_post(path, self.complete)
        if os.environ.get("VLLM_SERVER_DEV_MODE") == "1":
            made.router.add_post("/collective_rpc", self.rpc)
            made.router.add_post("/reset_prefix_cache", self.reset)
            made.router.add_post("/sleep", self.sleep)
            made.router.add_post("/wake_up", self.wake)
        if os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") == "1" and "--enable-lora" in sys.argv:
            made.router.add_post("/v1/load_lora_adapter", self.load_adapter)
            made.router.add_post("/v1/unload_lora_adapter", self.unload_adapter)
        return made


if __name__ == "__main__":
    web.run_app(StandIn().app(), host="127.0.0.1", port=int(option("--port")), print=None, handle_signals=True)
