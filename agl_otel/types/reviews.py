"""Reviews of attempts by people and judges: each is feedback with a source and a rubric, on a whole attempt."""

from __future__ import annotations

from typing import NamedTuple

from agl_otel.types.model import Model


class RubricLabel(Model):
    """What a reviewer may answer."""

    label: str
    value: float | None = None
    """The reward of an attempt that is labelled so; None: none, unless the label stands for one, as `pass` does (docs/otlp.md)."""


class Rubric(Model):
    """One version of a rubric."""

    rubric: str
    """Name and version (`tone@2`), as feedback has them in its field `rubric`."""
    name: str
    version: int
    text: str
    """As it was written, with its labels."""
    labels: list[RubricLabel]


class Review(NamedTuple):
    """The last feedback of one source on one attempt, under one rubric and name."""

    rollout_id: str
    attempt_id: str
    source: str
    rubric: str
    name: str
    label: str
    value: float | None
    time: int
    """Unix nanoseconds."""

    @property
    def verdict(self) -> str:
        """Its label, else its value as a text."""
        return self.label or ("" if self.value is None else f"{self.value:g}")


class Agreement(Model):
    """How far two reviewers agree beyond chance: Cohen's kappa (J. Cohen, A Coefficient of Agreement for Nominal Scales, 1960)."""

    reviewers: tuple[str, str]
    n: int
    """Attempts that both have reviewed."""
    labels: list[str]
    counts: list[list[int]]
    """Attempts by label: a row for each of the first reviewer's, a column for each of the second's."""
    observed: float | None = None
    """Share of attempts with the same label."""
    expected: float | None = None
    """The share that chance would give reviewers who use the labels as often as these two."""
    kappa: float | None = None
    """(observed - expected) / (1 - expected); None where it is undefined."""
    undefined: str = ""
    """Why it is undefined."""
