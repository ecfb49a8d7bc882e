"""Credit by calls in verl: the samples carry their advantages, and verl's update takes them as they are (estimator.py).

verl's estimators compare the rewards of whole rollouts. So a run with credit by calls has an estimator of its own, and keys of verl's
config that would weigh rewards otherwise are refused, because they would have no effect. Pure; does not import verl.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from agl_otel.algorithms.grpo.options import Advantages
from agl_otel.algorithms.options import shown
from agl_otel.algorithms.verl.keys import Tree, get
from agl_otel.errors import UsageError

ESTIMATOR: Final = "agl_credit"
"""The name in `algorithm.adv_estimator` of the estimator that takes the advantages of samples."""
_ADV_ESTIMATOR: Final = "algorithm.adv_estimator"
_LOSS: Final = "actor_rollout_ref.actor.policy_loss.loss_mode"
_ONLY: Final[Mapping[str, tuple[Any, str]]] = {
    _ADV_ESTIMATOR: (ESTIMATOR, "another estimator compares the rewards of whole rollouts"),
    "algorithm.use_kl_in_reward": (
        False,
        "rewards come from the traces; actor_rollout_ref.actor.use_kl_loss has such a penalty, too",
    ),
    "algorithm.gamma": (1.0, "rewards are discounted by call; discount of [algorithm] does that"),
    "algorithm.lam": (1.0, "there is no critic"),
}
"""{key of verl's config: (its only value beside credit by calls, the reason)}."""


def credit_config(advantages: Advantages, config: Mapping[str, Any], *, by_call: bool) -> Tree:
    """Return the keys of verl's config that credit by calls sets; none without it.

    `config`: the user's, translated. Raises UsageError that names a key which has no effect, or another one, beside it.
    """
    if not advantages.of_calls:
        if get(config, _ADV_ESTIMATOR) == ESTIMATOR:
            raise UsageError(
                f'{_ADV_ESTIMATOR} = "{ESTIMATOR}" is of credit by calls: give credit = "to_go" of [algorithm], or leave it out'
            )
        return {}
    given = f'credit = "{advantages.credit}"' if advantages.credit != "final" else "agent_baselines = true"
    for path, (only, why) in _ONLY.items():
        if (value := get(config, path, only)) != only:
            raise UsageError(f"{path} = {shown(value)} excludes {given}, because {why}: leave one of them out")
    if get(config, _LOSS) == "gspo" and not by_call:
        raise UsageError(
            f'{_LOSS} = "gspo" excludes {given}, because it gives all calls of a sample one ratio: leave one of them out, or give '
            "by_call = true"
        )
    return {_ADV_ESTIMATOR: ESTIMATOR}
