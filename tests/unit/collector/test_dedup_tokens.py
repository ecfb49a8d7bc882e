"""The tokens of a batch's inserts: the same for a retry and after a restart; another only if ClickHouse skipped missing rows."""

from __future__ import annotations

from agl_otel.collector.dedup_tokens import DedupTokens


def begun(batch_id: int) -> DedupTokens:
    made = DedupTokens()
    made.begin(batch_id)
    return made


def test_a_retry_has_the_same_token_also_after_a_restart() -> None:
    tries = begun(7)
    first = tries.token("logs-5-9")
    tries.begin(7)
    assert tries.token("logs-5-9") == first == begun(7).token("logs-5-9")


def test_parts_and_batches_have_different_tokens() -> None:
    assert len({begun(7).token("logs-5-9"), begun(7).token("traces-0-4"), begun(7).token("traces-0-1"), begun(8).token("logs-5-9")}) == 4


def test_skipped_rows_get_an_unused_token() -> None:
    tries = begun(7)
    seen = {tries.token("logs-5-9")}
    for _ in range(3):
        tries.skipped("logs-5-9")
        assert tries.token("logs-5-9") not in seen
        assert tries.token("logs-5-9") == tries.token("logs-5-9"), "a retry of that one is a retry too"
        seen.add(tries.token("logs-5-9"))
    assert tries.token("traces-0-4") == begun(7).token("traces-0-4"), "other parts keep theirs"
    after_a_restart = begun(7)
    after_a_restart.skipped("logs-5-9")
    assert after_a_restart.token("logs-5-9") not in seen


def test_another_batch_resets_the_tries() -> None:
    tries = begun(7)
    tries.skipped("logs-5-9")
    tries.begin(8)
    assert tries.token("logs-5-9") == begun(8).token("logs-5-9")
