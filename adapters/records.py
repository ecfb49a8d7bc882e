"""Converts traces to the rows of a training data file, in each of FORMS. Pure; pins, masks and files do not belong here.

Every row holds its rollout id, attempt id and reward. Token forms (`trajectories`, `transitions`, `sft`, `dpo`, `tinker`) read columns; the
others read spans in any dialect, so they need no proxy. formats.py converts rows to trainers' file formats.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from agl_otel.adapters.call_rewards import call_rewards
from agl_otel.adapters.chats import CHAT_REFUSALS, conversations, unfit
from agl_otel.adapters.credit import call_returns
from agl_otel.adapters.lengths import LENGTH_REFUSALS, limit_lengths, pick
from agl_otel.adapters.messages import corrected_messages, image_urls, whole_messages
from agl_otel.adapters.pairs import PAIR_REFUSALS, best_and_worst, corrected_pairs, pair_of
from agl_otel.adapters.reviews import corrections_in, mean_review
from agl_otel.adapters.selection import SELECTION_REFUSALS, check_selection, left_out, task_key
from agl_otel.adapters.texts import conversation_at
from agl_otel.adapters.token_columns import of_each_token, routed_experts, token_versions
from agl_otel.adapters.trajectories import ATTEMPT_REFUSALS, CALL_REFUSALS, TrajectoryBatch, taken_attempts, to_trajectories
from agl_otel.adapters.triplets import whole_triplets
from agl_otel.errors import AgentError, UsageError
from agl_otel.spans.calls import repeated
from agl_otel.spans.tolerant import MALFORMED
from agl_otel.types import TAKEN_VERDICTS, Span
from agl_otel.types.columns import AttemptKey, Ragged, Reward, Traces, shared
from agl_otel.types.patterns import checked_pattern
from agl_otel.types.spans import by_attempt, in_json

Row = dict[str, Any]
_log = logging.getLogger(__name__)
SAMPLING: Final = ("temperature", "top_p", "sampling")
"""Columns of token rows: two sampling parameters of each of their calls, and its whole contract as JSON (types.sampling.Contract)."""
DEMONSTRATIONS: Final = "demonstrations"
IGNORED: Final = -100
"""The label for tokens without loss, by torch's cross entropy and transformers' trainers."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The options of the conversion to rows; with the traces they determine the result."""

    form: str = "trajectories"
    """A key of FORMS."""
    take: tuple[str, ...] = TAKEN_VERDICTS
    """The verdicts to take."""
    agent_match: str | None = None
    """A regular expression for the names of agents to take; None: all."""
    reward: str | None = None
    """The name of the reward dimension; None: the primary one."""
    reward_source: tuple[str, ...] = ()
    """Whose rewards count (Reward.source); none named: everybody's."""
    rubric: str | None = None
    """Name and version of a rubric: the reward is the mean of the reviews under it (reviews.py). Of demonstrations: which corrections."""
    fill_reward: float | None = None
    """The reward of attempts without one; None: refuse them."""
    min_reward: float | None = None
    """Leave out attempts with less; their rows count as `low_reward`."""
    top_fraction: float | None = None
    """Keep this share of the attempts, those with the highest rewards; the rest counts as `not_in_top`."""
    best_of_group: int | None = None
    """Keep so many of each task's best attempts; the rest counts as `not_best_of_group`."""
    by_call: bool = False
    """Make one row per call, with its attempt's reward; always so in `transitions`."""
    call_rewards: bool = False
    """Take a call's own reward (call_rewards.py), not its attempt's; calls without one get `fill_reward`, or count as `no_call_reward`."""
    discount: float | None = None
    """Multiply the attempt's reward by this once for each later call of the attempt; with `returns`, not this but the rewards in those."""
    returns: bool = False
    """Add what each call receives of the rewards along the span tree (credit.py): `returns`, one for each call of the row, and the same
    for each token: `token_returns`, in `sft` and `tinker` `weights`."""
    max_prompt_tokens: int | None = None
    max_response_tokens: int | None = None
    adapter: str = ""
    """Reference to a user's function (module:function), like the next two; the caller loads them and passes Functions."""
    reward_function: str = ""
    filter: str = ""

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise UsageError(f"there is no form {self.form!r}: use one of {', '.join(FORMS)}")
        checked_pattern(self.agent_match or "", f"agent_match {self.agent_match!r}")
        for name in ("fill_reward", "min_reward", "discount"):
            value: float | None = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise UsageError(f"{name} is {value}: a finite number is needed")
        if self.discount is not None and not 0 <= self.discount <= 1:
            raise UsageError(f"discount is {self.discount:g}: give a number from 0 to 1, with which earlier calls count less, or as much")
        for name in ("max_prompt_tokens", "max_response_tokens"):
            if (most := getattr(self, name)) is not None and most < 1:
                raise UsageError(f"{name} is {most}: give a positive number, or leave it out")
        check_selection(self.top_fraction, self.best_of_group)
        if self.rubric is not None and (self.reward is not None or self.reward_function):
            raise UsageError("a rubric, the name of a reward and a function each say what the reward is: give one of them")
        if self.form == DEMONSTRATIONS and (self.min_reward, self.top_fraction, self.best_of_group) != (None, None, None):
            raise UsageError(
                "demonstrations are chosen by their corrections, not by rewards: leave min_reward, top_fraction and best_of_group out"
            )
        by_tokens = self.calls_alone and self.form in TOKEN_FORMS
        if self.call_rewards and (self.discount is not None or not by_tokens):
            raise UsageError("rewards of calls are for transitions: add by_call (--by-call), in a form of token ids, and no discount")
        if self.returns and (self.form not in TOKEN_FORMS - PAIR_FORMS or self.adapter):
            raise UsageError(f"returns are those of calls with token ids: use a form of {', '.join(sorted(TOKEN_FORMS - PAIR_FORMS))}")
        if self.discount is not None and not by_tokens and not self.returns:
            raise UsageError("a discount is for the calls of an attempt: add by_call (--by-call), in a form of token ids")

    @property
    def calls_alone(self) -> bool:
        """Whether each call is a row of its own."""
        return self.by_call or self.form == "transitions"


