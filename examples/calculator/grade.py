"""Reward 1.0 if the last line is `Answer: ` and the expected number, else 0.0."""

import re
from typing import Any


def grade(task: dict[str, Any], answer: str) -> float:
    found = re.search(r"Answer: *(-?\d+(?:\.\d+)?)\.?\s*$", answer)
    return float(found is not None and float(found[1]) == float(task["expected"]))
