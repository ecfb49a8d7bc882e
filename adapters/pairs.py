"""Pairs of replies for preference training: the best and the worst attempt at a task, a correction and what it corrects. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from agl_otel.adapters.chats import Row, conversations
from agl_otel.adapters.messages import corrected_calls, whole_call
from agl_otel.adapters.reviews import Correction
from agl_otel.types import Span

PAIR_REFUSALS: Final = {
    "no_pair": "all attempts with this prompt have equal rewards",
    "same_reply": "the best and the worst reply to this prompt are the same text: a pair of them teaches nothing",
    "no_other_attempt": "only one attempt has this prompt, and a pair is of two",
    "unpaired_correction": "the reply that a correction is of was not captured whole, or is the same text",
    "correction_without_tokens": "a correction is text, which has no token ids until a chat template has rendered it",
    "correction_without_prompt": "a correction of a call that cannot be trained on: its token ids were not captured, or not whole",
}
"""Reasons why a reply or a correction is in no pair, or no sample."""


def best_and_worst(
    rows: Iterable[Row],
    tasks: Mapping[str, str],
    prompt_of: Callable[[Row], Any],
    refused: Counter[str],
    *,
    reply_of: Callable[[Row], Any],
    paired: Collection[Any] = (),
) -> Iterable[tuple[Row, Row]]:
    """Yield (best, worst) of the rows of each task and prompt; count the rows of the other groups, by a key of PAIR_REFUSALS.

    `tasks` are by rollout id. Of the rows in `paired`, as (rollout id, attempt id, prompt), none is counted.
    """
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault((tasks[row["rollout_id"]], prompt_of(row)), []).append(row)
    for (_, prompt), group in groups.items():
        high, low = (pick(row["reward"] for row in group) for pick in (max, min))
        best, worst = ([row for row in group if row["reward"] == value] for value in (high, low))
        differ = high != low
        if differ and (pair := next(((one, other) for one in best for other in worst if reply_of(one) != reply_of(other)), None)):
            yield pair
            continue
        is_alone = len({(row["rollout_id"], row["attempt_id"]) for row in group}) == 1
        left = sum((row["rollout_id"], row["attempt_id"], prompt) not in paired for row in group)
        why = "same_reply" if differ else "no_other_attempt" if is_alone else "no_pair"
        refused.update({why: left} if left else {})


def pair_of(best: Row, worst: Row) -> Row:
    """Return the row of two attempts' replies."""
    return {
        "rollout_id": best["rollout_id"],
        "attempt_id": best["attempt_id"],
        "reward": best["reward"],
        "rejected_rollout_id": worst["rollout_id"],
        "rejected_attempt_id": worst["attempt_id"],
        "rejected_reward": worst["reward"],
        "messages": best["messages"],
        "rejected_messages": worst["messages"],
        "tools": best["tools"],
    }


def corrected_pairs(
    spans: Sequence[Span], corrections: Mapping[str, Correction], refused: Counter[str], *, agent_match: str | None = None
) -> list[Row]:
    """Pair each correction of an attempt (reviews.corrections_in) with the reply that it is of, after the prompt that this answered.

    Rows have messages, rejected_messages, tools, and the reward None: nobody has rated a correction.
    """
    pairs: list[Row] = []
    for call, text in corrected_calls(spans, corrections, agent_match=agent_match):
        found, sides = whole_call(call), list[Row]()
        if not isinstance(found, str):
            replies = [{"role": "assistant", "content": text}], found.reply
            whole = [{"messages": [*found.prompt, *reply], "tools": found.tools} for reply in replies]
            sides = conversations(whole, Counter(), by_call=True)
        if len(sides) < 2 or sides[0]["messages"] == sides[1]["messages"]:
            refused["unpaired_correction"] += 1
        else:
            pairs.append({**sides[0], "reward": None, "rejected_messages": sides[1]["messages"]})
    return pairs
