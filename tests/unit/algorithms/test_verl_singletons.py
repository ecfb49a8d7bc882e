from __future__ import annotations

import pytest

from agl_otel.algorithms.verl.singletons import OF_GROUPS, WITHOUT_GROUPS, compares_groups, groups_of, needs_more_rollouts, singleton_keys

A, B, C = (f"{name * 8}-0000-4000-8000-000000000000" for name in "abc")


def test_singletons_are_found_by_session_and_not_by_sample() -> None:
    keys = [f"{A}_0_0", f"{B}_2_0", f"{C}_0_0", f"{B}_2_1", f"{A}_3_0", f"{C}_10_0"]
    assert singleton_keys(keys) == [f"{B}_2_0", f"{B}_2_1"]
    assert (groups_of(keys), groups_of(singleton_keys(keys)), singleton_keys([])) == (3, 1, [])


@pytest.mark.parametrize(
    ("estimator", "rollouts", "compared"),
    [
        ("grpo", 4, True),
        ("rloo", 2, True),
        ("a users own", 4, True),
        ("gae", 4, False),
        ("reinforce_plus_plus", 4, False),
        ("grpo", 1, False),
    ],
)
def test_group_estimators_compare_groups_of_several_rollouts(estimator: str, rollouts: int, compared: bool) -> None:
    assert compares_groups(estimator, rollouts) is compared


def test_the_error_for_a_single_rollout_names_estimator_and_remedy() -> None:
    for estimator in OF_GROUPS:
        message = needs_more_rollouts(estimator, 1)
        assert message is not None and "actor_rollout_ref.rollout.n is 1" in message and repr(estimator) in message
        assert needs_more_rollouts(estimator, 2) is None
    assert {needs_more_rollouts(estimator, 1) for estimator in (*WITHOUT_GROUPS, "a users own")} == {None}
