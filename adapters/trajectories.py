"""Converts columns to trajectories: the model calls that are fit for training, merged, with one reward each (docs/training-files.md).

First every attempt is taken or refused, then every call of the taken ones, then calls are merged (merge.py). Refusals are counted by
reason and never repaired: a missing reward does not become 0, and text is never tokenised again. Attempts that are one chain, the common
case, need no Python work per call (chains.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from agl_otel.adapters.chains import chains, lay_out_chains
from agl_otel.adapters.merge import Call, Merged, lay_out, merge
from agl_otel.adapters.messages import image_urls, unfit_media
from agl_otel.adapters.ragged import concatenate, count_per_row, take
from agl_otel.adapters.sampling import Assumed, at_one_temperature, unlike
from agl_otel.adapters.texts import UNFIT_MEDIA, conversation_at, messages_at, unbridged_at
from agl_otel.spans.history import MAX_TOKENS, StoredCall, full_prompts, tokens_to_expand
from agl_otel.types import TAKEN_VERDICTS, AttemptedRollout, Rollout, VerdictKind
from agl_otel.types.columns import AttemptKey, CallColumns, Ragged, Reward, Traces
from agl_otel.types.patterns import checked_pattern, matches_agent
from agl_otel.types.scores import is_usable
from agl_otel_hook import conventions

ATTEMPT_REFUSALS: Final = {
    "not_latest_attempt": "an earlier attempt of its rollout",
    "no_attempt": "the rollout has no attempt",
    "not_succeeded": "the rollout did not succeed",
    "verdict_incomplete": "spans or calls are known to be missing",
    "verdict_unproven": "nothing says how many spans there should be",
    "verdict_empty": "nothing was observed",
    "no_verdict": "the reader gave none",
    "no_reward": "no primary reward and no fill value, or a reward that is not finite, or beyond 1e9",
    "no_calls": "no model call was captured",
}
"""Reasons for refusing an attempt; only the first that applies is counted."""

CALL_REFUSALS: Final = {
    "other_agent": "made by an agent that `agent_match` leaves out",
    "greedy": "sampled at a temperature below 0.01, so that its tokens have no gradient",
    "sampling_differs": "sampled from another distribution than the trainer evaluates",
    "masked_ids": "a masking rule took token ids out before they were stored: of the call, or of one that its prompt goes on from",
    "routing_misaligned": "its experts or weights versions are of other tokens than those of its reply",
    "incomplete_reply": "the reply was cut off, the call failed, or the agent's SDK repeated it and used the later reply",
    "no_token_ids": "no prompt token ids",
    "empty_response": "no response token ids",
    "no_logprobs": "no log-probs",
    "logprobs_length": "another number of log-probs than response tokens",
    "logprobs_not_finite": "a log-prob that is no finite number",
    "dangling_prefix": "the prompt goes on from a call that is not there",
    **UNFIT_MEDIA,
    "too_many_tokens": f"the prompts of its attempt go on from earlier ones, and have more than {MAX_TOKENS} tokens in all",
}
"""Reasons for refusing a (call, choice) of a taken attempt; only the first that applies is counted."""


@dataclass(frozen=True)
class TrajectoryBatch:
    """Training samples as columns: entry i of every field belongs to trajectory i."""

    prompt: Ragged
    """int32 token ids."""
    response: Ragged
    """int32 token ids: the model's responses, and the tokens between them."""
    response_mask: Ragged
    """int8, as long as the response: 1 for tokens that the model wrote."""
    logprobs: Ragged
    """float32, as long as the response: as captured during sampling; 0 where the mask is 0."""
    reward: NDArray[np.float32]
    """The attempt's reward."""
    rollout_id: list[str]
    attempt_id: list[str]
    agent: list[str]
    calls: NDArray[np.int64]
    """Number of merged calls."""
    model_version: list[str]
    verdict: list[str]
    images: list[list[str]]
    """Addresses (or data: URLs) of the conversation's images, in order."""
    rows: Ragged
    """int64: the merged rows of CallColumns, in order."""
    refused: Counter[str]
    """{key of ATTEMPT_REFUSALS or CALL_REFUSALS: count}."""
    breaks: Counter[str]
    """{key of split_reasons.SPLIT_REASONS: number of trajectories that started for this reason}."""
    cut: int = 0
    """Number of trajectories that length limits cut (lengths.py)."""
    taken: tuple[AttemptKey, ...] = ()
    """The attempts that were taken, also those all of whose calls were refused."""
    differing: Counter[str] = field(default_factory=Counter[str])
    """{field: how many calls refused as `sampling_differs` have another value of it, or an unknown one}."""

    COLUMNS: ClassVar = (
        "prompt", "response", "response_mask", "logprobs", "reward", "rollout_id", "attempt_id", "agent", "calls", "model_version",
        "verdict", "images", "rows",
    )  # fmt: skip
    """The fields with one entry per trajectory."""

    def __len__(self) -> int:
        return len(self.rollout_id)


