"""Rows of what feedback says should have been answered: the prompt that a model call had, and the corrected text as its reply."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from agl_otel.adapters.lengths import readable
from agl_otel.adapters.messages import corrected_calls
from agl_otel.adapters.records import IGNORED
from agl_otel.adapters.reviews import corrections_in
from agl_otel.adapters.trajectories import to_trajectories
from agl_otel.algorithms.sft.train import Row
from agl_otel.spans.tolerant import MALFORMED
from agl_otel.types import Span
from agl_otel.types.columns import AttemptKey, Traces
from agl_otel.types.spans import by_attempt


def corrected_rows(
    traces: Traces,
    spans: Iterable[Span],
    tokenizer: Callable[[str], Mapping[str, Any]],
    stop_ids: Collection[int],
    refused: Counter[str],
    *,
    sources: Collection[str] | None,
    agent_match: str | None,
    vocabulary: int,
    context_tokens: int,
) -> list[tuple[AttemptKey, Row]]:
    """Make a row for each corrected call, with a loss on the correction and its end. An attempt needs no reward for it.

    The prompt's token ids are those that were captured. The correction ends as the reply did, or by the least of `stop_ids` where that was
    cut off. Those that become no row are counted in `refused`, by keys of records.REASONS.

    Args:
        traces: what `Store.traces` returned.
        spans: of the same rollouts, in any order.
        tokenizer: the model's, to which special tokens in a text are text.
        stop_ids: the tokens that end a reply of the model, at least one.
        refused: reasons are counted here.
        sources: of the feedback that counts; None: of all.
        agent_match: a regular expression for the agents whose calls count; None: all.
        vocabulary, context_tokens: how many token ids the model has, and how long a sample may be.
    """
    batch = to_trajectories(traces, fill_reward=0.0, agent_match=agent_match, by_call=True)
    batch = readable(batch, vocabulary=vocabulary, context_tokens=context_tokens)
    span_ids = [traces.calls.span_id[int(rows[0])] for rows in batch.rows]
    places = {key: place for place, key in enumerate(zip(batch.rollout_id, batch.attempt_id, span_ids, strict=True))}
    of_attempts = by_attempt(spans)
    found: list[tuple[AttemptKey, Row]] = []
    for key in batch.taken:
        own = of_attempts.get(key, [])
        try:
            corrected = corrected_calls(own, corrections_in(own, sources=sources or ()), agent_match=agent_match)
        except MALFORMED:
            refused["unreadable_spans"] += 1
            continue
        for call, text in corrected:
            ids = [(*key, str(getattr(each.span, "span_id", ""))) for each in call.calls]
            place = next((places[each] for each in ids if each in places), None)
            if place is None:
                refused["correction_without_prompt"] += 1
                continue
            prompt, end = batch.prompt[place].tolist(), int(batch.response[place][-1])
            reply = [*tokenizer(text)["input_ids"], end if end in stop_ids else min(stop_ids)]
            if len(prompt) + len(reply) > context_tokens or max(reply) >= vocabulary:
                refused["beyond_context" if max(reply) < vocabulary else "beyond_vocabulary"] += 1
                continue
            found.append((key, Row(input_ids=[*prompt, *reply], labels=[IGNORED] * len(prompt) + reply, rollout_id=key[0])))
    return found
