"""1.0 where the answer, the agent's last line, is the expected number."""

import re


def grade(task, answer):
    lines = answer.strip().splitlines() or [""]
    return float(re.findall(r"\d+", lines[-1])[-1:] == [task["expected"]])
