from __future__ import annotations

import pytest

from agl_otel.algorithms.verl.singletons import OF_GROUPS, WITHOUT_GROUPS, compares_groups, groups_of, needs_more_rollouts, singleton_keys

A, B, C = (f"{name * 8}-0000-4000-8000-000000000000" for name in "abc")


def test_rows_of_a_task_with_one_session_left_are_found_however_many_samples_it_has() -> None:
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
def test_only_estimators_that_compare_a_group_need_one(estimator: str, rollouts: int, compared: bool) -> None:
    assert compares_groups(estimator, rollouts) is compared


def test_a_single_rollout_of_a_task_is_too_few_for_estimators_of_groups_and_the_reason_names_both() -> None:
    for estimator in OF_GROUPS:
        told = needs_more_rollouts(estimator, 1)
        assert told is not None and "actor_rollout_ref.rollout.n is 1" in told and repr(estimator) in told
        assert needs_more_rollouts(estimator, 2) is None
    assert {needs_more_rollouts(estimator, 1) for estimator in (*WITHOUT_GROUPS, "a users own")} == {None}
