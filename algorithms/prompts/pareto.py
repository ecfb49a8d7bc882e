"""The Pareto front of candidates: selection for mutation, pairs to merge, and merging. Pure.

After GEPA: Reflective Prompt Evolution Can Outperform Reinforcement Learning (Agrawal et al., arXiv 2507.19457), algorithms 2 to 4.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

Scores = Mapping[str, Sequence[float]]
"""{version: its score on each task}, all of one length."""


def front(scores: Scores) -> dict[str, set[int]]:
    """{version: the tasks (places) at which nobody is better}, of those that are not dominated, in the order of `scores`.

    One is dominated where every task that it is best at has another that is best too and stays (algorithm 2). They are looked at
    from the worst mean on, so that of equals the earlier one stays.
    """
    tasks = len(next(iter(scores.values()), ()))
    best = [max(row[task] for row in scores.values()) for task in range(tasks)]
    wins = {version: {task for task in range(tasks) if row[task] == best[task]} for version, row in scores.items()}
    staying = {version for version, won in wins.items() if won}
    order = list(scores)
    for version in sorted(staying, key=lambda version: (mean(scores[version]), -order.index(version))):
        others = set[int]().union(*(wins[other] for other in staying if other != version))
        if wins[version] <= others:
            staying.discard(version)
    return {version: wins[version] for version in order if version in staying}


def choose(scores: Scores, source: random.Random) -> str:
    """A version of the front, each as likely as the number of tasks it is best at (algorithm 2)."""
    members = front(scores)
    return source.choices(list(members), weights=[len(won) for won in members.values()])[0]


def best(scores: Scores) -> str:
    """The version with the best mean; of equals the first."""
    return max(scores, key=lambda version: mean(scores[version]))


def mean(row: Sequence[float]) -> float:
    """The mean score; 0 without a task."""
    return sum(row) / max(1, len(row))


def ancestors(version: str, parents: Mapping[str, Sequence[str]]) -> set[str]:
    """All that a version descends from, without itself."""
    found: set[str] = set()
    waiting = list(parents.get(version, ()))
    while waiting:
        if (one := waiting.pop()) not in found:
            found.add(one)
            waiting += parents.get(one, ())
    return found


def pairs_to_merge(scores: Scores, parents: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    """Pairs of the front that may be merged: neither descends from the other, and each is best at a task that the other is not."""
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
    """Of what both descend from, the one with the best mean that is no better than either; None where there is none."""
    bound = min(mean(scores[left]), mean(scores[right]))
    shared = [version for version in scores if version in ancestors(left, parents) & ancestors(right, parents)]
    fit = [version for version in shared if mean(scores[version]) <= bound]
    return max(fit, key=lambda version: mean(scores[version]), default=None)


def merged(ancestor: Mapping[str, str], left: Mapping[str, str], right: Mapping[str, str], *, left_is_better: bool) -> dict[str, str]:
    """The prompts of two candidates in one (algorithm 4): of each, the one that has changed since their ancestor.

    Where both have changed, that of the better candidate.
    """
    result: dict[str, str] = {}
    for name, before in ancestor.items():
        changed = [text for text in (left[name], right[name]) if text != before]
        if len(changed) == 2:
            result[name] = left[name] if left_is_better else right[name]
        else:
            result[name] = changed[0] if changed else before
    return result
