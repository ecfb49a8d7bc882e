"""Functions as tools that are answered from a stored attempt. Tools of frameworks: tests/system/test_replayed_tools.py."""

from __future__ import annotations

from typing import Any

from agl_otel.adapters.replay import Recorded, ToolCall
from agl_otel.adapters.replayed import replayed


def recorded() -> Recorded:
    return Recorded({ToolCall.of("look", {"at": "sun", "zoom": 2}): ["hot", "hotter"]})


def test_a_function_is_answered_by_the_arguments_that_it_is_given() -> None:
    def look(at: str, zoom: int = 1) -> str:
        raise AssertionError("it was called")

    known = recorded()
    tool = replayed(look, known)
    assert tool.__name__ == "look" and [tool("sun", 2), tool(zoom=2, at="sun")] == ["hot", "hotter"]
    assert tool("sun", 2) == 'look({"at": "sun", "zoom": 2}) was not recorded: a replay calls no tool'
    assert "was not recorded" in tool("sun")
    assert known.misses == {ToolCall.of("look", {"at": "sun", "zoom": 2}): 1, ToolCall.of("look", {"at": "sun"}): 1}


async def test_an_async_function_with_any_arguments_stays_one() -> None:
    async def look(at: str, **others: Any) -> str:
        raise AssertionError("it was called")

    assert await replayed(look, recorded())("sun", zoom=2) == "hot"