class Functions(NamedTuple):
    """Functions of the user that replace steps of the conversion; None: the built-in step."""

    adapter: Callable[[list[Span]], Iterable[Any]] | None = None
    """Converts the spans of an attempt to rows (dicts or pydantic models), instead of the form."""
    reward: Callable[[list[Span]], float | None] | None = None
    """Computes an attempt's reward from its spans; may return None for no reward."""
    keep: Callable[[Row], Any] | None = None
    """Whether to keep a row; others count as `filtered`."""


@dataclass(frozen=True)
class Rows:
    """The result of a conversion."""

    rows: list[Row]
    refused: Counter[str] = field(default_factory=Counter[str])
    """{reason: count}; the reasons are those of REASONS."""
    breaks: Counter[str] = field(default_factory=Counter[str])


def rows_of(reading: Reading, traces: Traces, spans: Sequence[Span] = (), functions: Functions = Functions()) -> Rows:  # noqa: B008 - a tuple
    """Convert traces to rows; `spans` of the same rollouts are required if `needs_spans`.

    Raises AgentError, which names the user's function that failed.
    """
    traces = traces.trusting(reading.reward_source or None)
    reward = functions.reward
    if reading.rubric is not None and reading.form != DEMONSTRATIONS:
        reward = partial(mean_review, rubric=reading.rubric)
    if reward is not None:
        traces = replace(traces, rewards=_rewards(reward, spans))
    if functions.adapter is not None:
        own = functions.adapter
        found = _of_spans(reading, traces, spans, lambda some, _: map(_as_row, _called(own, reading.adapter, some)), ours=False)
    else:
        found = FORMS[reading.form](reading, traces, spans)
    if functions.keep is None:
        return found
    kept = [row for row in found.rows if _called(functions.keep, reading.filter, row)]
    found.refused.update({"filtered": len(found.rows) - len(kept)} if len(kept) < len(found.rows) else {})
    return replace(found, rows=kept)


