"""What a log that was left behind asks for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agl_otel.collector.identify import Identity
from agl_otel.collector.journal import (
    BATCH,
    REQUEST,
    STORED,
    Batch,
    Request,
    assign,
    leftover,
    number_requests,
    pack_batch,
    pack_request,
    pack_stored,
    unpack_batch,
    unpack_request,
)
from agl_otel.collector.wal import Record

IDENTITIES = st.lists(
    st.builds(
        Identity,
        st.sampled_from(["", "ro-1", "ro-2"]),
        st.sampled_from(["", "at-1"]),
        st.none() | st.integers(0, 2**53 - 1),
        st.sampled_from(["", "", "why"]),
    ),
    max_size=12,
)


def request(*identities: Identity) -> Request:
    return Request("traces", 1, list(identities), b"raw")


def log(*records: tuple[int, bytes], first: int = 0) -> list[Record]:
    return [Record(position, kind, payload) for position, (kind, payload) in enumerate(records, start=first)]


ONE = (REQUEST, pack_request(request(Identity("ro-1", "at-1"))))


def note(batch: Batch) -> tuple[int, bytes]:
    return BATCH, pack_batch(batch)


@given(IDENTITIES, st.binary(), st.sampled_from(["traces", "logs"]), st.integers(0, 2**50))
def test_a_request_comes_back_as_it_was(identities: list[Identity], raw: bytes, signal: str, received: int) -> None:
    before = Request("logs" if signal == "logs" else "traces", received, identities, raw, "key")
    assert unpack_request(pack_request(before)) == before


@given(st.integers(0, 2**63), st.integers(0, 9), st.integers(0, 9), st.dictionaries(st.text(), st.integers(1, 2**53)))
def test_a_batch_comes_back_as_it_was(batch_id: int, first: int, last: int, numbers: dict[str, int]) -> None:
    assert unpack_batch(pack_batch(Batch(batch_id, first, last, numbers))) == Batch(batch_id, first, last, numbers)


def test_requests_without_a_batch_are_unwritten() -> None:
    left = leftover(log(ONE, ONE))
    assert [position for position, _ in left.unwritten] == [0, 1]
    assert left.in_doubt == []


def test_a_batch_without_a_stored_note_is_in_doubt() -> None:
    batch = Batch(7, 0, 1, {"ro-1": 3})
    left = leftover(log(ONE, ONE, note(batch), ONE))
    ((found, members),) = left.in_doubt
    assert found == batch
    assert [position for position, _ in members] == [0, 1]
    assert [position for position, _ in left.unwritten] == [3]
    assert left.batch_id == 7


def test_a_stored_batch_asks_for_nothing() -> None:
    batch = Batch(7, 0, 0)
    left = leftover(log(ONE, note(batch), (STORED, pack_stored(batch))))
    assert (left.in_doubt, left.unwritten) == ([], [])


def test_a_batch_whose_first_requests_are_gone_was_stored() -> None:
    left = leftover(log(ONE, note(Batch(7, 3, 5)), first=5))
    assert (left.in_doubt, left.unwritten) == ([], [])


def test_batches_may_be_stored_in_any_order() -> None:
    one, two = Batch(7, 0, 0), Batch(8, 1, 1)
    left = leftover(log(ONE, ONE, note(one), note(two), (STORED, pack_stored(two))))
    assert [batch for batch, _ in left.in_doubt] == [one]


@given(st.lists(IDENTITIES, max_size=4))
def test_every_taken_span_gets_its_explicit_or_a_fresh_number(requests: list[list[Identity]]) -> None:
    made = [request(*identities) for identities in requests]
    wanted = number_requests(made)
    taken = [i for identities in requests for i in identities if not i.reason]
    assert {r: (n, h) for r, n, h in wanted} == {
        r: (sum(i.rollout_id == r and i.sequence is None for i in taken), max(i.sequence or 0 for i in taken if i.rollout_id == r))
        for r in {i.rollout_id for i in taken if i.rollout_id}
    }
    following = {rollout_id: 100 for rollout_id, _, _ in wanted}
    numbers = [number for each in made for number in assign(each.identities, following)]
    assert len(numbers) == len(taken)
    fresh = [(i.rollout_id, n) for i, n in zip(taken, numbers, strict=True) if i.rollout_id and i.sequence is None]
    assert len(set(fresh)) == len(fresh)
    assert all(n == (i.sequence or 0) for i, n in zip(taken, numbers, strict=True) if not i.rollout_id or i.sequence is not None)
    assert following == {rollout_id: 100 + count for rollout_id, count, _ in wanted}
