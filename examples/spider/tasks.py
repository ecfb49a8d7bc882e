"""The questions as tasks: the agent sees `database` and `question`, the grader `query` too."""

from __future__ import annotations

from databases import QUESTIONS


def train() -> list[dict[str, str]]:
    return [_task(*each) for place, each in enumerate(QUESTIONS) if place % 5 != 2]


def val() -> list[dict[str, str]]:
    return [_task(*each) for place, each in enumerate(QUESTIONS) if place % 5 == 2]


def _task(database: str, question: str, query: str) -> dict[str, str]:
    return {"database": database, "question": question, "query": query}