def _rewards(function: Callable[[list[Span]], float | None], spans: Sequence[Span]) -> dict[AttemptKey, list[Reward]]:
    rewards: dict[AttemptKey, list[Reward]] = {}
    for key, own in by_attempt(spans).items():
        value = _called(function, "reward function", own)
        if value is not None:
            after = max(span.sequence_id for span in own) + 1  # it is of the attempt as a whole
            rewards[key] = [Reward(after, "", 0, "primary", float(value))]
    return rewards


def _called(function: Callable[[Any], Any], name: str, given: Any) -> Any:
    try:
        return function(given)
    except Exception as error:  # user code: any error becomes a message that names it
        raise AgentError(f"{name or function!r} failed: {type(error).__name__}: {error}") from error


def _as_row(found: Any) -> Row:
    row = found.model_dump() if hasattr(found, "model_dump") else found
    if not isinstance(row, dict):
        raise UsageError(f"an adapter returns dicts or pydantic models, one for each row, not {type(found).__name__}")
    return {key if key not in _OURS else f"own_{key}": value for key, value in cast("Row", row).items()}


_OURS: Final = frozenset({"rollout_id", "attempt_id", "reward"})


def needs_spans(reading: Reading) -> bool:
    """Whether the conversion needs all spans."""
    return reads_spans(reading) or bool(reading.reward_function) or reading.rubric is not None


def needs_rated(reading: Reading) -> bool:
    """Whether it needs the spans of rollouts with evaluations that came as log records, for the corrections among them."""
    return reading.form in PAIR_FORMS


def reads_spans(reading: Reading) -> bool:
    """Whether rows are made of spans; else of columns, with the texts of calls."""
    return reading.form not in TOKEN_FORMS or bool(reading.adapter)


def needs_all(reading: Reading) -> bool:
    """Whether a row may depend on other rollouts; else pages of rollouts can be converted one by one."""
    return reading.form in PAIR_FORMS or reading.top_fraction is not None or reading.best_of_group is not None


def to_transitions(traces: Traces, **options: Any) -> TrajectoryBatch:
    """Convert as `to_trajectories` does, but with one row per call, which has its full prompt and its attempt's reward.

    `call_rewards.call_rewards` finds the calls' own rewards.
    """
    return to_trajectories(traces, by_call=True, **options)


def _batch(reading: Reading, traces: Traces) -> TrajectoryBatch:
    batch = to_trajectories(
        traces,
        take=reading.take,  # pyright: ignore[reportArgumentType] - texts from a command line; an unknown verdict takes nothing
        fill_reward=reading.fill_reward,
        agent_match=reading.agent_match,
        reward_name=reading.reward,
        by_call=reading.calls_alone,
    )
    batch = limit_lengths(batch, max_prompt_tokens=reading.max_prompt_tokens, max_response_tokens=reading.max_response_tokens)
    if (reading.min_reward, reading.top_fraction, reading.best_of_group) != (None, None, None):
        batch = _selected(reading, traces, batch)
    if reading.call_rewards:
        return _by_own_reward(reading, traces, batch)
    if reading.discount is None or reading.returns:
        return batch
    of_calls = call_returns(traces, batch, reading.discount, returns="final", agent_match=reading.agent_match)
    return replace(batch, reward=of_calls.astype(np.float32))


def _by_own_reward(reading: Reading, traces: Traces, batch: TrajectoryBatch) -> TrajectoryBatch:
    rewards = call_rewards(traces, batch, reading.reward)
    missing = np.isnan(rewards)
    if reading.fill_reward is not None:
        return replace(batch, reward=np.where(missing, np.float32(reading.fill_reward), rewards))
    batch.refused.update({"no_call_reward": int(missing.sum())} if missing.any() else {})
    return pick(replace(batch, reward=rewards), np.flatnonzero(~missing))


def _selected(reading: Reading, traces: Traces, batch: TrajectoryBatch) -> TrajectoryBatch:
    """Drop the rows of attempts that are not selected."""
    keys = list(zip(batch.rollout_id, batch.attempt_id, strict=True))
    out = _left_out(reading, traces, dict(zip(keys, batch.reward.tolist(), strict=True)))
    batch.refused.update(out[key] for key in keys if key in out)
    return pick(batch, np.flatnonzero([key not in out for key in keys])) if out else batch


