"""What a training step lost, in words: refused calls and attempts by reason, rollouts and whole groups without a sample.

Replies cut at max_tokens are no loss, since they are trained on: they are described by themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from agl_otel.adapters.selection import SELECTION_REFUSALS

NOT_SELECTED: Final = frozenset({*SELECTION_REFUSALS, "flat_rewards"})
"""Reasons in `refused` of samples that were fit for training, but not selected: nothing was lost."""
LOSSES: Final = ("rollouts_without_sample", "groups_gone")
"""Fields of reports, and metrics of recorded steps, that count losses."""
CUT: Final = "replies_cut"
"""The field of reports, and metric of recorded steps, that counts replies that ended at their token limit."""
_REFUSED: Final = "refused."


def lost(counts: Mapping[str, Any], refused: Mapping[str, float]) -> str:
    """Describe the losses of a step from `counts`, its LOSSES and `rollouts`, and `refused` by reason; "" where nothing was lost."""
    without, gone = (counts.get(name) or 0 for name in LOSSES)
    ranked = sorted(((name, count) for name, count in refused.items() if name not in NOT_SELECTED), key=lambda pair: (-pair[1], pair[0]))
    found = [
        f"{without:g} of {counts.get('rollouts', 0):g} rollouts gave no sample" if without else "",
        "refused " + ", ".join(f"{name} {count:g}" for name, count in ranked) if ranked else "",
        f"{gone:g} whole group{'s' if gone > 1 else ''} gone" if gone else "",
    ]
    return "; ".join(filter(None, found))


def cut_replies(count: float) -> str:
    """Describe the replies cut at their token limit; "" where there are none."""
    return f"{count:g} repl{'ies' if count > 1 else 'y'} at max_tokens" if count else ""


def refused_in(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return {reason: count} of a recorded step's metrics."""
    return {name.removeprefix(_REFUSED): float(count) for name, count in metrics.items() if name.startswith(_REFUSED)}


def recorded_losses(metrics: Mapping[str, Any]) -> str:
    """Describe the losses of a recorded step."""
    return lost(metrics, refused_in(metrics))
