"""Score candidates by rollouts: publish, enqueue, wait, read the rewards; and format rollouts as samples for the editor."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from agl_otel.adapters import TraceAdapter
from agl_otel.adapters.messages import without_others
from agl_otel.algorithms.grpo.groups import cancel_if_exists, requeue_failed
from agl_otel.algorithms.prompts.candidates import Candidate, prompts_in
from agl_otel.algorithms.prompts.editor import SearchOverError, Spend
from agl_otel.algorithms.prompts.journal import Journal, digest_of
from agl_otel.algorithms.report import final_rewards
from agl_otel.algorithms.utils import check_disk, failure_summary
from agl_otel.errors import DataError
from agl_otel.store import Store
from agl_otel.types import EnqueueRolloutRequest, NamedResources, RolloutConfig, RolloutMode, Span
from agl_otel.types.scores import Score, counted

SHOWN_CHARACTERS: Final = 8000  # limit on the messages, and on the spans, of one rollout in a prompt
NO_MESSAGES: Final = "(no messages were captured of this rollout)"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evaluation:
    """The results of a candidate on some tasks."""

    rollout_ids: list[str]
    """In the order of the tasks."""
    statuses: list[str | None]
    """None: not finished in time."""
    rewards: list[float | None]
    """The primary reward of the latest attempt; None where there is none, or the rollout did not succeed."""

    @property
    def score(self) -> float:
        """The score of all rollouts; those that did not finish have no reward."""
        return Score.of(self.rewards).mean

    @property
    def per_task(self) -> list[float]:
        """The reward for each task; 0 where there is none."""
        return counted(self.rewards)


@dataclass(frozen=True)
class Evaluator:
    """Runs candidates over one store; evaluations in the journal are not repeated."""

    store: Store
    journal: Journal
    adapter: TraceAdapter[Any]
    resources: NamedResources
    """The initial resources, in which the candidate's prompts are replaced."""
    spend: Spend
    timeout_seconds: float
    max_rollouts: int | None = None
    config: RolloutConfig | None = None
    since_step: list[Evaluation] = field(default_factory=list[Evaluation])
    """Evaluations of the current step."""

    async def evaluate(self, step: str, candidate: Candidate, tasks: Sequence[Any], mode: RolloutMode) -> Evaluation:
        """Run the candidate on each task; `step` and the candidate's version are the name in the journal.

        Raises SearchOverError where the limit allows fewer rollouts, DataError where all rollouts of the initial candidate failed without a
        reward. Such an evaluation is not journaled, so a resumed run repeats it.
        """
        self.require(len(tasks))
        self.spend.rollouts += len(tasks)
        name, digest = f"{step}/{candidate.version}", digest_of(dict(candidate.templates), list(tasks), mode)
        if (known := self.journal.find(name, digest)) is not None:
            self.since_step.append(Evaluation(**known))
            return self.since_step[-1]
        resources_id = await self._publish(candidate)
        metadata = {"run": self.journal.run_id, "step": step, "candidate": candidate.version}
        requests = [
            EnqueueRolloutRequest(input=task, mode=mode, resources_id=resources_id, config=self.config, metadata=metadata) for task in tasks
        ]
        rollouts = await self.store.enqueue(requests, idempotency_key=f"{self.journal.run_id}/{name}/{digest}")
        await requeue_failed(self.store, rollouts)
        evaluation = await self._result([rollout.rollout_id for rollout in rollouts], candidate)
        self.journal.note(name, digest, asdict(evaluation))
        self.since_step.append(evaluation)
        return evaluation

    def require(self, rollouts: int) -> None:
        """Raise SearchOverError where the limit does not allow this many more rollouts."""
        if self.max_rollouts is not None and self.spend.rollouts + rollouts > self.max_rollouts:
            raise SearchOverError(f"max_rollouts = {self.max_rollouts} do not allow {rollouts} more after {self.spend.rollouts}")

    async def publish(self, candidate: Candidate, *, aside: bool = False) -> None:
        """Publish the candidate, unless `aside` as the latest resources, which rollouts without a `resources_id` use."""
        await self.store.publish(self._resources_of(candidate), resources_id=self.resources_id(candidate), aside=aside)

    async def samples(
        self, evaluation: Evaluation, tasks: Sequence[Any], places: Sequence[int], *, agents: str | None = None
    ) -> list[dict[str, Any]]:
        """Format the rollouts at `places` as values for a prompt file: number, status, reward, task, messages, spans.

        `agents`: a regular expression for the names of the agents whose model calls are shown; None: the adapter's.
        """
        adapter: Any = copy.copy(self.adapter)
        if agents is not None:
            adapter.agent_match = agents
        shown: str | None = getattr(adapter, "agent_match", None)
        ids = [evaluation.rollout_ids[place] for place in places]
        spans: dict[str, list[Span]] = {rollout_id: [] for rollout_id in ids}
        for span in await self.store.spans(ids) if ids else []:
            spans[span.rollout_id].append(span)
        messages = {rollout_id: _messages(adapter, own) for rollout_id, own in spans.items()}
        if empty := [rollout_id for rollout_id, text in messages.items() if not text]:
            _log.warning(
                "%s found no messages in %d of %d rollouts for the editor: %s. Does their agent call its model through the proxy, or under "
                "an instrumentation that captures content%s?",
                type(adapter).__name__, len(empty), len(ids), ", ".join(empty), f", and is its name matched by {shown!r}" if shown else "",
            )  # fmt: skip
        return [
            {
                "number": number,
                "status": evaluation.statuses[place] or "unfinished",
                "reward": "none" if (reward := evaluation.rewards[place]) is None else f"{reward:g}",
                "task": _cut("Task: " + _text(tasks[place])),
                "messages": _cut(messages[rollout_id] or NO_MESSAGES),
                "spans": _cut("\n".join(map(_shown, without_others(spans[rollout_id], shown)))),
            }
            for number, (place, rollout_id) in enumerate(zip(places, ids, strict=True), start=1)
        ]

    def resources_id(self, candidate: Candidate) -> str:
        """Return the id of the resources of the candidate's rollouts."""
        return f"{self.journal.run_id}-{candidate.version}"

    def _resources_of(self, candidate: Candidate) -> NamedResources:
        prompts = prompts_in(self.resources)
        changed = {name: prompts[name].model_copy(update={"template": text}) for name, text in candidate.templates.items()}
        return {**self.resources, **changed}

    async def _publish(self, candidate: Candidate) -> str:
        """Store the candidate's resources unless they are stored already: rollouts from before a stop may still read them."""
        resources_id, wanted = self.resources_id(candidate), self._resources_of(candidate)
        known = await self.store.resources(resources_id)
        if known is None or known.resources != wanted:
            await self.store.publish(wanted, resources_id=resources_id, aside=True)
        return resources_id

    async def _result(self, rollout_ids: list[str], candidate: Candidate) -> Evaluation:
        finished = await self.store.wait(rollout_ids, timeout_seconds=self.timeout_seconds)
        check_disk(finished)
        status = {rollout.rollout_id: str(rollout.status) for rollout in finished}
        for rollout_id in rollout_ids:
            if rollout_id not in status:
                _log.warning(
                    "rollout %s has not finished within %g s, or was deleted: it is cancelled and counts as 0",
                    rollout_id,
                    self.timeout_seconds,
                )
                await cancel_if_exists(self.store, rollout_id)
        rewards = final_rewards(await self.store.traces(finished)) if finished else {}
        if rollout_ids and not rewards:
            problem = f"none of the {len(rollout_ids)} rollouts of candidate {candidate.version} has a reward: "
            problem += failure_summary(finished) or ("agents and graders gave none" if finished else "none has finished")
            if not candidate.parents and "succeeded" not in status.values():
                raise DataError(f"{problem}. Make the agent work with the prompts that the search begins with, and start the run again")
            _log.warning("%s; it counts 0", problem)
        return Evaluation(
            rollout_ids,
            [status.get(one) for one in rollout_ids],
            [rewards.get(one) if status.get(one) == "succeeded" else None for one in rollout_ids],
        )


def _messages(adapter: TraceAdapter[Any], spans: Sequence[Span]) -> str:
    try:
        conversations: list[dict[str, Any]] = adapter.adapt(spans) if spans else []
    except (DataError, ValueError) as error:
        return f"(the messages cannot be read: {error})"
    return "\n\n".join("\n".join(_line(message) for message in each["messages"]) for each in conversations)


def _shown(span: Span) -> str:
    return f"{span.name}: {json.dumps(span.attributes, default=str)}"


def _line(message: Mapping[str, Any]) -> str:
    content, calls = message.get("content"), message.get("tool_calls")
    return f"{message.get('role')}: {_text(content) if content is not None else ''}{_text(calls) if calls else ''}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]} … ({len(text) - SHOWN_CHARACTERS} characters more)"