def to_trajectories(
    traces: Traces,
    *,
    take: Collection[VerdictKind] = TAKEN_VERDICTS,
    fill_reward: float | None = None,
    agent_match: str | None = None,
    reward_name: str | None = None,
    by_call: bool = False,
    sampling: Assumed | None = None,
) -> TrajectoryBatch:
    """Convert the latest attempt of every succeeded rollout to trajectories, in the order of the calls.

    Args:
        traces: the result of `Store.traces`.
        take: the verdicts to train on.
        fill_reward: the reward of attempts without one; None refuses them.
        agent_match: a regular expression that an agent's name must match somewhere; None takes every agent.
        reward_name: the dimension that is the reward; None is the primary one.
        by_call: make every call its own trajectory (records.to_transitions), without merging or counting of breaks.
        sampling: refuse calls that were sampled otherwise (`greedy`, `sampling_differs`); None takes them.
    """
    refused: Counter[str] = Counter()
    rewards = taken_attempts(traces, take, fill_reward, refused, reward_name)
    attempt, keys = _attempt_of_calls(traces.calls, rewards, refused)
    fit = _fit_calls(traces.calls, attempt, agent_match, refused)
    differing: Counter[str] = Counter()
    if sampling is not None:
        fit = _fit_sampling(traces.calls, fit, sampling, refused, differing)
    fit = _fit_media(traces, fit, refused)
    return replace(_assemble(traces, fit, attempt, keys, rewards, refused, by_call), taken=tuple(keys), differing=differing)


def taken_attempts(
    traces: Traces, take: Collection[VerdictKind], fill: float | None, refused: Counter[str], reward_name: str | None = None
) -> dict[AttemptKey, float]:
    """Return {attempt to train on: its reward}; count the refused ones."""
    taken: dict[AttemptKey, float] = {}
    latest = 0
    for _, key, reason, reward in latest_attempts(traces, take, fill, reward_name):
        latest += key is not None and key in traces.verdicts
        if reason:
            refused[reason] += 1
        elif key is not None and reward is not None:
            taken[key] = reward
    if len(traces.verdicts) > latest:
        refused["not_latest_attempt"] += len(traces.verdicts) - latest
    return taken


def latest_attempts(
    traces: Traces, take: Collection[VerdictKind], fill: float | None, reward_name: str | None = None
) -> Iterator[tuple[Rollout, AttemptKey | None, str, float | None]]:
    """Yield (rollout, its latest attempt, the reason for refusing that or "", its reward or None)."""
    for rollout in traces.rollouts:
        if not isinstance(rollout, AttemptedRollout):
            yield rollout, None, "no_attempt", None
            continue
        key = (rollout.rollout_id, rollout.attempt.attempt_id)
        verdict = traces.verdicts.get(key)
        reward = final_reward(traces.rewards.get(key, ()), fill, reward_name)
        if rollout.status != "succeeded":
            reason = "not_succeeded"
        elif verdict is None:
            reason = "no_verdict"
        elif verdict.kind not in take:
            reason = f"verdict_{verdict.kind}"
        else:
            reason = "no_reward" if reward is None else ""
        yield rollout, key, reason, reward


def final_reward(rewards: Sequence[Reward], fill: float | None = None, name: str | None = None) -> float | None:
    """Return the reward of an attempt: the last one of the dimension, else `fill`; None if it is not usable (types/scores.py).

    Args:
        rewards: those of the attempt, in the order of Traces.rewards.
        fill: the reward where there is none.
        name: of the dimension; None: the primary one.
    """
    for reward in reversed(rewards):
        if reward.is_of(name):
            return reward.value if is_usable(reward.value) else None
    return fill


def _attempt_of_calls(
    calls: CallColumns, rewards: dict[AttemptKey, float], refused: Counter[str]
) -> tuple[NDArray[np.int64], list[AttemptKey]]:
    """Return the list of taken attempts, and for each call the index of its attempt in it (-1: not taken)."""
    keys = list(rewards)
    index = {key: place for place, key in enumerate(keys)}
    places = [index.get(key, -1) for key in zip(calls.rollout_id, calls.attempt_id, strict=True)]
    attempt = np.array(places, dtype=np.int64)
    without = len(keys) - int(np.count_nonzero(np.bincount(attempt[attempt >= 0], minlength=len(keys))))
    if without:
        refused["no_calls"] += without
    return attempt, keys


