"""A fine-tuning service in one small process, with the APIs of Azure OpenAI that finetune.py uses: files, jobs, deployments, chat.

    python service.py --port 8095

Its models are tiny but really learn: each follows one of four rules at random, with weights that fine-tuning shifts towards the rules of
the uploaded conversations. It accepts OpenAI's fields, and refuses others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from aiohttp import web

RULES: tuple[Callable[[int], int], ...] = (
    lambda number: number % 10,
    lambda number: (number + 1) % 10,
    lambda number: (number + 2) % 10,
    lambda number: 9 - number % 10,
)
KNOWN = {"model", "messages", "temperature", "max_tokens", "stream", "seed", "logprobs"}
POLLS = 2  # number of polls until a job or deployment is done


class Service:
    def __init__(self, model: str) -> None:
        self.models = {model: [0.25] * 4}
        self.deployed = {model: model}
        self.files: dict[str, list[dict[str, Any]]] = {}
        self.jobs: dict[str, dict[str, Any]] = {}
        self.polls: dict[str, int] = {}
        self.asked: Counter[tuple[str, int]] = Counter()
        self.app = web.Application()
        self.app.add_routes(
            [
                web.post("/openai/v1/files", self.upload),
                web.get("/openai/v1/files/{id}", self.file),
                web.post("/openai/v1/fine_tuning/jobs", self.begin),
                web.get("/openai/v1/fine_tuning/jobs/{id}", self.job),
                web.post("/openai/v1/chat/completions", self.chat),
                web.put("/account/deployments/{name}", self.deploy),
                web.get("/account/deployments/{name}", self.deployment),
                web.delete("/account/deployments/{name}", self.forget),
                web.get("/account/deployments", self.all),
            ]
        )

    async def upload(self, request: web.Request) -> web.Response:
        form = await request.post()
        rows = [json.loads(line) for line in form["file"].file.read().splitlines()]
        if not rows or any(set(row) - {"messages", "tools"} for row in rows):
            return web.json_response({"error": {"message": "each line is {messages, tools}"}}, status=400)
        name = f"file-{len(self.files)}"
        self.files[name] = rows
        return web.json_response(self._file(name))

    async def file(self, request: web.Request) -> web.Response:
        return web.json_response(self._file(request.match_info["id"]))

    def _file(self, name: str) -> dict[str, Any]:
        about = {"bytes": 1, "created_at": 0, "filename": f"{name}.jsonl", "purpose": "fine-tune", "status": "processed"}
        return {"id": name, "object": "file", **about}

    async def begin(self, request: web.Request) -> web.Response:
        asked = await request.json()
        name, model = f"job-{len(self.jobs)}", f"{asked['model']}.ft-{asked['suffix']}"
        self.models[model] = self._learn(self.models[self.deployed[asked["model"]]], self.files[asked["training_file"]])
        self.jobs[name] = {"id": name, "object": "fine_tuning.job", "created_at": 0, "model": asked["model"], "fine_tuned_model": model}
        return web.json_response(self.jobs[name] | {"status": "queued"})

    async def job(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        return web.json_response(self.jobs[name] | {"status": "succeeded" if self._done(name) else "running"})

    def _learn(self, shares: list[float], rows: list[dict[str, Any]]) -> list[float]:
        """Return new weights of the rules: how often the conversations follow each, plus a small share of the old weights."""
        followed = [0.02 * share for share in shares]
        for row in rows:
            number, said = int(re.findall(r"\d+", row["messages"][-2]["content"])[0]), row["messages"][-1]["content"]
            fitting = [place for place, rule in enumerate(RULES) if str(rule(number)) == said]
            for place in fitting:
                followed[place] += shares[place] / sum(shares[other] for other in fitting) / len(rows)
        return [each / sum(followed) for each in followed]

    def _answer(self, model: str, number: int) -> str:
        """Answer by a rule drawn from the model, the number and its count of requests, so that the order of requests does not matter."""
        self.asked[model, number] += 1
        [rule] = random.Random(f"{model} {number} {self.asked[model, number]}").choices(RULES, self.models[model])
        return str(rule(number))

    async def deploy(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        self.deployed[name] = (await request.json())["properties"]["model"]["name"]
        return web.json_response(self._deployment(name, "Creating"), status=201)

    async def deployment(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        return web.json_response(self._deployment(name, "Succeeded" if self._done(name) else "Creating"))

    def _deployment(self, name: str, state: str) -> dict[str, Any]:
        return {"name": name, "properties": {"provisioningState": state, "model": {"name": self.deployed[name]}}}

    async def forget(self, request: web.Request) -> web.Response:
        del self.deployed[request.match_info["name"]]
        return web.Response(status=204)

    async def all(self, request: web.Request) -> web.Response:
        return web.json_response({"value": [self._deployment(name, "Succeeded") for name in self.deployed]})

    def _done(self, name: str) -> bool:
        self.polls[name] = self.polls.get(name, 0) + 1
        return self.polls[name] >= POLLS

    async def chat(self, request: web.Request) -> web.Response:
        asked = await request.json()
        if unknown := set(asked) - KNOWN:
            return web.json_response({"error": {"message": f"Unrecognized request argument supplied: {sorted(unknown)[0]}"}}, status=400)
        if asked["model"] not in self.deployed:
            return web.json_response({"error": {"message": f"there is no deployment {asked['model']}"}}, status=404)
        said = self._answer(self.deployed[asked["model"]], int(re.findall(r"\d+", asked["messages"][-1]["content"])[0]))
        choice = {"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop", "logprobs": None}
        usage = {"prompt_tokens": 8, "completion_tokens": 1, "total_tokens": 9}
        body = {"id": "chatcmpl-1", "object": "chat.completion", "created": 0, "model": asked["model"], "choices": [choice], "usage": usage}
        return web.json_response(body)


async def main(port: int, model: str) -> None:
    runner = web.AppRunner(Service(model).app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8095)
    parser.add_argument("--model", default="gpt-4.1-mini")
    asyncio.run(main(**vars(parser.parse_args())))
