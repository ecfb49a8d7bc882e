"""Reward 1.0 if the last line is `Answer: ` and the expected number."""

import re
from typing import Any


def grade(task: dict[str, Any], answer: str) -> float:
    found = re.search(r"Answer: *(-?[\d.]+)\s*$", answer)
    return float(found is not None and float(found[1].rstrip(".") or "nan") == float(task["expected"]))
