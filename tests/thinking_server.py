"""A model server whose template drops thinking: a real HTTP server with a real tokeniser and template, and scripted replies."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web

from agl_otel.proxy.bridge import FORMS
from tests.chat_templates import FAMILIES, tokenizer_of

Json = dict[str, Any]


class ThinkingServer:
    """Thinks before each reply, and hands out the thinking apart from the text, as servers with a reasoning parser do.

    Args:
        takes: the fields of bridge.FORMS that it heeds.
        refuses: whether it answers requests with others of them by 400.
        renders: whether it has /tokenize.
    """

    def __init__(self, family: str = "qwen3", *, takes: tuple[str, ...] = FORMS[:1], refuses: bool = False, renders: bool = True) -> None:
        self.tokenizer, self.end = tokenizer_of(family), FAMILIES[family].ends[0]
        self.takes, self.refuses, self.renders = takes, refuses, renders
        self.requests: list[Json] = []
        self.sampled: list[tuple[list[int], list[int]]] = []
        """Prompt and reply of each call, as token ids."""
        self.replies: list[tuple[str, str]] = []
        """(thinking, text) of the next calls; empty: made up."""
        self.finish = "stop"
        self.url = ""

    async def __aenter__(self) -> ThinkingServer:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._chat)
        if self.renders:
            app.router.add_post("/tokenize", self._tokenize)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    def render(self, messages: list[Json], tools: Any = None, *, generation_prompt: bool = True) -> list[int]:
        tokenizer: Any = self.tokenizer
        text = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=generation_prompt, tokenize=False)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        ids = self.render(body["messages"], body.get("tools"), generation_prompt=body["add_generation_prompt"])
        return web.json_response({"tokens": ids, "count": len(ids)})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        given = {form: body[form] for form in FORMS if form in body}
        if self.refuses and given.keys() - set(self.takes):
            return web.json_response({"error": {"message": f"unknown field {', '.join(given)}"}}, status=400)
        taken = next((given[form] for form in self.takes if form in given), None)
        prompt = (taken[FORMS[0]] if isinstance(taken, dict) else taken) or self.render(body["messages"], body.get("tools"))
        thinking, text = self.replies.pop(0) if self.replies else (f"hm {len(self.sampled)}", f"reply {len(self.sampled)}")
        reply = self._pieces(f"<think>\n{thinking}\n</think>\n\n{text}")
        reply += self.tokenizer(self.end, add_special_tokens=False)["input_ids"] if self.finish == "stop" else []
        self.sampled.append((prompt, reply))
        message = {"role": "assistant", "content": text, "reasoning_content": thinking}
        logprobs = {"content": [{"token": "?", "logprob": -0.5, "bytes": None, "top_logprobs": []} for _ in reply]}
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": self.finish, "logprobs": logprobs, "token_ids": reply}
            usage = {"prompt_tokens": len(prompt), "completion_tokens": len(reply), "total_tokens": len(prompt) + len(reply)}
            return web.json_response(
                {**self._head(body), "object": "chat.completion", "prompt_token_ids": prompt, "choices": [choice], "usage": usage}
            )
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        head = {**self._head(body), "object": "chat.completion.chunk"}
        first: Json = {"index": 0, "delta": {**message, "content": ""}, "finish_reason": None, "logprobs": logprobs, "token_ids": reply}
        last: Json = {"index": 0, "delta": {"content": text}, "finish_reason": self.finish, "logprobs": None}
        for event in ({**head, "prompt_token_ids": prompt, "choices": [first]}, {**head, "choices": [last]}):
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    @staticmethod
    def _head(body: Json) -> Json:
        return {"id": "chatcmpl-1", "created": 0, "model": body["model"]}

    def _pieces(self, text: str) -> list[int]:
        """Tokenise three characters at a time, as a model may that does not know the tokeniser's merges."""
        pieces = [text[at : at + 3] for at in range(0, len(text), 3)]
        return [token for piece in pieces for token in self.tokenizer(piece, add_special_tokens=False)["input_ids"]]
