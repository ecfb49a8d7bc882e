"""Values sent over the wire come back equal."""

from __future__ import annotations

import pytest

from agl_otel.errors import UsageError
from agl_otel.queue.convert import attempt_fields, reachable, rollout_fields, rollout_from_pb, to_json
from agl_otel.queue.proto import queue_pb2 as pb
from agl_otel.queue.rows import AttemptRow, RolloutRow
from agl_otel.types import Attempt, AttemptedRollout, RolloutConfig


def test_a_row_becomes_the_rollout_that_users_see_with_nothing_lost() -> None:
    row = RolloutRow(
        7,
        "ro-1",
        "running",
        "val",
        3,
        9,
        5.5,
        1.0,
        2.0,
        "rs-1",
        4,
        10.0,
        20.0,
        3,
        '["failed"]',
        2,
        "at-2",
        '{"gpu":"a"}',
        "why",
        '{"k":[1]}',
        "run-1",
        5,
    )
    attempt = AttemptRow("at-2", "ro-1", 2, "running", 1.5, None, "w", 1.75, "secret", '{"m":0}', "oops", None)
    message = pb.Rollout(**rollout_fields(row, '{"x":"ä"}', attempt, with_token=True))
    assert rollout_from_pb(message) == AttemptedRollout(
        rollout_id="ro-1",
        input={"x": "ä"},
        start_time=1.0,
        end_time=2.0,
        mode="val",
        resources_id="rs-1",
        resources_version=4,
        status="running",
        config=RolloutConfig(timeout_seconds=10.0, unresponsive_seconds=20.0, max_attempts=3, retry_condition=["failed"]),
        metadata={"k": [1]},
        priority=3,
        not_before=5.5,
        labels={"gpu": "a"},
        reason="why",
        attempt=Attempt(
            rollout_id="ro-1",
            attempt_id="at-2",
            sequence_id=2,
            start_time=1.5,
            status="running",
            worker_id="w",
            last_heartbeat_time=1.75,
            seals={"m": 0},
            error="oops",
        ),
        token="secret",
    )


def test_empty_seals_differ_from_no_seals() -> None:
    row = AttemptRow("at-1", "ro-1", 1, "failed", 1.0, 2.0, None, None, "t", None, None, None)
    assert not pb.Attempt(**attempt_fields(row)).has_seals
    assert pb.Attempt(**attempt_fields(row._replace(seals="{}"))).has_seals


def test_the_token_goes_to_the_claimer_only() -> None:
    row = AttemptRow("at-1", "ro-1", 1, "failed", 1.0, 2.0, None, None, "secret", None, None, None)
    assert b"secret" not in pb.Attempt(**attempt_fields(row)).SerializeToString()


def test_what_is_not_json_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="a rollout's input must be JSON"):
        to_json({"f": object()}, "a rollout's input")


@pytest.mark.parametrize(
    ("address", "dialled", "expected"),
    [
        ("http://127.0.0.1:4000", "127.0.0.1", "http://127.0.0.1:4000"),
        ("http://127.0.0.1:4000", "node7", "http://node7:4000"),
        ("0.0.0.0:4317", "10.0.0.7", "10.0.0.7:4317"),
        ("0.0.0.0:4317", "127.0.0.1", "127.0.0.1:4317"),
        ("http://collector:4318", "node7", "http://collector:4318"),
        ("[::]:4317", "[::1]", "[::1]:4317"),
    ],
)
def test_a_wildcard_or_loopback_address_becomes_the_one_that_was_dialled(address: str, dialled: str, expected: str) -> None:
    assert reachable(address, dialled) == expected


def test_a_message_with_fields_of_a_later_release_is_read_and_keeps_them() -> None:
    unknown = b"\xfa\x3f\x05later"  # field 1023, of which no release knows
    for message in (pb.ClaimRequest(limit=2), pb.AttemptUpdate(rollout_id="ro-1"), pb.Rollouts(total=1), pb.DescribeResponse(version="9")):
        read = type(message).FromString(message.SerializeToString() + unknown)
        assert read != message and read.SerializeToString() == message.SerializeToString() + unknown
        read.DiscardUnknownFields()
        assert read == message
