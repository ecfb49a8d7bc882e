"""What recovery has to do for the log that an earlier process left."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agl_otel.collector.identities import Identities, Identity
from agl_otel.collector.journal import (
    ALREADY,
    BATCH,
    REQUEST,
    SETTLED,
    STORED,
    Batch,
    Request,
    assign,
    describe,
    number_requests,
    pack_batch,
    pack_request,
    pack_settled,
    pack_stored,
    recovery_state,
    unpack_batch,
    unpack_request,
)
from agl_otel.collector.wal import Record
from agl_otel.service.framed import Lost

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
    return Request("traces", 1, Identities.of(list(identities)), b"raw")


def log(*records: tuple[int, bytes], first: int = 0) -> list[Record]:
    return [Record(position, kind, payload) for position, (kind, payload) in enumerate(records, start=first)]


ONE = (REQUEST, pack_request(request(Identity("ro-1", "at-1"))))


def note(batch: Batch) -> tuple[int, bytes]:
    return BATCH, pack_batch(batch)


@given(IDENTITIES, st.binary(), st.sampled_from(["traces", "logs"]), st.integers(0, 2**50))
def test_a_request_unpacks_to_what_was_packed(identities: list[Identity], raw: bytes, signal: str, received: int) -> None:
    before = Request("logs" if signal == "logs" else "traces", received, Identities.of(identities), raw, 5, len(raw))
    assert unpack_request(pack_request(before)) == before


@given(st.integers(0, 2**63), st.integers(0, 9), st.integers(0, 9), st.dictionaries(st.text(), st.integers(1, 2**53)))
def test_a_batch_unpacks_to_what_was_packed(batch_id: int, first: int, last: int, numbers: dict[str, int]) -> None:
    assert unpack_batch(pack_batch(Batch(batch_id, first, last, numbers))) == Batch(batch_id, first, last, numbers)


def test_requests_without_a_batch_are_unwritten() -> None:
    left = recovery_state(log(ONE, ONE))
    assert [position for position, _ in left.unwritten] == [0, 1]
    assert left.in_doubt == []


def test_a_batch_without_a_stored_note_is_in_doubt() -> None:
    batch = Batch(7, 0, 1, {"ro-1": 3})
    left = recovery_state(log(ONE, ONE, note(batch), ONE))
    ((found, members),) = left.in_doubt
    assert found == batch
    assert [position for position, _ in members] == [0, 1]
    assert [position for position, _ in left.unwritten] == [3]
    assert left.batch_id == 7


def test_a_stored_batch_needs_no_recovery() -> None:
    batch = Batch(7, 0, 0)
    left = recovery_state(log(ONE, note(batch), (STORED, pack_stored(batch))))
    assert (left.in_doubt, left.unwritten) == ([], [])


def test_a_batch_whose_first_requests_are_deleted_was_stored() -> None:
    left = recovery_state(log(ONE, note(Batch(7, 3, 5)), first=5))
    assert (left.in_doubt, left.unwritten) == ([], [])


def test_batches_may_be_stored_in_any_order() -> None:
    one, two = Batch(7, 0, 0), Batch(8, 1, 1)
    left = recovery_state(log(ONE, ONE, note(one), note(two), (STORED, pack_stored(two))))
    assert [batch for batch, _ in left.in_doubt] == [one]


@given(st.lists(IDENTITIES, max_size=4))
def test_every_accepted_span_gets_its_explicit_or_a_new_number(requests: list[list[Identity]]) -> None:
    made = [request(*identities) for identities in requests]
    needed = number_requests(made)
    taken = [i for identities in requests for i in identities if not i.reason]
    assert {r: (n, h) for r, n, h in needed} == {
        r: (sum(i.rollout_id == r and i.sequence is None for i in taken), max(i.sequence or 0 for i in taken if i.rollout_id == r))
        for r in {i.rollout_id for i in taken if i.rollout_id}
    }
    following = {rollout_id: 100 for rollout_id, _, _ in needed}
    numbers = [number for each in made for number in assign(each.identities, following)]
    assert len(numbers) == len(taken)
    fresh = [(i.rollout_id, n) for i, n in zip(taken, numbers, strict=True) if i.rollout_id and i.sequence is None]
    assert len(set(fresh)) == len(fresh)
    assert all(n == (i.sequence or 0) for i, n in zip(taken, numbers, strict=True) if not i.rollout_id or i.sequence is not None)
    assert following == {rollout_id: 100 + count for rollout_id, count, _ in needed}


@given(st.data())
def test_after_any_lost_record_possibly_stored_rows_are_looked_up_before_an_insert(data: st.DataObject) -> None:
    """A log like the writer's: batches take requests in order, and each is noted, inserted, and noted as stored or not yet."""
    records: list[tuple[int, bytes]] = []
    batches: list[tuple[int, Batch]] = []  # with the position of its note
    requests: list[int] = []
    stored_notes: dict[int, int] = {}  # batch id: position of the note
    for _ in range(data.draw(st.integers(1, 5), "batches")):
        for _ in range(data.draw(st.integers(1, 3), "requests")):
            requests.append(len(records))
            records.append(ONE)
        untaken = [position for position in requests if not batches or position > batches[-1][1].last]
        count = data.draw(st.integers(0, len(untaken)), "taken")
        if count:
            batches.append((len(records), Batch(len(batches) + 1, untaken[0], untaken[count - 1], {"ro-1": 1})))
            records.append(note(batches[-1][1]))
            if data.draw(st.booleans(), "noted as stored"):
                stored_notes[len(batches)] = len(records)
                records.append((STORED, pack_stored(batches[-1][1])))
    missing = data.draw(st.integers(0, len(records) - 1), "lost")
    kind = records[missing][0] if data.draw(st.booleans(), "its header is whole") else None
    entries: list[Record | Lost] = [*log(*records)]
    entries[missing] = Lost(missing, missing, kind, True, 0, 1, "", "x")
    left = recovery_state(entries)

    whole = {position for batch, members in left.in_doubt if batch is not None for position, _ in members}
    asked = {position for batch, members in left.in_doubt if batch is None for position, _ in members}
    unasked = {position for position, _ in left.unwritten}
    assert not whole & asked and not (whole | asked) & unasked
    for noted_at, batch in batches:
        members = {position for position in requests if batch.first <= position <= batch.last} - {missing}
        if missing == noted_at:
            assert members <= asked
        elif batch.batch_id in stored_notes and stored_notes[batch.batch_id] != missing:
            assert not members & (whole | asked | unasked)
        elif batch.first <= missing <= batch.last and kind in (None, REQUEST):
            assert members <= asked
        else:
            assert members <= whole | asked
    taken = {position for _, batch in batches for position in requests if batch.first <= position <= batch.last}
    assert set(requests) - taken - {missing} <= asked | unasked
    order = [position for _, members in left.in_doubt for position, _ in members] + sorted(unasked)
    assert order == sorted(order), "what waits for a position waits for all before it"


