"""Questions about some people for training, about the others for validation."""

from __future__ import annotations

from corpus import questions

HELD_OUT = 6


def train() -> list[dict[str, str]]:
    return questions()[:-HELD_OUT]


def val() -> list[dict[str, str]]:
    return questions()[-HELD_OUT:]
