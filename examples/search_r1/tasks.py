"""Questions about some people to train on, about the others to validate with."""

from __future__ import annotations

from corpus import questions

HELD_OUT = 6


def train() -> list[dict[str, str]]:
    return questions()[:-HELD_OUT]


def val() -> list[dict[str, str]]:
    return questions()[-HELD_OUT:]
