"""Serve a sampling client as a model: OpenAI's chat completions, with token ids, log-probs and the version of the weights."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from agl_otel_hook.conventions import HEADER_MODEL_VERSION


class Served:
    """Samples with `sampler`, which may be replaced at any time; each call uses one sampler throughout."""

    def __init__(self, tinker: Any, tokenizer: Any) -> None:
        self._tinker, self._tokenizer = tinker, tokenizer
        self.sampler: Any = None
        self.version = ""
        self.url = ""
        self._app = web.Application()
        self._app.router.add_post("/v1/chat/completions", self._chat)
        self._runner = web.AppRunner(self._app, access_log=None)

    async def __aenter__(self) -> Served:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _chat(self, request: web.Request) -> web.Response:
        asked, sampler, version = await request.json(), self.sampler, self.version
        prompt = self._tokenizer.apply_chat_template(asked["messages"], add_generation_prompt=True, tokenize=True)
        params = self._tinker.SamplingParams(
            max_tokens=asked.get("max_tokens") or 256, temperature=asked.get("temperature", 1.0), seed=asked.get("seed")
        )
        drawn = await sampler.sample_async(self._tinker.ModelInput.from_ints(prompt), asked.get("n") or 1, params)
        choices = [self._choice(place, sequence, asked) for place, sequence in enumerate(drawn.sequences)]
        body: dict[str, Any] = {"id": "chatcmpl-1", "object": "chat.completion", "created": 0, "model": asked["model"], "choices": choices}
        if asked.get("return_token_ids"):
            body["prompt_token_ids"] = prompt
        return web.json_response(body, headers={HEADER_MODEL_VERSION: version})

    def _choice(self, place: int, sequence: Any, asked: dict[str, Any]) -> dict[str, Any]:
        said = {"role": "assistant", "content": self._tokenizer.decode(sequence.tokens)}
        choice: dict[str, Any] = {"index": place, "message": said, "finish_reason": "stop", "logprobs": None}
        if asked.get("logprobs"):
            choice["logprobs"] = {"content": [{"token": "", "logprob": each, "top_logprobs": []} for each in sequence.logprobs]}
        if asked.get("return_token_ids"):
            choice["token_ids"] = sequence.tokens
        return choice
