from __future__ import annotations

from agl_otel.proxy.keys import attempt_key, is_ours, is_trusted, may_call, shared_key


def test_a_key_opens_its_own_attempt_only() -> None:
    key = attempt_key("secret", "ro-1", "at-1")
    assert may_call("secret", key, "ro-1", "at-1") and is_ours(key) and "secret" not in key
    assert not any(may_call("secret", key, *other) for other in (("ro-1", "at-2"), ("ro-2", "at-1")))
    assert not may_call("other", key, "ro-1", "at-1") and not is_trusted("secret", key)


def test_the_shared_key_and_the_token_open_all() -> None:
    assert all(may_call("secret", key, "ro-1", "at-1") and is_trusted("secret", key) for key in (shared_key("secret"), "secret"))
    assert not may_call("secret", "", "ro-1", "at-1") and not is_trusted("secret", "ümlaut")


def test_without_a_token_no_key_is_asked_for() -> None:
    assert may_call("", "anything", "ro-1", "at-1") and is_trusted("", "")
