"""What reviews of attempts say together: who agrees, what is to be reviewed next, what a rubric asks. Pure."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

from agl_otel.errors import UsageError
from agl_otel.spans.rewards import score_of, usable
from agl_otel.types import Event, Span
from agl_otel.types.columns import AttemptKey
from agl_otel.types.reviews import JUDGE, Agreement, Answered, Calibration, Review
from agl_otel_hook import conventions

MOST_LABELS: Final = 9
"""Of a rubric: each has a key."""
_LABEL: Final = re.compile(r"(?P<label>[^=]*)=(?P<value>[^=]*)")
K = TypeVar("K", bound=Hashable)


def agreement(reviewers: tuple[str, str], first: Mapping[K, str], second: Mapping[K, str]) -> Agreement:
    """Compute Cohen's kappa of two reviewers' labels, {attempt: label}, over the attempts that both have reviewed."""
    both = [(first[key], second[key]) for key in first if key in second]
    labels = sorted({label for pair in both for label in pair})
    places = {label: place for place, label in enumerate(labels)}
    counts = [[0] * len(labels) for _ in labels]
    for a, b in both:
        counts[places[a]][places[b]] += 1
    n = len(both)
    found = Agreement(reviewers=reviewers, n=n, labels=labels, counts=counts)
    if not n:
        return found.model_copy(update={"undefined": "no attempt has been reviewed by both"})
    same = sum(counts[place][place] for place in range(len(labels)))
    chance = sum(sum(counts[place]) * sum(line[place] for line in counts) for place in range(len(labels)))  # n * n times the share
    shares = {"observed": same / n, "expected": chance / n**2}
    if chance == n**2:
        return found.model_copy(update={**shares, "undefined": "both used one label for all: chance alone would agree as often"})
    return found.model_copy(update={**shares, "kappa": (n * same - chance) / (n**2 - chance)})


def last_verdicts(reviews: Iterable[Review]) -> dict[str, dict[AttemptKey, str]]:
    """Return {source: {attempt: its last verdict}}."""
    found: dict[str, dict[AttemptKey, str]] = {}
    for review in sorted(reviews, key=lambda each: each.time):
        found.setdefault(review.source, {})[review.rollout_id, review.attempt_id] = review.verdict
    return found


def calibration(judge: str, rubric: str, reviews: Iterable[Review]) -> Calibration:
    """Compare a judge's verdicts with the reviews of people, all under one rubric: of each source the last on an attempt counts."""
    last: dict[str, dict[AttemptKey, Review]] = {}
    for review in sorted(reviews, key=lambda each: each.time):
        last.setdefault(review.source, {})[review.rollout_id, review.attempt_id] = review
    own = last.get(judge, {})
    people = {source: given for source, given in last.items() if not source.startswith(JUDGE)}
    verdicts = {source: {key: review.verdict for key, review in given.items()} for source, given in {**people, judge: own}.items()}
    pairs = [agreement((judge, source), verdicts[judge], verdicts[source]) for source in sorted(people)]
    values: dict[AttemptKey, list[float]] = {}
    for given in people.values():
        for key, review in given.items():
            if review.value is not None and key in own:
                values.setdefault(key, []).append(review.value)
    means = {key: sum(found) / len(found) for key, found in values.items()}
    apart = [abs(value - means[key]) for key in means if (value := own[key].value) is not None]
    return Calibration(
        judge=judge,
        rubric=rubric,
        judged=len(own),
        reviewers=sorted((pair for pair in pairs if pair.n), key=lambda pair: -pair.n),
        n=len(apart),
        mean_absolute_difference=sum(apart) / len(apart) if apart else None,
        labels=_answered(own, means),
    )


def _answered(own: Mapping[AttemptKey, Review], means: Mapping[AttemptKey, float]) -> list[Answered]:
    groups: dict[tuple[float | None, str], list[float]] = {}
    for key, review in own.items():
        groups.setdefault((review.value, review.label), []).extend([means[key]] if key in means else [])
    ordered = sorted(groups, key=lambda each: (each[0] is None, each[0] or 0.0, each[1]))
    rewarded = [(value, groups[value, label]) for value, label in ordered if value is not None and groups[value, label]]
    fitted = monotone(rewarded)
    return [
        Answered(
            label=label or f"{value:g}",
            value=value,
            n=len(found := groups[value, label]),
            people=sum(found) / len(found) if found else None,
            fitted=None if value is None else fitted.get(value),
        )
        for value, label in ordered
    ]


