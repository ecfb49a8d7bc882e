"""Questions that the tiny model can learn to answer: a number, and the digit that follows its last one."""

from __future__ import annotations

from agl_otel.algorithms.grpo.tiny import TRAIN_NUMBERS, question


def train() -> list[dict[str, str]]:
    return [{"question": question(number), "expected": str((number + 1) % 10)} for number in TRAIN_NUMBERS]
