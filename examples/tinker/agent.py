"""The player: asks a model for its next move until the game has ended."""

from __future__ import annotations

from game import Game
from openai import OpenAI

import agl_otel as agl

connections = OpenAI(base_url="http://127.0.0.1", api_key="none")  # shared, because each game has its own address


def play(task: str, llm: agl.LLM) -> float:
    game, client = Game(task), connections.with_options(base_url=llm.get_base_url(), api_key=llm.api_key or "none")
    while game.reward is None:
        reply = client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": game.prompt()}])
        game.take(reply.choices[0].message.content or "")
    return game.reward
