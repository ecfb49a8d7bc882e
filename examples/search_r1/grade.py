"""Reward: exact match, ignoring case, articles and punctuation."""

import re
from typing import Any


def plain(text: str) -> list[str]:
    return [word for word in re.findall(r"\w+", text.lower()) if word not in ("a", "an", "the")]


def grade(task: dict[str, Any], answer: str) -> float:
    return float(plain(answer) == plain(task["expected"]))