def test_rows_found_stored_are_not_inserted_again() -> None:
    lost = Lost(2, 2, None, True, 0, 1, "", "x")
    two = (REQUEST, pack_request(request(Identity("ro-1", "at-1"), Identity("ro-1", "at-1"))))
    records: list[Record | Lost] = [*log(ONE, two), lost]
    assert [(batch, len(members)) for batch, members in recovery_state(records).in_doubt] == [(None, 2)]
    records.append(Record(3, SETTLED, pack_settled({0: [0], 1: [1]})))
    left = recovery_state(records)
    ((position, rest),) = left.unwritten
    assert (position, [identity.reason for identity in rest.identities], left.in_doubt) == (1, ["", ALREADY], [])
    batch = Batch(7, 1, 1)
    records.append(Record(4, BATCH, pack_batch(batch)))
    ((found, ((_, rest),)),) = recovery_state(records).in_doubt
    assert (found, rest.rows) == (batch, 1)
    records.append(Lost(5, 5, None, True, 0, 1, "", "x"))  # it may be another note of rows found stored
    records.append(Record(6, BATCH, pack_batch(Batch(8, 1, 1))))
    assert [batch for batch, _ in recovery_state(records).in_doubt] == [None]


def test_a_lost_request_is_described_by_its_readable_bytes() -> None:
    payload = pack_request(request(Identity("ro-1"), Identity("ro-2"), Identity("ro-2", reason="why")))
    assert describe(REQUEST, payload) == describe(None, payload[:-2]) == "2 spans of 'ro-1', 'ro-2'"
    assert describe(REQUEST, b"\xff" + payload) == "a request"
    assert describe(None, b"?") == ""
    assert describe(BATCH, b"?") == "the note of a batch"
