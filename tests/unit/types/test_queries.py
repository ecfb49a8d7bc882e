"""A query of rollouts can be one object or keyword arguments."""

from __future__ import annotations

from dataclasses import fields

import pytest

from agl_otel.errors import UsageError
from agl_otel.queue.convert import rollout_query_to_pb
from agl_otel.types import RolloutQuery
from agl_otel.types.queries import RolloutConditions


def test_every_field_of_a_query_of_rollouts_is_a_keyword_too() -> None:
    assert [field.name for field in fields(RolloutQuery)] == [*RolloutConditions.__annotations__]


def test_a_text_in_outputs_is_refused_where_only_a_queue_is_asked() -> None:
    with pytest.raises(UsageError, match="output_contains"):
        rollout_query_to_pb(RolloutQuery(output_contains="yes"))