def _left_out(reading: Reading, traces: Traces, rewards: Mapping[AttemptKey, float]) -> dict[AttemptKey, str]:
    tasks = {} if reading.best_of_group is None else {rollout.rollout_id: task_key(rollout) for rollout in traces.rollouts}
    return left_out(rewards, tasks, min_reward=reading.min_reward, top_fraction=reading.top_fraction, best_of_group=reading.best_of_group)


def _row(traces: Traces, batch: TrajectoryBatch, place: int) -> Row:
    rows: list[int] = batch.rows[place].tolist()
    conversation = conversation_at(traces.texts, rows[-1])
    return {
        "rollout_id": batch.rollout_id[place],
        "attempt_id": batch.attempt_id[place],
        "agent": batch.agent[place],
        "reward": float(batch.reward[place]),
        "calls": int(batch.calls[place]),
        "model_version": batch.model_version[place],
        "temperature": _of_calls(traces.calls.temperature, batch.rows[place]),
        "top_p": _of_calls(traces.calls.top_p, batch.rows[place]),
        "sampling": [traces.calls.contract[row] or None for row in rows],
        "verdict": batch.verdict[place],
        "images": image_urls(conversation.prompt),
        "messages": [*conversation.prompt, *conversation.reply[:1]],
        "tools": conversation.tools,
        "prompt_ids": shared(batch.prompt[place].tolist()),
        "response_ids": shared(batch.response[place].tolist()),
        "response_mask": batch.response_mask[place].tolist(),
        "logprobs": batch.logprobs[place].tolist(),
        **_of_tokens(traces, batch, place, rows),
    }


def _of_tokens(traces: Traces, batch: TrajectoryBatch, place: int, rows: list[int]) -> Row:
    """Return the columns of tokens that only some engines tell, where they do."""
    if traces.texts is None:
        return {}
    mask = batch.response_mask[place]
    versions = token_versions(traces.calls, traces.texts, rows, mask)
    experts = routed_experts(traces.calls, traces.texts, rows, len(batch.prompt[place]), mask)
    return {name: value for name, value in (("token_versions", versions), ("routed_experts", experts)) if value is not None}


def _of_calls(column: NDArray[np.float64] | None, rows: NDArray[Any]) -> list[float | None]:
    """Return the value of each call of the row; None if unknown."""
    return [None if column is None or np.isnan(value := column[row]) else float(value) for row in rows.tolist()]


def _trajectories(reading: Reading, traces: Traces, _: Sequence[Span]) -> Rows:
    batch = _batch(reading, traces)
    rows = [_row(traces, batch, place) for place in range(len(batch))]
    if reading.returns:
        discount = 1.0 if reading.discount is None else reading.discount
        of_calls = Ragged(call_returns(traces, batch, discount, reading.reward, agent_match=reading.agent_match), batch.rows.offsets)
        for place, (row, values) in enumerate(zip(rows, of_calls, strict=True)):
            row["returns"] = values.tolist()
            row["token_returns"] = of_each_token(traces.calls, batch.rows[place].tolist(), row["returns"], row["response_mask"])
    return Rows(rows, batch.refused, batch.breaks)


def _sft(reading: Reading, traces: Traces, _: Sequence[Span]) -> Rows:
    """Make input ids and labels of equal length, with loss only on what the model wrote."""
    found = _trajectories(reading, traces, _)
    for row in found.rows:
        prompt, response, mask = row.pop("prompt_ids"), row.pop("response_ids"), row.pop("response_mask")
        row.pop("logprobs")
        if reading.returns:
            row["weights"] = [0.0] * len(prompt) + row.pop("token_returns")
        row["input_ids"] = prompt + response
        row["labels"] = [IGNORED] * len(prompt) + [token if written else IGNORED for token, written in zip(response, mask, strict=True)]
    return found


