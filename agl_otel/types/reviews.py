"""Reviews of attempts by people and judges: each is feedback with a source and a rubric, on a whole attempt."""

from __future__ import annotations

from typing import Final, NamedTuple

from agl_otel.types.model import Model

JUDGE: Final = "judge:"
"""How the source of a model's reviews begins; its name follows."""


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


class Took(NamedTuple):
    """What calls to a judge's model took."""

    calls: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0


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


class Answered(Model):
    """What people say, in the mean, of the attempts to which a judge gives a label."""

    label: str
    value: float | None
    """The label's own reward, where it has one."""
    n: int
    """Attempts with this label of the judge's, and a reward of a person's."""
    people: float | None
    """The mean of their rewards; None without any."""
    fitted: float | None
    """The same, as the nearest mapping of the judge's rewards that never falls where they rise (least squares); None without a reward."""


class Calibration(Model):
    """How far a judge agrees with people who have reviewed the same attempts under the same rubric."""

    judge: str
    rubric: str
    judged: int
    """Attempts with a verdict of the judge's."""
    reviewers: list[Agreement]
    """With each person, those with most common attempts first."""
    n: int
    """Attempts with a reward of the judge's and one of a person's."""
    mean_absolute_difference: float | None
    """Of the judge's rewards and the means of people's; None without any."""
    labels: list[Answered]
    """By the judge's label, the lowest reward first."""
