"""Reward: F1 score of the words of the answer and of the expected answer."""

import re
from collections import Counter
from typing import Any


def grade(task: dict[str, Any], answer: str) -> float:
    said, expected = (Counter(re.findall(r"\w+", text.lower())) for text in (answer, task["expected"]))
    same = (said & expected).total()
    return 2 * same / (said.total() + expected.total()) if same else 0.0