def _dpo(reading: Reading, traces: Traces, spans: Sequence[Span]) -> Rows:
    """Pair the best and the worst of a task's trajectories with the same prompt tokens, if their rewards differ.

    Trainers tokenise the messages of pairs: trajectories whose messages are not all known are refused. Corrections are counted.
    """
    found = _trajectories(reading, traces, ())
    unfit_rows = [unfit(row["messages"]) for row in found.rows]
    found.refused.update(filter(None, unfit_rows))
    found = replace(found, rows=[row for row, why in zip(found.rows, unfit_rows, strict=True) if not why])
    pairs: list[Row] = []
    groups = best_and_worst(
        found.rows,
        _tasks(traces),
        lambda row: (row["agent"], tuple(row["prompt_ids"])),
        found.refused,
        reply_of=lambda row: row["response_ids"],
    )
    for best, worst in groups:
        sides = (("chosen", best), ("rejected", worst))
        ids = {f"{name}_{field}": row[f"response_{field}"] for name, row in sides for field in ("ids", "mask")}
        sampled = {name: best[name] for name in SAMPLING} | {f"rejected_{name}": worst[name] for name in SAMPLING}
        pairs.append({"agent": best["agent"], **pair_of(best, worst), **sampled, "prompt_ids": best["prompt_ids"], **ids})
    corrections = len(_corrected(reading, traces, spans).rows)
    found.refused.update({"correction_without_tokens": corrections} if corrections else {})
    return Rows(pairs, found.refused, found.breaks)


def _tasks(traces: Traces) -> dict[str, str]:
    return {rollout.rollout_id: task_key(rollout) for rollout in traces.rollouts}


def _of_spans(
    reading: Reading,
    traces: Traces,
    spans: Sequence[Span],
    adapt: Callable[[list[Span], Counter[str]], Iterable[Row]],
    *,
    ours: bool = True,
) -> Rows:
    """Convert the spans of each attempt to rows; `adapt` counts what it refuses in the given counter.

    An attempt with spans that the built-in adapters cannot read is counted and does not affect the others.
    """
    refused: Counter[str] = Counter()
    rewards = _taken(reading, traces, refused)
    rows: list[Row] = []
    out = _left_out(reading, traces, rewards)
    for key, own in by_attempt(spans).items():
        if key not in rewards:
            continue
        if key in out:
            refused[out[key]] += 1
            continue
        try:
            made = list(adapt(own, refused))
        except MALFORMED as error:
            if not ours:
                raise
            _log.warning("attempt %s of rollout %s is left out: %s: %.200s", key[1], key[0], type(error).__name__, error)
            refused["unreadable_spans"] += 1
            continue
        if ours and reading.agent_match is None and (tries := len(repeated(own))):
            refused["incomplete_reply"] += tries
        rows += [{"rollout_id": key[0], "attempt_id": key[1], "reward": rewards[key], **row} for row in made]
    return Rows(rows, refused)


def _taken(reading: Reading, traces: Traces, refused: Counter[str]) -> dict[AttemptKey, float]:
    return taken_attempts(traces, reading.take, reading.fill_reward, refused, reading.reward)  # pyright: ignore[reportArgumentType] - as in to_transitions


def _messages(reading: Reading, traces: Traces, spans: Sequence[Span]) -> Rows:
    def adapt(own: list[Span], refused: Counter[str]) -> Iterable[Row]:
        found = whole_messages(own, refused, agent_match=reading.agent_match)
        return ({**each, "images": image_urls(each["messages"])} for each in found)

    return _of_spans(reading, traces, spans, adapt)


def _triplets(reading: Reading, traces: Traces, spans: Sequence[Span]) -> Rows:
    def adapt(own: list[Span], refused: Counter[str]) -> Iterable[Row]:
        found = whole_triplets(own, refused, agent_match=reading.agent_match)
        return ({"call_reward": t.reward, **in_json(t.model_dump(exclude={"reward"}))} for t in found)

    return _of_spans(reading, traces, spans, adapt)


def _openai(reading: Reading, traces: Traces, spans: Sequence[Span]) -> Rows:
    """Make conversations for OpenAI's fine-tuning; see chats.py."""

    def adapt(own: list[Span], refused: Counter[str]) -> Iterable[Row]:
        return conversations(whole_messages(own, refused, agent_match=reading.agent_match), refused, by_call=reading.by_call)

    return _of_spans(reading, traces, spans, adapt)


