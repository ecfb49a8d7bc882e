"""The tokens of a batch's inserts: the same for a retry and after a restart; another only if ClickHouse skipped missing rows."""

from __future__ import annotations

import pytest

from agl_otel.collector.dedup_tokens import ANSWERED_REFUSALS, DedupTokens


def begun(batch_id: int) -> DedupTokens:
    made = DedupTokens()
    made.begin(batch_id)
    return made


def test_a_retry_has_the_same_token_also_after_a_restart() -> None:
    tries = begun(7)
    first = tries.token("fast")
    tries.begin(7)
    assert tries.token("fast") == first == begun(7).token("fast")


def test_parts_and_batches_have_different_tokens() -> None:
    assert len({begun(7).token("fast"), begun(7).token("traces-0-4"), begun(7).token("traces-0-1"), begun(8).token("fast")}) == 4


def test_skipped_rows_get_an_unused_token() -> None:
    tries = begun(7)
    seen = {tries.token("fast")}
    for _ in range(3):
        tries.skipped("fast")
        assert tries.token("fast") not in seen
        assert tries.token("fast") == tries.token("fast"), "a retry of that one is a retry too"
        seen.add(tries.token("fast"))
    assert tries.token("traces-0-4") == begun(7).token("traces-0-4"), "other parts keep theirs"
    after_a_restart = begun(7)
    after_a_restart.skipped("fast")
    assert after_a_restart.token("fast") not in seen


def test_another_batch_resets_the_tries() -> None:
    tries = begun(7)
    tries.skipped("fast")
    assert tries.refused(is_data_error=True, in_doubt=True)
    tries.begin(8)
    assert not tries.built_here
    assert tries.token("fast") == begun(8).token("fast")


@pytest.mark.parametrize(("is_data_error", "in_doubt"), [(True, True), (True, False), (False, False)])
def test_a_refusal_without_an_insert_in_progress_changes_the_path_for_good(is_data_error: bool, in_doubt: bool) -> None:
    tries = begun(7)
    assert tries.refused(is_data_error=is_data_error, in_doubt=in_doubt)
    tries.begin(7)
    assert tries.built_here


def test_in_doubt_the_path_is_changed_after_several_refusals() -> None:
    tries = begun(7)
    answers = [tries.refused(is_data_error=False, in_doubt=True) for _ in range(ANSWERED_REFUSALS)]
    assert answers == [False] * (ANSWERED_REFUSALS - 1) + [True]
