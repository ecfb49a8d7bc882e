"""What becomes of spans and log records that nothing identifies at receipt (contracts.md §2, rule 3). Pure.

`keep` and `adopt` store them with empty ids, where the late pass finds them (adoption is its business too, because only time tells that
a whole trace belongs to nobody). `drop` stores nothing of them: it cannot be undone, and a child that comes in an earlier request than
its parent goes with them. The client is told that all is well, since nothing is wrong with what it sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from agl_otel.collector.identify import Identity

Policy = Literal["keep", "drop", "adopt"]
DROPPED: Final = "dropped: no rollout is known for it (AGL_UNIDENTIFIED is drop)"
"""The reason of what this policy drops. It is counted, and is no rejection."""


def apply_policy(identities: Sequence[Identity], policy: Policy) -> list[Identity]:
    """The identities as they are to be stored: with `drop`, those without a rollout get the reason DROPPED."""
    if policy != "drop":
        return list(identities)
    return [i if i.rollout_id or i.reason else i._replace(reason=DROPPED) for i in identities]
