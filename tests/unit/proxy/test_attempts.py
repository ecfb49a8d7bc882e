from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agl_otel.proxy.attempts import CLOSED_SECONDS, IDLE_SECONDS, Attempts

KEY = ("ro", "at")
IDS = st.lists(st.integers(0, 2), max_size=6)


@given(st.lists(st.tuples(IDS, st.lists(IDS, min_size=1, max_size=3)), max_size=8))
def test_prompts_are_rebuilt_from_the_longest_prefix(calls: list[tuple[list[int], list[list[int]]]]) -> None:
    attempts = Attempts(lambda _: None)
    said: dict[tuple[int, int], list[int]] = {}
    for prompt, replies in calls:
        attempt, number = attempts.begin(KEY)
        prefix = attempts.continued(attempt, number, prompt, dict(enumerate(replies)))
        fits = [len(whole) for whole in said.values() if prompt and prompt[: len(whole)] == whole]
        assert (prefix.length if prefix else None) == (max(fits) if fits else None)
        if prefix is not None:
            assert said[prefix.call, prefix.choice] == prompt[: prefix.length]
        if prompt:
            said |= {(number, choice): prompt + reply for choice, reply in enumerate(replies)}


def test_calls_are_numbered_per_attempt_even_without_tokens() -> None:
    attempts = Attempts(lambda _: None)
    first, number = attempts.begin(KEY)
    assert attempts.continued(first, number, None, {}) is None
    first.active -= 1
    assert [attempts.begin(KEY)[1], attempts.begin(("ro", "other"))[1], attempts.begin(KEY)[1]] == [2, 1, 3]
    assert attempts.active(KEY) == 2


def test_an_attempt_without_calls_in_flight_is_evicted_when_the_table_is_full() -> None:
    forgotten: list[tuple[str, str]] = []
    attempts = Attempts(forgotten.append, max_attempts=2)
    attempts.begin(("ro", "busy"))
    idle, number = attempts.begin(("ro", "idle"))
    attempts.continued(idle, number, [1], {0: [2]})
    idle.active -= 1
    attempts.begin(("ro", "new"))
    assert forgotten == [("ro", "idle")] and len(attempts) == 2
    assert attempts.begin(("ro", "idle"))[1] == 1


def test_only_the_attempt_with_the_longest_history_loses_it() -> None:
    forgotten: list[tuple[str, str]] = []
    attempts = Attempts(forgotten.append, max_held=16)
    other, number = attempts.begin(("ro", "other"))
    attempts.continued(other, number, [1], {0: [2]})
    attempts.remember(other, number, [b"said"])
    other.active -= 1
    for turn in range(100):
        attempt, number = attempts.begin(KEY)
        attempts.continued(attempt, number, [turn], {0: [turn]})
        attempts.remember(attempt, number, [bytes([turn, each]) for each in range(5)])
        assert attempt.held + other.held <= 16
        attempt.active -= 1
    assert forgotten == [] and attempts.begin(KEY)[1] == 101
    again, number = attempts.begin(("ro", "other"))
    assert number == 2 and attempts.continued(again, number, [1, 2], {0: [3]}) is not None


def test_closed_attempts_are_evicted() -> None:
    forgotten: list[tuple[str, str]] = []
    now = [0.0]
    attempts = Attempts(forgotten.append, clock=lambda: now[0])
    for number, state in enumerate(("over", "busy", "idle")):
        attempt, _ = attempts.begin(("ro", state))
        attempts.remember(attempt, 1, [str(number).encode()])
        attempt.active -= state != "busy"
    attempts.close(("ro", "over"))
    attempts.close(("ro", "never-called"))
    now[0] = CLOSED_SECONDS - 1
    attempts.expire()
    assert forgotten == [] and attempts.is_closed(("ro", "over"))
    now[0] = CLOSED_SECONDS
    attempts.expire()
    assert forgotten == [("ro", "over"), ("ro", "never-called")] and not attempts.is_closed(("ro", "over")) and len(attempts) == 2


def test_an_attempt_resumed_after_a_day_keeps_its_counts_and_loses_its_history() -> None:
    forgotten: list[tuple[str, str]] = []
    idle: list[tuple[str, str]] = []
    now = [0.0]
    attempts = Attempts(forgotten.append, idle=idle.append, clock=lambda: now[0])
    attempt, number = attempts.begin(KEY)
    attempt.record_request(number, b"x", retry=False)
    attempts.continued(attempt, number, [1], {0: [2]})
    attempt.tokens, attempt.active = 7, 0
    attempts.begin(("ro", "busy"))
    now[0] = IDLE_SECONDS - 1
    attempts.expire()
    assert idle == []
    now[0] = IDLE_SECONDS
    attempts.expire()
    attempts.expire()
    assert (idle, forgotten, attempt.held) == ([KEY], [], 0), "reported once"
    again, number = attempts.begin(KEY)
    assert (number, again.calls, again.tokens) == (2, 2, 7)
    assert attempts.continued(again, number, [1, 2], {0: [3]}) is None
    assert again.record_request(number, b"x", retry=True) == (None, 2), "and draws by another seed than its first call"
    again.active = 0
    now[0] += IDLE_SECONDS
    attempts.expire()
    assert idle == [KEY, KEY]


def test_a_retry_is_linked_to_the_try_that_failed() -> None:
    attempt, first = Attempts(lambda _: None).begin(KEY)
    assert attempt.record_request(first, b"x", retry=False) == (None, 1)
    attempt.record_end(first, succeeded=False)
    assert attempt.record_request(2, b"x", retry=False) == (None, 2)
    attempt.record_end(2, succeeded=True)
    assert attempt.record_request(3, b"y", retry=True) == (None, 3)
    assert attempt.record_request(4, b"x", retry=True) == (1, 1)
    attempt.record_end(4, succeeded=False)
    assert attempt.record_request(5, b"x", retry=True) == (4, 1), "the agent's first logical call, a third time"
    assert attempt.record_request(6, b"z", retry=False) == (None, 4), "what comes later is numbered as if nothing had failed"


def test_a_retry_of_several_successful_equal_calls_is_not_linked() -> None:
    attempt, _ = Attempts(lambda _: None).begin(KEY)
    for number in (1, 2):
        attempt.record_request(number, b"x", retry=False)
        attempt.record_end(number, succeeded=True)
    assert attempt.record_request(3, b"x", retry=True) == (None, 3)
    attempt.record_request(4, b"only", retry=False)
    assert attempt.record_request(5, b"only", retry=True) == (4, 4)


def test_each_of_thousands_of_calls_refers_to_the_previous_one() -> None:
    attempts = Attempts(lambda _: None)
    prompt: list[int] = []
    for turn in range(1, 3_001):
        prompt += [turn, 0, turn]
        attempt, number = attempts.begin(KEY)
        prefix = attempts.continued(attempt, number, prompt, {0: [7]})
        assert (prefix.call if prefix else 0) == turn - 1
        prompt.append(7)