def monotone(points: Iterable[tuple[float, Sequence[float]]]) -> dict[float, float]:
    """Fit {x: y} that never falls as x rises to the y of each x, by least squares: the pool-adjacent-violators algorithm.

    (R. Barlow et al., Statistical Inference under Order Restrictions, 1972.)
    """
    at: dict[float, list[float]] = {}
    for x, ys in points:
        at.setdefault(x, []).extend(ys)
    blocks: list[tuple[list[float], float, int]] = []  # their x, the sum of their y and its number
    for x in sorted(at):
        blocks.append(([x], sum(at[x]), len(at[x])))
        while len(blocks) > 1 and blocks[-2][1] / blocks[-2][2] >= blocks[-1][1] / blocks[-1][2]:
            (xs, total, n), (more, added, m) = blocks[-2:]
            blocks[-2:] = [([*xs, *more], total + added, n + m)]
    return {x: total / n for xs, total, n in blocks for x in xs}


def disagreements(reviews: Iterable[Review]) -> dict[AttemptKey, str]:
    """Return {attempt: who said what} of attempts on which sources differ under one rubric and name, the widest spread of values first."""
    groups: dict[tuple[AttemptKey, str, str], list[Review]] = {}
    for review in reviews:
        groups.setdefault(((review.rollout_id, review.attempt_id), review.rubric, review.name), []).append(review)
    spread: dict[AttemptKey, tuple[float, str]] = {}
    for (key, rubric, name), group in groups.items():
        if len({review.verdict for review in group}) < 2:
            continue
        values = [review.value for review in group if review.value is not None]
        said = ", ".join(f"{review.source} {review.verdict}" for review in sorted(group))
        wide = max(values) - min(values) if values else 0.0
        spread[key] = max(spread.get(key, (-1.0, "")), (wide, f"{rubric or name}: {said}"))
    return {key: spread[key][1] for key in sorted(spread, key=lambda key: (-spread[key][0], key))}


def shuffled(keys: Iterable[AttemptKey], seed: str) -> list[AttemptKey]:
    """Return attempts in a random order: for one seed always the same, for any part of them, too."""
    return sorted(keys, key=lambda key: hashlib.sha256("\n".join((seed, *key)).encode()).digest())


def labels_in(text: str) -> Sequence[tuple[str, float | None]]:
    """Return the (label, value) of a rubric's lines `label = value`; without a value the label alone is stored. Other lines are prose.

    Raises UsageError if there is none or more than MOST_LABELS, or one that is wrong.
    """
    found: dict[str, float | None] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if "=" not in line:
            continue
        match = _LABEL.fullmatch(line)
        label, value = (match["label"].strip(), match["value"].strip()) if match else ("", "")
        try:
            reward = float(value) if value else None
        except ValueError:
            reward = math.nan
        if not label or (reward is not None and not math.isfinite(reward)):
            raise UsageError(f"line {number} of the rubric, {line.strip()[:80]!r}, is no label: write `label = number`, or `label =`")
        if label in found:
            raise UsageError(f"the rubric has the label {label!r} twice")
        found[label] = reward
    if not found:
        raise UsageError("the rubric has no label: write one on a line of its own, as `good = 1`, or `not sure =` for one without a reward")
    if len(found) > MOST_LABELS:
        raise UsageError(f"the rubric has {len(found)} labels: at most {MOST_LABELS}, each has a key")
    return list(found.items())


def mean_review(spans: Iterable[Span], rubric: str) -> float | None:
    """Return the mean of the reviews of an attempt under a rubric, of each source the last; None without one that has a number."""
    values = [
        usable(score_of(event.attributes)) for (source, response), event in _last_feedback(spans, rubric).items() if source and not response
    ]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


class Correction(NamedTuple):
    """What should have been answered."""

    text: str
    time: int
    """When it was given, in Unix nanoseconds."""


def corrections_in(spans: Iterable[Span], rubric: str = "", sources: Collection[str] = ()) -> dict[str, Correction]:
    """Return {response id: its correction}, the empty id for the last reply before the correction, the latest correction first.

    With `rubric` only under it, with `sources` only theirs. Of each source the last feedback counts, also if it corrects nothing.
    """
    found = sorted(_last_feedback(spans, rubric).items(), key=lambda each: _time(each[1]), reverse=True)
    latest: dict[str, Correction] = {}
    for (source, response), event in found:
        if (text := _text(event, conventions.FEEDBACK_CORRECTION)) and (not sources or source in sources):
            latest.setdefault(response, Correction(text, _time(event)))
    return latest


def _last_feedback(spans: Iterable[Span], rubric: str) -> dict[tuple[str, str], Event]:
    """Return {(source, response id or empty): its last feedback}. Only records are feedback: agents write the events of spans."""
    events = [
        event
        for span in spans
        for event in span.events
        if event.is_record and event.name == conventions.EVALUATION and (not rubric or _text(event, conventions.FEEDBACK_RUBRIC) == rubric)
    ]
    given = [event for event in events if _text(event, conventions.FEEDBACK_ID)]
    return {(_text(event, conventions.FEEDBACK_SOURCE), _text(event, conventions.RESPONSE_ID)): event for event in sorted(given, key=_time)}


def _text(event: Event, key: str) -> str:
    return str(event.attributes.get(key, ""))


def _time(event: Event) -> int:
    return event.time_unix_nano or 0
