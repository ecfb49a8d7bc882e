"""Judge attempts: a model reads what attempts said, under a rubric, and its verdicts are stored as feedback.

What was judged is in the store alone: feedback has an id that is made of attempt, rubric, model, prompt and what the model was shown, so a
run that was killed goes on where it was, and asks again only what was in flight, and what has gone on since.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from agl_otel.adapters.judging import (
    Judged,
    UnreadableAnswerError,
    Verdict,
    again,
    conversations_of,
    digest_of,
    feedback_id,
    judged_in,
    prompt_of,
    read_answer,
)
from agl_otel.errors import AglError, ModelServerError
from agl_otel.jobs.model_client import BoundError, ModelClient, PromptRefusedError
from agl_otel.queue.lifecycle import FINISHED
from agl_otel.spans.dialects.dialect import Message
from agl_otel.spans.tolerant import MALFORMED
from agl_otel.store import Store
from agl_otel.traces.reviews import read_known_feedback, read_span_counts
from agl_otel.types import AttemptedRollout, RolloutMode, Span, is_trial
from agl_otel.types.columns import AttemptKey
from agl_otel.types.feedback import EARLIEST_SECONDS, Feedback
from agl_otel.types.reviews import JUDGE, Rubric, Took
from agl_otel.types.spans import by_attempt

LISTED: Final = 500  # rollouts in a page of the queue, and in a query for what is judged
READ: Final = 32  # attempts whose spans are in memory at a time
LONGEST_PROMPT: Final = 400_000  # characters
REFUSED_IN_A_ROW: Final = 5
"""So many prompts that the server refuses, one after the other, end a run: then it is not the prompts."""
_SOON: Final = 1e-6
"""Seconds after the attempt's end, for each second that has passed since, at which a verdict counts as given."""


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Which attempts are to be judged: the latest of each rollout that has ended, trials only by their ids."""

    rollout_ids: Sequence[str] = ()
    """They are judged in this order; empty: all, the latest first."""
    modes: Sequence[RolloutMode] = ()
    run: str | None = None
    since: float | None = None
    """Unix seconds of the earliest end."""


class Target(NamedTuple):
    """An attempt to judge."""

    rollout_id: str
    attempt_id: str
    end: float | None
    """Unix seconds."""
    shown: Judged = Judged(0, "")
    """What the judge is shown, its digest as far as it has been read."""
    before: frozenset[str] = frozenset()
    """The digests of what it has judged before: there are spans since."""


class Pending(NamedTuple):
    """Attempts to judge, in the order of Chosen.rollout_ids."""

    attempts: list[Target]
    known: int
    """How many of those that were chosen have been judged."""


@dataclass
class Outcome:
    """What a run did."""

    labels: Counter[str] = field(default_factory=Counter[str])
    refused: Counter[str] = field(default_factory=Counter[str])
    """Attempts without a verdict, by the reason (REFUSALS)."""
    unchanged: int = 0
    """Attempts with spans since they were judged, but the same conversations."""
    examples: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    """{reason: (rollout, what happened), of the first}."""
    stopped: str = ""
    """Why it ended before all were judged."""
    error: AglError | None = None
    """If it failed: what was judged before is stored."""
    not_stored: list[Target] = field(default_factory=list[Target])
    """Those whose prompts the server has refused since its last answer."""

    @property
    def is_over(self) -> bool:
        """Whether no further attempt is to be judged."""
        return bool(self.stopped or self.error)

    @property
    def judged(self) -> int:
        """How many attempts got a verdict."""
        return self.labels.total()


UNCHANGED: Final = "unchanged"
"""In place of a prompt: the attempt has been judged as it is."""
REFUSALS: Final = {
    "unreadable": "the judge answered twice with something else than a label of the rubric and a reason; --retry-refused asks again",
    "too_long": f"the prompt would have more than {LONGEST_PROMPT:,} characters",
    "no_conversation": "no model call with messages was captured",
    "unread_spans": "the messages of the spans cannot be read",
    "refused_by_server": "the model server refused the prompt; --retry-refused asks again",
}
"""{reason why an attempt got no verdict: its text}."""


class Judge:
    """Judges attempts under one version of a rubric, by one model."""

    def __init__(self, store: Store, rubric: Rubric, model: str) -> None:
        self._store = store
        self.rubric = rubric
        self._model = model

    @property
    def source(self) -> str:
        """The source of its feedback."""
        return JUDGE + self._model

    async def begin(self, call: str, most: tuple[int, int]) -> None:
        """Store a call of its model before it is made; see Journal."""
        await self._store.add_judge_call(self.source, self.rubric.rubric, call, most, ended=False)

    async def end(self, call: str, tokens: tuple[int, int]) -> None:
        """Store what the call took."""
        await self._store.add_judge_call(self.source, self.rubric.rubric, call, tokens, ended=True)

    async def spent(self) -> Took:
        """Return what all of its runs have spent by now, under this version of the rubric."""
        return await self._store.judge_spend(self.source, self.rubric.rubric)

    async def pending(self, chosen: Chosen, *, retry_refused: bool = False) -> Pending:
        """Return the attempts that it has not judged yet, or that have spans since; `retry_refused`: and those without a verdict."""
        await self._store.open()
        await self._store.reader.barrier()
        found, known = list[Target](), 0
        kinds = ("judge",) if retry_refused else ("judge", "refused")
        listed = {each.rollout_id: each async for each in _ended(self._store, chosen)}
        rollouts = [listed[each] for each in dict.fromkeys(chosen.rollout_ids) if each in listed] or list(listed.values())
        for start in range(0, len(rollouts), LISTED):
            page = rollouts[start : start + LISTED]
            left = await self._without_known(page, kinds)
            found += left
            known += len(page) - len(left)
        return Pending(found, known)

    async def _without_known(self, page: Sequence[Target], kinds: Sequence[str]) -> list[Target]:
        """Return the attempts that have no feedback of these kinds, or spans since, with what they have."""
        rollouts = [each.rollout_id for each in page]
        ids = {self._id(each, kind): each[:2] for each in page for kind in kinds}
        before: dict[AttemptKey, list[Judged]] = {}
        for given in await read_known_feedback(self._store.reader, rollouts, list(ids)):
            before.setdefault(ids[given.partition(".")[0]], []).append(judged_in(given))
        spans = await read_span_counts(self._store.reader, rollouts)
        left: list[Target] = []
        for each in page:
            count, known = spans.get(each[:2], 0), before.get(each[:2], [])
            if not known or count > max(one.spans for one in known):
                left.append(each._replace(shown=Judged(count, ""), before=frozenset(one.digest for one in known)))
        return left

    async def prompts(self, attempts: Sequence[Target]) -> AsyncGenerator[tuple[Target, list[Message] | str]]:
        """Iterate over attempts, each with its prompt, or with the reason (REFUSALS, UNCHANGED) why it has none."""
        for start in range(0, len(attempts), READ):
            page = attempts[start : start + READ]
            spans = by_attempt(await self._store.spans([each.rollout_id for each in page]))
            for each in page:
                prompt = await asyncio.to_thread(self._prompt, spans.get(each[:2], []))
                digest = "" if isinstance(prompt, str) else digest_of(prompt)
                yield each._replace(shown=each.shown._replace(digest=digest)), UNCHANGED if digest in each.before else prompt

    async def run(self, attempts: Sequence[Target], model: ModelClient, *, limit: int | None, at_once: int) -> Outcome:
        """Judge at most `limit` of the attempts, `at_once` at a time, until a bound is reached or the model server fails; calls in flight
        then end. Attempts without a prompt do not count."""
        outcome, room, asked = Outcome(), asyncio.Semaphore(at_once), 0

        async def judge(target: Target, prompt: list[Message]) -> None:
            try:
                await self._judge(target, prompt, model, outcome)
            finally:
                room.release()

        async with asyncio.TaskGroup() as group:
            try:
                async for target, prompt in self.prompts(attempts):
                    if prompt == UNCHANGED:
                        outcome.unchanged += 1
                        continue
                    if isinstance(prompt, str):
                        _refuse(outcome, prompt, target, REFUSALS[prompt])
                        continue
                    await room.acquire()
                    if asked == limit and not outcome.is_over:
                        outcome.stopped = f"--limit {limit} is reached"
                    if outcome.is_over:
                        break
                    asked += 1
                    group.create_task(judge(target, prompt))
            except AglError as error:  # of the store; what is in flight ends
                outcome.error = outcome.error or error
        return outcome

    async def _judge(self, target: Target, prompt: list[Message], model: ModelClient, outcome: Outcome) -> None:
        try:
            verdict = await self._verdict(prompt, model)
            refused, outcome.not_stored = outcome.not_stored, []
            for each in refused:
                await self._store.add_feedback(self._feedback(each, "the model server refused the prompt"))
            await self._store.add_feedback(self._feedback(target, verdict))
        except BoundError as error:
            outcome.stopped = str(error)
        except PromptRefusedError as error:
            _refuse(outcome, "refused_by_server", target, str(error))
            outcome.not_stored.append(target)
            if len(outcome.not_stored) >= REFUSED_IN_A_ROW:
                outcome.error = ModelServerError(f"{REFUSED_IN_A_ROW} prompts were refused one after the other, the last one: {error}")
        except AglError as error:
            outcome.error = error
        else:
            if isinstance(verdict, Verdict):
                outcome.labels[verdict.label.label] += 1
            else:
                _refuse(outcome, "unreadable", target, verdict)

    async def _verdict(self, prompt: list[Message], model: ModelClient) -> Verdict | str:
        """Return the model's verdict, or what is wrong with its second answer."""
        answer = await model.answer(prompt)
        try:
            return read_answer(answer, self.rubric)
        except UnreadableAnswerError as error:
            asked = again(prompt, answer, str(error))
        try:
            return read_answer(await model.answer(asked), self.rubric)
        except UnreadableAnswerError as error:
            return str(error)

    def _prompt(self, spans: Sequence[Span]) -> list[Message] | str:
        try:
            shown = conversations_of(spans)
        except MALFORMED:
            return "unread_spans"
        prompt = prompt_of(self.rubric, shown)
        if not shown:
            return "no_conversation"
        return "too_long" if sum(len(each["content"]) for each in prompt) > LONGEST_PROMPT else prompt

    def _feedback(self, target: Target, verdict: Verdict | str) -> Feedback:
        given = {
            "rollout_id": target.rollout_id,
            "attempt_id": target.attempt_id,
            "source": self.source,
            "rubric": self.rubric.rubric,
            "time": _time_of(target, time.time()),
        }
        if isinstance(verdict, str):
            return Feedback.of(
                {**given, "id": self._id(target, "refused", target.shown), "text": f"no verdict: {verdict}"}, "a judge's refusal"
            )
        label = {"label": verdict.label.label, "value": verdict.label.value}
        return Feedback.of({**given, **label, "id": self._id(target, "judge", target.shown), "text": verdict.reason}, "a judge's verdict")

    def _id(self, target: Target, kind: str, shown: Judged | None = None) -> str:
        return feedback_id(target[:2], self.rubric.rubric, self._model, shown, kind=kind)


