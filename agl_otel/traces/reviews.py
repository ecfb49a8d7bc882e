"""Read what reviews and their queue are made of."""

from __future__ import annotations

from collections.abc import Sequence

from agl_otel.traces.names import names_in
from agl_otel.traces.reader import TraceReader
from agl_otel.traces.sql import named_query
from agl_otel.types.columns import AttemptKey
from agl_otel.types.reviews import Review


async def read_reviews(
    reader: TraceReader, *, limit: int, rollouts: Sequence[str] = (), rubric: str = "", sources: Sequence[str] = ()
) -> list[Review]:
    """Return the last `limit` reviews: of some rollouts, rubric and sources, where they are given."""
    given = {"rollouts": list(rollouts), "rubric": rubric, "sources": list(sources), "limit": limit}
    rows = await reader.query(named_query("reviews"), params={**names_in("reviews"), **given})
    return [
        Review(
            *(row[name] for name in ("RolloutId", "AttemptId", "Source", "Rubric", "Name", "Label")),
            value=float(row["Value"]) if row["Value"] else None,
            time=int(row["Time"]),
        )
        for row in rows
    ]


async def read_known_feedback(reader: TraceReader, rollouts: Sequence[str], ids: Sequence[str]) -> set[str]:
    """Return the ids under which feedback on some rollouts is stored, of those that are one of `ids` up to the first dot."""
    given = {"rollouts": list(rollouts), "ids": list(ids)}
    rows = await reader.query(named_query("known_feedback"), params={**names_in("known_feedback"), **given})
    return {row["Id"] for row in rows}


async def read_span_counts(reader: TraceReader, rollouts: Sequence[str]) -> dict[AttemptKey, int]:
    """Return {attempt: how many spans it has}, without seals, attempts' own spans and annotations; of those that have any."""
    rows = await reader.query(named_query("span_counts"), params={**names_in("span_counts"), "rollouts": list(rollouts)})
    return {(row["RolloutId"], row["AttemptId"]): int(row["Spans"]) for row in rows}


async def read_mean_logprobs(reader: TraceReader, rollouts: Sequence[str]) -> dict[AttemptKey, tuple[float, int]]:
    """Return {attempt: (mean log-prob of its sampled tokens, their number)} of those with log-probs, the lowest first."""
    rows = await reader.query(named_query("mean_logprobs"), params={"rollouts": list(rollouts)})
    return {(row["RolloutId"], row["AttemptId"]): (float(row["Mean"]), int(row["Tokens"])) for row in rows}
