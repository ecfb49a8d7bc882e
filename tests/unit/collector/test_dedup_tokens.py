"""The tokens of a batch's inserts: the same for a retry and after a restart; another only if ClickHouse skipped missing rows."""

from __future__ import annotations

from agl_otel.collector.dedup_tokens import DedupTokens


def test_a_retry_has_the_same_token_also_after_a_restart() -> None:
    tries = DedupTokens()
    assert tries.token(7, "logs-5-9") == tries.token(7, "logs-5-9") == DedupTokens().token(7, "logs-5-9")


def test_parts_and_batches_have_different_tokens() -> None:
    tries = DedupTokens()
    parts = [(7, "logs-5-9"), (7, "traces-0-4"), (7, "traces-0-1"), (8, "logs-5-9")]
    assert len({tries.token(*part) for part in parts}) == 4


def test_skipped_rows_get_an_unused_token() -> None:
    tries = DedupTokens()
    seen = {tries.token(7, "logs-5-9")}
    for _ in range(3):
        tries.skipped(7, "logs-5-9")
        assert tries.token(7, "logs-5-9") not in seen
        assert tries.token(7, "logs-5-9") == tries.token(7, "logs-5-9"), "a retry of that one is a retry too"
        seen.add(tries.token(7, "logs-5-9"))
    for other in ((7, "traces-0-4"), (8, "logs-5-9")):
        assert tries.token(*other) == DedupTokens().token(*other), "others keep theirs"
    after_a_restart = DedupTokens()
    after_a_restart.skipped(7, "logs-5-9")
    assert after_a_restart.token(7, "logs-5-9") not in seen


def test_a_stored_batch_is_forgotten() -> None:
    tries = DedupTokens()
    for batch in (7, 8):
        tries.skipped(batch, "logs-5-9")
    tries.forget(7)
    assert tries.token(7, "logs-5-9") == DedupTokens().token(7, "logs-5-9")
    assert tries.token(8, "logs-5-9") != DedupTokens().token(8, "logs-5-9")
