"""The Pareto front of candidates: selection for mutation, pairs to merge, and merging. Pure.

After GEPA: Reflective Prompt Evolution Can Outperform Reinforcement Learning (Agrawal et al., arXiv:2507.19457), algorithms 2 to 4.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

Scores = Mapping[str, Sequence[float]]
"""{version: its score on each task}; rows of equal length."""


def front(scores: Scores) -> dict[str, set[int]]:
    """Return {version: indices of the tasks at which it has the best score} for the non-dominated versions, in the order of `scores`.

    A version is dominated if at each of these tasks another remaining version has the best score, too (algorithm 2). Versions are checked
    in order of their mean score, lowest first; among equals the earlier one remains.
    """
    tasks = len(next(iter(scores.values()), ()))
    best = [max(row[task] for row in scores.values()) for task in range(tasks)]
    wins = {version: {task for task in range(tasks) if row[task] == best[task]} for version, row in scores.items()}
    remaining = {version for version, won in wins.items() if won}
    order = list(scores)
    for version in sorted(remaining, key=lambda version: (mean(scores[version]), -order.index(version))):
        others = set[int]().union(*(wins[other] for other in remaining if other != version))
        if wins[version] <= others:
            remaining.discard(version)
    return {version: wins[version] for version in order if version in remaining}


def choose(scores: Scores, source: random.Random) -> str:
    """Sample a version of the front with probability proportional to its number of best tasks (algorithm 2)."""
    members = front(scores)
    return source.choices(list(members), weights=[len(won) for won in members.values()])[0]


def best(scores: Scores) -> str:
    """Return the version with the best mean score; among equals the first."""
    return max(scores, key=lambda version: mean(scores[version]))


def mean(row: Sequence[float]) -> float:
    """Compute the mean score; 0 without tasks."""
    return sum(row) / max(1, len(row))


def ancestors(version: str, parents: Mapping[str, Sequence[str]]) -> set[str]:
    """Return all ancestors of a version."""
    found: set[str] = set()
    waiting = list(parents.get(version, ()))
    while waiting:
        if (one := waiting.pop()) not in found:
            found.add(one)
            waiting += parents.get(one, ())
    return found


def pairs_to_merge(scores: Scores, parents: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    """List the pairs of the front to merge: neither descends from the other, and each has a best task that the other has not."""
    members = front(scores)
    versions = list(members)
    return [
        (left, right)
        for place, left in enumerate(versions)
        for right in versions[place + 1 :]
        if left not in ancestors(right, parents)
        and right not in ancestors(left, parents)
        and members[left] - members[right]
        and members[right] - members[left]
    ]


def common_ancestor(left: str, right: str, parents: Mapping[str, Sequence[str]], scores: Scores) -> str | None:
    """Return the common ancestor with the best mean score among those no better than either of the two; None where there is none."""
    bound = min(mean(scores[left]), mean(scores[right]))
    shared = [version for version in scores if version in ancestors(left, parents) & ancestors(right, parents)]
    fit = [version for version in shared if mean(scores[version]) <= bound]
    return max(fit, key=lambda version: mean(scores[version]), default=None)


def merged(ancestor: Mapping[str, str], left: Mapping[str, str], right: Mapping[str, str], *, left_is_better: bool) -> dict[str, str]:
    """Merge the prompts of two candidates (algorithm 4): take each prompt from the candidate that changed it since their ancestor.

    Where both changed it, take that of the better candidate.
    """
    result: dict[str, str] = {}
    for name, before in ancestor.items():
        changed = [text for text in (left[name], right[name]) if text != before]
        if len(changed) == 2:
            result[name] = left[name] if left_is_better else right[name]
        else:
            result[name] = changed[0] if changed else before
    return result
