"""The first query of docs/traces.md on a real stack: what it gives is what readers give. tests/system/test_docs_run.py runs its command."""

from __future__ import annotations

import json
import math
import re
import shlex
from typing import Any

from agl_otel.adapters.trajectories import final_reward
from agl_otel.store import LightningStore
from agl_otel_hook import conventions
from tests.contract.store.test_export import call_of, reward_of
from tests.unit.test_docs import ROOT, commands_in


def query_of_docs() -> str:
    typed = next(each for each in commands_in((ROOT / "docs" / "traces.md").read_text()) if each.startswith("agl-otel traces sql"))
    return shlex.split(typed)[3]


def test_the_sql_page_of_the_dashboard_begins_with_the_query_of_the_docs() -> None:
    page = (ROOT / "agl_otel" / "web" / "dashboard" / "src" / "pages" / "sql.tsx").read_text()
    first = re.search(r'EXAMPLES.*? = \[\n  \["[^"]*", ("(?:[^"\\]|\\.)*")\]', page)
    assert first is not None and json.loads(first[1]).split() == query_of_docs().split()


async def test_the_query_of_rewards_by_day_gives_the_final_rewards(store: LightningStore) -> None:
    """Of an attempt with a later reward, one that a grader judged, one with a late one, two with an unusable last one, one without."""
    key = conventions.reward_value_key(0)
    given: list[list[dict[str, Any]]] = [
        [{key: 0.25}, {key: 0.75}],
        [{key: 1.0, conventions.REWARD_GIVEN: True}, {key: 0.5}],
        [{key: 0.0}, {key: 1.0, conventions.LATE: True}],
        [{key: 0.5}, {key: math.nan}],
        [{key: 0.5}, {key: 1e12}],
        [],
    ]
    ids: list[str] = []
    for rewards in given:
        begun = await store.start_rollout({}, mode="train")
        attempt = (begun.rollout_id, begun.attempt.attempt_id)
        spans = [reward_of(*attempt, number, 0.0) for number, _ in enumerate(rewards, 2)]
        spans = [each.model_copy(update={"attributes": {**each.attributes, **more}}) for each, more in zip(spans, rewards, strict=True)]
        await store.add_many_spans([call_of(*attempt, 1), *spans])
        await store.update_attempt(*attempt, status="succeeded")
        ids.append(begun.rollout_id)
    traces = await store.traces(ids)
    final = [final_reward(traces.rewards.get(key, ())) for key in traces.verdicts]
    assert sorted(value for value in final if value is not None) == [0.0, 0.75, 1.0]
    of_these = query_of_docs().replace("RolloutId != ''", f"RolloutId IN ({', '.join(map(repr, ids))})")
    (day,) = await store.reader.query(of_these, own=False)
    assert day["day"].startswith("2025-06-15"), "that of span_of's spans"
    assert (int(day["attempts"]), int(day["rewarded"]), float(day["mean"])) == (6, 3, 1.75 / 3)
