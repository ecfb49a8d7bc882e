"""Policy for spans and log records that cannot be identified at receipt. Pure.

`keep` and `adopt` store them with empty ids, where the late pass finds them (adoption runs there too, because only time shows that a whole
trace has no owner). `drop` discards them: this cannot be undone, and it also discards a child that arrives in an earlier request than its
parent. The client gets a success, since nothing is wrong with what it sent.
"""

from __future__ import annotations

from typing import Final, Literal

from agl_otel.collector.identities import Identities

Policy = Literal["keep", "drop", "adopt"]
DROPPED: Final = "dropped: no rollout is known for it (AGL_UNIDENTIFIED is drop)"
"""The reason of what this policy drops. It is counted, but not as a rejection."""


def apply_policy(identities: Identities, policy: Policy) -> Identities:
    """Return the identities to store: with `drop`, those without a rollout get the reason DROPPED."""
    if policy != "drop":
        return identities
    return identities.map(lambda each: each if each.rollout_id or each.reason else each._replace(reason=DROPPED))
