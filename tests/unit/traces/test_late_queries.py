"""SQL that must be equal in two places."""

from __future__ import annotations

import inspect
import re

from agl_otel.traces import observed
from agl_otel.traces.names import NAMES
from agl_otel.traces.schema import statements
from agl_otel.traces.sql import named_query
from agl_otel_hook import conventions


def selected(sql: str) -> str:
    return " ".join(sql[sql.index("SELECT") : sql.index("FROM")].split())


def test_spans_by_trace_have_the_columns_of_spans_by_rollout() -> None:
    assert selected(named_query("by_trace")) == selected(named_query("spans"))


def test_the_query_that_repairs_the_summary_equals_its_view() -> None:
    views = [statement for statement in statements() if "rollout_summary_mv" in statement]
    assert [selected(view) for view in views] == [selected(named_query("late_refill"))]


def test_traces_that_join_their_conversation_are_those_that_would_be_adopted_themselves() -> None:
    conditions = [
        re.findall(r"^ *(?:HAVING|AND) ((?:max|countIf|uniqExact)\(.*)$", named_query(name), re.M)
        for name in ("adopt_traces", "adopt_rollouts")
    ]
    assert conditions[0] == conditions[1] and len(conditions[0]) == 5


def test_log_records_are_identified_by_the_same_expression_everywhere() -> None:
    texts = "".join(map(named_query, ("late_log_traces", "late_log_copy", "late_evaluation_copy", "late_responses")))
    assert set(re.findall(r"BatchId, BatchPos, Timestamp, cityHash64\(([^)]+\))\)", texts)) == {
        "SpanId, SeverityText, EventName, Body, toString(LogAttributes)"
    }


def test_the_columns_read_for_facts_are_those_they_use() -> None:
    [column] = re.findall(r"^  Facts .*?CODEC", named_query("schema"), re.M | re.S)
    queries = "".join(named_query(name) for name in ("figures", "run_figures"))
    asked = re.findall(r"Facts\[\{(\w+):String\}\]|mapContains\(Facts, \{(\w+):String\}\)", queries)
    names = {one or other for one, other in asked}
    names |= set(re.findall(r'"(\w+)"', inspect.getsource(observed))) & set(NAMES) - {
        "seal",
        "attempt",
        "annotation",
        "llm",
        "task",
        "workflow_span",
    }
    assert {f"'{NAMES[name]}'" for name in names} == set(re.findall(r"'[a-z_.]+'", column)) - {f"'{conventions.REWARD}.'"}