async def _ended(store: Store, chosen: Chosen) -> AsyncGenerator[Target]:
    """Iterate over the attempts that are chosen, the one whose rollout ended last first."""
    named = list(dict.fromkeys(chosen.rollout_ids))
    offset = 0
    while True:
        page = await store.queue.query_rollouts(
            status_in=sorted(FINISHED), rollout_id_in=named or None, mode_in=list(chosen.modes) or None, run=chosen.run,
            sort_by="end_time", sort_order="desc", limit=LISTED, offset=offset,
        )  # fmt: skip
        for each in page:
            if chosen.since is not None and (each.end_time or 0.0) < chosen.since:
                return
            if isinstance(each, AttemptedRollout) and (named or not is_trial(each)):
                yield Target(each.rollout_id, each.attempt.attempt_id, each.attempt.end_time or each.end_time)
        if len(page) < LISTED:
            return
        offset += len(page)


def _time_of(target: Target, now: float) -> float | None:
    """Return when a verdict counts as given: right after the attempt's end, later verdicts a bit later. When it is given is stored beside.

    Of several rewards the last counts: so what people say of an attempt counts more than a judge, whoever came first.
    """
    end = target.end
    return end + (now - end) * _SOON if end is not None and EARLIEST_SECONDS <= end < now else None


def _refuse(outcome: Outcome, reason: str, target: Target, why: str) -> None:
    outcome.refused[reason] += 1
    outcome.examples.setdefault(reason, (target.rollout_id, why))
