"""ChartQA's relaxed accuracy (arXiv:2203.10244, §5): a number within 5 % of the expected one is correct."""

import re
from typing import Any


def grade(task: dict[str, Any], answer: str) -> float:
    said, expected = re.findall(r"-?\d+(?:\.\d+)?", answer), float(task["expected"])
    return float(bool(said) and abs(float(said[-1]) - expected) <= 0.05 * abs(expected))
