"""The share of the words of answer and expectation that are the same (F1), as is usual for answers in free text."""

import re
from collections import Counter
from typing import Any


def grade(task: dict[str, Any], answer: str) -> float:
    said, expected = (Counter(re.findall(r"\w+", text.lower())) for text in (answer, task["expected"]))
    same = (said & expected).total()
    return 2 * same / (said.total() + expected.total()) if same else 0.0