def _fit_calls(calls: CallColumns, attempt: NDArray[np.int64], agent_match: str | None, refused: Counter[str]) -> NDArray[np.bool_]:
    """Return which calls may be trained on, before prefix references are checked; count the taken attempts' other calls."""
    response, logprobs = calls.response.lengths, calls.logprobs.lengths
    wrong = {
        "masked_ids": np.array([why == conventions.LLM_MASKED for why in calls.incomplete], dtype=np.bool_),
        "routing_misaligned": np.array([why == conventions.LLM_MISALIGNED for why in calls.incomplete], dtype=np.bool_),
        "incomplete_reply": np.array([bool(why) for why in calls.incomplete], dtype=np.bool_),
        "no_token_ids": (calls.prompt.lengths == 0) & (calls.prefix_call == 0),
        "empty_response": response == 0,
        "no_logprobs": logprobs == 0,
        "logprobs_length": logprobs != response,
        "logprobs_not_finite": count_per_row(~np.isfinite(calls.logprobs.values.astype(np.float32, copy=False)), calls.logprobs.offsets)
        > 0,
    }
    if agent_match is not None:
        checked_pattern(agent_match, f"agent_match {agent_match!r}")
        matches = {name: not matches_agent(agent_match, name) for name in set(calls.agent)}
        wrong = {"other_agent": np.array([matches[name] for name in calls.agent], dtype=np.bool_), **wrong}
    fit = attempt >= 0
    for reason, rows in wrong.items():
        if count := int(np.count_nonzero(fit & rows)):
            refused[reason] += count
        fit = fit & ~rows
    return fit


def _fit_sampling(
    calls: CallColumns, fit: NDArray[np.bool_], assumed: Assumed, refused: Counter[str], differing: Counter[str]
) -> NDArray[np.bool_]:
    """Return which of the `fit` calls were sampled as assumed; count the others, and the fields that differ."""
    found = unlike(calls, assumed)
    kept = fit & ~found.greedy & ~found.differs
    differing.update(found.counted(fit & ~found.greedy))
    if assumed.temperatures == "one":
        like = at_one_temperature(calls, kept, assumed.temperature)
        if others := int(np.count_nonzero(kept & ~like)):
            differing["temperature"] += others
        kept = like
    for reason, rows in (("greedy", fit & found.greedy), ("sampling_differs", fit & ~found.greedy & ~kept)):
        if count := int(np.count_nonzero(rows)):
            refused[reason] += count
    return kept


def _fit_media(traces: Traces, fit: NDArray[np.bool_], refused: Counter[str]) -> NDArray[np.bool_]:
    """Return which of the `fit` calls have no media that make them unfit; count the others. Media whose messages are not known are."""
    fit, has = fit.copy(), traces.calls.has_media
    if traces.texts is None or has is None:
        return fit
    for row in np.flatnonzero(fit & _near_media(traces.calls)).tolist():
        prompt = conversation_at(traces.texts, row).prompt
        why = unfit_media(prompt) if prompt or not has[row] else "no_image"
        if why:
            fit[row] = False
            refused[why] += 1
    return fit


def _near_media(calls: CallColumns) -> NDArray[np.bool_]:
    """Return which calls are of a process with media: a prompt holds those of the calls that it continues, which alone store them."""
    if calls.has_media is None or not calls.has_media.any():
        return np.zeros(len(calls), np.bool_)
    places = list(zip(calls.rollout_id, calls.attempt_id, calls.process, strict=True))
    with_media = {places[row] for row in np.flatnonzero(calls.has_media).tolist()}
    return np.array([place in with_media for place in places], np.bool_)


