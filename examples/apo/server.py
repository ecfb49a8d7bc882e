"""OpenAI-compatible models in one small server: `words` (words.py), `rooms`, and a scripted editor that stands for a large model.

`rooms` looks rooms up by the tool that it is given, and heeds of them what its system prompt speaks of.

The editor reads nothing but the text it is sent, and the same prompts, rewards and critique give the same answer. `critic` says which tasks
went wrong and what was wanted; any other name writes a prompt. HABITS says how well; `shut` answers an error to every call.

    python server.py --port 8000 [--habit reads]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import zlib
from collections.abc import Callable
from typing import Any

from aiohttp import web
from words import FILLERS, OPERATIONS, WORDS, Model

ROLLOUT = re.compile(r'reward (\S+)\.\s+Task: \{"(?:digit|input)": "?(\d)"?, (?:"messages": \[.*?\], )?"(?:wanted|expected)": "(\d)"')
"""A task of tasks.py, or one that `agl-otel improve` made of traffic."""
PROMPT = re.compile(r"# The (?:other )?prompt\n\n(.*?)(?=\n\n#)", re.DOTALL)
WRONG = re.compile(r"(\d) asks for (\d)")


def reads(text: str, source: random.Random) -> str:
    """Two times of three the operation that explains what was wanted, else any."""
    wanted = WRONG.findall(text) or [(digit, answer) for reward, digit, answer in ROLLOUT.findall(text) if reward == "0"]
    fitting = [word for word, does in OPERATIONS.items() if wanted and all(does(int(digit)) == int(answer) for digit, answer in wanted)]
    return source.choice(fitting) if fitting and source.random() < 2 / 3 else source.choice(WORDS)


HABITS: dict[str, Callable[[str, random.Random], str]] = {
    "reads": reads,
    "guesses": lambda text, source: source.choice(WORDS),
    "repeats": lambda text, source: text.partition("# The prompt\n\n")[2].partition("\n\n#")[0],
    "babbles": lambda text, source: "zzz " * source.randint(1, 3),
    "invents": lambda text, source: "next {nonsense}",
}


class Server:
    """`app` answers POST /v1/chat/completions; `calls` counts those of the editor."""

    def __init__(self, habit: str = "reads", *, seed: int = 0) -> None:
        self.habit, self.shut, self.calls, self.seed = habit, False, 0, seed
        self.model = Model()
        self.app = web.Application()
        self.app.router.add_post("/v1/chat/completions", self._chat)

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["model"] == "rooms":
            return _choose(body)
        said = {message["role"]: message["content"] for message in body["messages"]}
        if body["model"] == "words":
            return _reply(body["model"], self.model.answer(said.get("system", ""), int(said["user"])), said)
        self.calls += 1
        if self.shut:
            return web.json_response({"error": {"message": "the editor is down", "type": "server_error"}}, status=503)
        text = said["user"]
        source = random.Random(f"{self.seed} {_essence(text)}")  # not the whole text: traces have times and ids in them
        return _reply(body["model"], _critique(text) if body["model"] == "critic" else self._prompt(text, source), said)

    def _prompt(self, text: str, source: random.Random) -> str:
        answer = HABITS[self.habit](text, source)
        return f"{source.choice(FILLERS)} {answer}" if self.habit in ("reads", "guesses") else answer


def _choose(body: dict[str, Any]) -> web.Response:
    """Calls the tool; then the first room of those that fit as far as the system prompt says what fits."""
    system, asked = (message["content"] for message in body["messages"][:2])
    people, time, needs = re.findall(r"We are (\d+) at (\S+) and need: (.*?)\.", asked)[0]
    said = {"system": system, "user": asked}
    if body["messages"][-1]["role"] != "tool":
        function = {"name": "rooms_at", "arguments": json.dumps({"time": time})}
        return _reply("rooms", "", said, calls=[{"id": "call_1", "type": "function", "function": function}])
    heeds: dict[str, Callable[[dict[str, Any]], bool]] = {
        "free": lambda room: room["free"],
        "seats": lambda room: room["seats"] >= int(people),
        "equipment": lambda room: needs == "nothing" or set(needs.split(", ")) <= set(room["equipment"]),
    }
    fits = [heed for word, heed in heeds.items() if word in system]
    rooms = [room for room in json.loads(body["messages"][-1]["content"]) if all(heed(room) for heed in fits)]
    rooms = sorted(rooms, key=lambda room: room["seats"]) if "smallest" in system else rooms
    return _reply("rooms", rooms[0]["name"] if rooms else "None.", said)


def _essence(text: str) -> list[object]:
    return [PROMPT.findall(text), ROLLOUT.findall(text), WRONG.findall(text)]


def _critique(text: str) -> str:
    wrong = [f"- {digit} asks for {wanted}" for reward, digit, wanted in ROLLOUT.findall(text) if reward == "0"]
    return "\n".join(wrong) or "- nothing went wrong"


def _reply(model: str, text: str, said: dict[str, str], calls: list[dict[str, Any]] | None = None) -> web.Response:
    message = {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}
    choice: dict[str, Any] = {"index": 0, "finish_reason": "tool_calls" if calls else "stop", "message": message}
    asked, answered = sum(len(part) // 4 + 1 for part in said.values()), len(text) // 4 + 1
    usage = {"prompt_tokens": asked, "completion_tokens": answered, "total_tokens": asked + answered}
    body = {
        "id": f"chatcmpl-{zlib.crc32(json.dumps([said, text]).encode()):08x}",
        "object": "chat.completion",
        "created": 0,
        "model": model,
    }
    return web.json_response({**body, "choices": [choice], "usage": usage})


async def serve(server: Server, port: int = 0) -> tuple[web.AppRunner, str]:
    """Start it; the runner to clean up, and the base URL for a client."""
    runner = web.AppRunner(server.app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}/v1"


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--habit", choices=HABITS, default="reads")
    options = parser.parse_args()
    _, url = await serve(Server(options.habit), options.port)
    print(url, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
