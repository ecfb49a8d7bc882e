"""Checks that the stored and trained calls agree with what was sampled, by the sources themselves and not by this package's counters.

`compare_with_record` compares every model call in ClickHouse with the model server's own record of its samples;
`count_trajectories` counts in ClickHouse the calls that can have been trained on.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from agl_otel.store import Store
from agl_otel_hook import conventions

SHOWN_DIFFERENCES: Final = 5

_CALLS: Final = f"""
SELECT SpanAttributes['gen_ai.response.id'] AS id, any(SpanAttributes['{conventions.LLM_CHOICE}']) AS choice,
       any(PromptTokenIds) AS prompt, any(ResponseTokenIds) AS response
FROM otel_traces
WHERE SpanName = '{conventions.SPAN_LLM}' AND RolloutId != ''
GROUP BY id, TraceId, SpanId
"""

_TRAJECTORIES: Final = f"""
SELECT uniqExact(TraceId, SpanId) AS trajectories
FROM otel_traces
WHERE SpanName = '{conventions.SPAN_LLM}' AND notEmpty(ResponseTokenIds) AND RolloutId BETWEEN {{first:String}} AND {{last:String}}
  AND (RolloutId, AttemptId) IN (
    SELECT RolloutId, AttemptId FROM otel_traces
    WHERE RolloutId BETWEEN {{first:String}} AND {{last:String}} AND mapContains(Rewards, '{conventions.reward_value_key(0)}')
    UNION ALL
    SELECT RolloutId, AttemptId FROM otel_logs
    WHERE RolloutId BETWEEN {{first:String}} AND {{last:String}} AND mapContains(Rewards, '{conventions.reward_value_key(0)}'))
"""


@dataclass
class RecordComparison:
    """The differences between stored model calls and the model server's record."""

    equal: int = 0
    different: int = 0
    """Calls stored with other token ids than the server sampled."""
    unknown: int = 0
    """Stored calls without a record of the server."""
    not_stored: int = 0
    """Sampled calls that are not stored."""
    examples: list[str] = field(default_factory=list[str])
    """Messages about a few of the differences."""

    @property
    def exact(self) -> bool:
        """Whether all calls agree token for token and none is missing."""
        return self.equal > 0 and not (self.different or self.unknown or self.not_stored)


async def compare_with_record(store: Store, record: Path) -> RecordComparison:
    """Compare every stored model call with the model server's JSONL record, by response id and choice.

    For agents whose calls store full prompts (no prefix form), that is, one call per attempt.
    """
    sampled = await asyncio.to_thread(_read_record, record)
    await store.reader.barrier()
    result = RecordComparison()
    for row in await store.reader.query(_CALLS):
        entry = sampled.pop((row["id"], row["choice"]), None)
        if entry is None:
            result.unknown += 1
            result.examples.append(f"call {row['id']} is stored, and the model server has no record of it")
        elif (row["prompt"], row["response"]) == (entry["prompt_token_ids"], entry["response_token_ids"]):
            result.equal += 1
        else:
            result.different += 1
            result.examples.append(f"call {row['id']}: sampled {entry['response_token_ids']}, stored {row['response']}")
    result.not_stored = len(sampled)
    result.examples = result.examples[:SHOWN_DIFFERENCES]
    return result


def _read_record(record: Path) -> dict[tuple[str, str], dict[str, Any]]:
    entries = (json.loads(line) for line in record.read_text().splitlines())
    return {(entry["id"], str(entry["choice"])): entry for entry in entries}


async def count_trajectories(store: Store, rollout_ids: Sequence[str]) -> int:
    """Count the stored model calls of these rollouts in attempts that have a primary reward.

    `rollout_ids` must be all rollouts between the first and the last: they are selected as a range, since ids grow with time.
    """
    rows = await store.reader.query(_TRAJECTORIES, params={"first": min(rollout_ids), "last": max(rollout_ids)})
    return int(rows[0]["trajectories"])