def _assemble(
    traces: Traces,
    fit: NDArray[np.bool_],
    attempt: NDArray[np.int64],
    keys: list[AttemptKey],
    rewards: dict[AttemptKey, float],
    refused: Counter[str],
    by_call: bool,
) -> TrajectoryBatch:
    """Build chains by array operations and other attempts by merge.py; sort both by their first call."""
    calls, breaks = traces.calls, Counter[str]()
    begins, chained = chains(calls, attempt, fit)
    if by_call:  # of the chains only those of one call are transitions
        alone = np.bincount(attempt[chained], minlength=len(keys))[attempt] == 1 if len(keys) else chained
        begins, chained = begins & alone, chained & alone
    merged = _merge_rows(traces, attempt, fit, np.flatnonzero((attempt >= 0) & ~chained), refused, None if by_call else breaks)
    captured: Any = calls.logprobs  # the chains' rows are float32
    laid_out = [lay_out(m, [captured[c.row] for c in m.calls]) for m in merged]
    rows = np.flatnonzero(begins)
    first = np.concatenate([rows, np.array([m.calls[0].row for m in merged], dtype=np.int64)])
    order = np.argsort(first, kind="stable")
    columns = lay_out_chains(calls, begins, np.flatnonzero(chained))
    ragged = [take(concatenate(a, Ragged.from_rows([x[i] for x in laid_out], a.values.dtype.type)), order) for i, a in enumerate(columns)]
    lengths = np.diff(np.append(np.flatnonzero(begins[chained]), np.count_nonzero(chained)))
    of_chains = Ragged(np.flatnonzero(chained), np.append(0, np.cumsum(lengths)))
    rows_of = take(concatenate(of_chains, Ragged.from_rows([[c.row for c in m.calls] for m in merged], np.int64)), order)
    starts: list[int] = first[order].tolist()
    kept = [keys[place] for place in attempt[starts].tolist()]
    return TrajectoryBatch(
        *ragged,
        reward=np.array([rewards[key] for key in kept], dtype=np.float32),
        rollout_id=[key[0] for key in kept],
        attempt_id=[key[1] for key in kept],
        agent=[calls.agent[row] for row in starts],
        calls=np.concatenate([lengths, np.array([len(m.calls) for m in merged], np.int64)])[order],
        model_version=[calls.model_version[row] for row in starts],
        verdict=[traces.verdicts[key].kind for key in kept],
        images=_images(traces, rows_of),
        rows=rows_of,
        refused=refused,
        breaks=breaks,
    )


def _images(traces: Traces, rows: Ragged) -> list[list[str]]:
    """Return the images of each trajectory, from its last call's prompt, which holds the whole conversation."""
    near = _near_media(traces.calls)
    if traces.texts is None or not near.any():
        return [[] for _ in range(len(rows))]
    last: Any = rows.values[rows.offsets[1:] - 1]
    return [image_urls(conversation_at(traces.texts, row).prompt) if near[row] else [] for row in last.tolist()]


def _merge_rows(
    traces: Traces,
    attempt: NDArray[np.int64],
    fit: NDArray[np.bool_],
    rows: NDArray[np.int64],
    refused: Counter[str],
    breaks: Counter[str] | None,
) -> list[Merged]:
    """Merge the rows of whole attempts, one process at a time; without `breaks` every call stays separate."""
    calls = traces.calls
    processes: dict[tuple[int, str], list[int]] = {}
    for row in rows.tolist():
        processes.setdefault((int(attempt[row]), calls.process[row]), []).append(row)
    stored = {key: _stored(calls, members) for key, members in processes.items()}
    tokens = Counter[int]()
    for (place, _), found in stored.items():
        tokens[place] += tokens_to_expand(found, in_place=breaks is not None)
    merged: list[Merged] = []
    begun: set[int] = set()
    for (place, process), members in processes.items():
        if tokens[place] > MAX_TOKENS:
            refused["too_many_tokens"] += int(np.count_nonzero(fit[members]))
            continue
        ready = _ready_calls(traces, fit, members, stored[place, process], refused)
        if breaks is None:
            merged += [Merged([call]) for call in ready]
            continue
        found = merge(ready)
        merged += found
        reasons = [m.reason for m in found]
        if found and place in begun:
            reasons[0] = "process"
        begun.update([place] if found else [])
        breaks.update(reason for reason in reasons if reason)
    return merged


def _stored(calls: CallColumns, rows: list[int]) -> list[StoredCall]:
    prompt: Any = calls.prompt
    response: Any = calls.response
    return [
        StoredCall(int(calls.call[r]), int(calls.choice[r]), int(calls.prefix_call[r]), int(calls.prefix_choice[r]), prompt[r], response[r])
        for r in rows
    ]


def _ready_calls(
    traces: Traces, fit: NDArray[np.bool_], rows: list[int], stored: Sequence[StoredCall], refused: Counter[str]
) -> list[Call]:
    """Return the fit calls of one attempt and process with full prompts; count those with a dangling or masked prefix."""
    calls = traces.calls
    explain = traces.texts is not None and bool((calls.prefix_call[rows[1:]] == 0).any())
    ready: list[Call] = []
    masked = {(call.call, call.choice) for row, call in zip(rows, stored, strict=True) if calls.incomplete[row] == conventions.LLM_MASKED}
    for row, call, full in zip(rows, stored, full_prompts(stored), strict=True):
        if (call.prefix_call, call.prefix_choice) in masked:
            masked.add((call.call, call.choice))
            refused["masked_ids"] += bool(fit[row])
        elif fit[row] and full is None:
            refused["dangling_prefix"] += 1
        elif fit[row] and full is not None:
            messages = messages_at(traces.texts, row) if explain else ((), "")
            why = unbridged_at(traces.texts, row) if explain else ""
            ready.append(Call(row, call.call, full, call.response, calls.agent[row], calls.model_version[row], *messages, why))
    return ready