def _openai_dpo(reading: Reading, traces: Traces, spans: Sequence[Span]) -> Rows:
    """Pair the replies of the best and the worst attempt to a task's calls with the same messages and tools, if their rewards differ, and
    corrections with what they correct."""

    def prompt_of(row: Row) -> str:
        return json.dumps([row["messages"][:-1], row["tools"]], sort_keys=True)

    found, corrected = _openai(replace(reading, by_call=True), traces, spans), _corrected(reading, traces, spans)
    paired = {(row["rollout_id"], row["attempt_id"], prompt_of(row)) for row in corrected.rows}
    groups = best_and_worst(found.rows, _tasks(traces), prompt_of, found.refused, reply_of=lambda row: row["messages"][-1], paired=paired)
    pairs = [pair_of(*pair) for pair in groups]
    unrated = {key[:2] for key in paired} - _taken(reading, traces, Counter()).keys()
    found.refused.subtract({"no_reward": len(unrated)} if unrated else {})
    unpaired = corrected.refused["unpaired_correction"]
    return Rows([*pairs, *corrected.rows], +(found.refused + Counter({"unpaired_correction": unpaired})))


def _corrected(reading: Reading, traces: Traces, spans: Sequence[Span]) -> Rows:
    """Pair corrections with what they correct; they need no reward, unless attempts are selected by that."""
    rewards = _taken(reading, traces, Counter())

    def adapt(own: list[Span], refused: Counter[str]) -> Iterable[Row]:
        of = own[0].rollout_id, own[0].attempt_id
        rejected = {"rejected_rollout_id": of[0], "rejected_attempt_id": of[1], "rejected_reward": rewards.get(of)}
        corrections = corrections_in(own, reading.rubric or "", reading.reward_source)
        return [{**pair, **rejected} for pair in corrected_pairs(own, corrections, refused, agent_match=reading.agent_match)]

    selects = (reading.min_reward, reading.top_fraction, reading.best_of_group) != (None, None, None)
    return _of_spans(reading if selects else _filled(reading), traces, spans, adapt)


def attempts_as(reading: Reading) -> Reading:
    """Return the options by which its form takes attempts: demonstrations need no reward."""
    return _filled(reading) if reading.form == DEMONSTRATIONS else reading


def _filled(reading: Reading) -> Reading:
    return replace(reading, fill_reward=0.0 if reading.fill_reward is None else reading.fill_reward)


def _demonstrations(reading: Reading, traces: Traces, spans: Sequence[Span]) -> Rows:
    """Make conversations for OpenAI's fine-tuning that end with what reviewers say should have been answered; they need no reward."""

    def adapt(own: list[Span], refused: Counter[str]) -> Iterable[Row]:
        corrections = corrections_in(own, reading.rubric or "", reading.reward_source)
        refused.update({} if corrections else {"no_correction": 1})
        return conversations(corrected_messages(own, corrections, refused, agent_match=reading.agent_match), refused, by_call=True)

    return _of_spans(attempts_as(reading), traces, spans, adapt)


REASONS: Final = {
    **CHAT_REFUSALS,
    **CALL_REFUSALS,
    **ATTEMPT_REFUSALS,
    **LENGTH_REFUSALS,
    **SELECTION_REFUSALS,
    **PAIR_REFUSALS,
    "no_call_reward": "the call has no reward of its own (call_rewards)",
    "no_correction": "no feedback says what it should have answered",
    "filtered": "the filter left the row out",
    "unreadable_spans": "the adapters cannot read its spans",
}
"""Reasons in `Rows.refused`, in words."""
PAIR_FORMS: Final = frozenset({"dpo", "openai_dpo"})
"""The forms whose rows are made of two attempts."""

TOKEN_FORMS: Final = frozenset({"trajectories", "transitions", "sft", "dpo", "tinker"})
"""The forms made from columns of token ids."""

FORMS: Final[dict[str, Callable[[Reading, Traces, Sequence[Span]], Rows]]] = {
    "trajectories": _trajectories,
    "transitions": _trajectories,
    "messages": _messages,
    "triplets": _triplets,
    "sft": _sft,
    "dpo": _dpo,
    "tinker": _sft,
    "openai": _openai,
    "openai_dpo": _openai_dpo,
    DEMONSTRATIONS: _demonstrations,
}
"""{form: its conversion}."""
