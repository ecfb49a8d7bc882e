"""Another agent to find a prompt for: it chooses a meeting room by a tool; the reward is 1.0 for the room that fits best."""

from __future__ import annotations

import json
from typing import Any

from openai import AsyncOpenAI

import agl_otel as agl

ROOMS: list[dict[str, Any]] = [
    {"name": "Hall", "seats": 20, "equipment": ["screen", "whiteboard"], "booked": ["10:00"]},
    {"name": "Loft", "seats": 8, "equipment": ["screen"], "booked": ["9:00", "14:00"]},
    {"name": "Den", "seats": 4, "equipment": ["whiteboard"], "booked": ["11:00"]},
    {"name": "Nook", "seats": 3, "equipment": [], "booked": []},
    {"name": "Barn", "seats": 9, "equipment": ["screen", "whiteboard"], "booked": ["9:00"]},
]
TOOL = {
    "type": "function",
    "function": {
        "name": "rooms_at",
        "description": "All rooms, with seats and equipment, and whether they are free at a time.",
        "parameters": {"type": "object", "properties": {"time": {"type": "string"}}, "required": ["time"]},
    },
}


def rooms_at(time: str) -> str:
    return json.dumps(
        [{**{key: room[key] for key in ("name", "seats", "equipment")}, "free": time not in room["booked"]} for room in ROOMS]
    )


def best(people: int, time: str, needs: list[str]) -> str:
    """Return the smallest free room with enough seats and the equipment."""
    fitting = [r for r in ROOMS if r["seats"] >= people and time not in r["booked"] and set(needs) <= set(r["equipment"])]
    return min(fitting, key=lambda room: room["seats"])["name"]


def tasks(first: int, count: int = 6) -> list[dict[str, Any]]:
    asked = [(2, "9:00", []), (4, "11:00", []), (3, "10:00", ["whiteboard"]), (5, "9:00", ["screen"]), (6, "14:00", ["screen"])]
    asked += [(4, "10:00", ["whiteboard"]), (7, "10:00", ["screen"]), (3, "11:00", ["whiteboard"]), (8, "11:00", []), (9, "14:00", [])]
    asked += [(2, "14:00", ["screen"]), (4, "9:00", ["whiteboard"])]
    return [
        {"people": people, "time": time, "needs": needs, "expected": best(people, time, needs)}
        for people, time, needs in asked[first : first + count]
    ]


def train() -> list[dict[str, Any]]:
    return tasks(0)


def val() -> list[dict[str, Any]]:
    return tasks(6)


async def choose(task: dict[str, Any], prompt_template: agl.PromptTemplate, llm: agl.LLM) -> float:
    needs = ", ".join(task["needs"]) or "nothing"
    asked = f"We are {task['people']} at {task['time']} and need: {needs}. Reply with the name of a room."
    messages: list[Any] = [{"role": "system", "content": prompt_template.format()}, {"role": "user", "content": asked}]
    async with AsyncOpenAI(base_url=llm.get_base_url(), api_key=llm.api_key or "none") as client:
        for _ in range(4):
            reply = await client.chat.completions.create(model=llm.model, messages=messages, tools=[TOOL])
            said = reply.choices[0].message
            if not said.tool_calls:
                return float((said.content or "").strip(" .") == task["expected"])
            messages.append(said.model_dump(exclude_none=True))
            for call in said.tool_calls:
                found = rooms_at(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
    return 0.0
