"""What is particular to prompts in `agl-otel improve`: a search in each cycle, on tasks made of its attempts, and prompts in the set."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from agl_otel.adapters.traffic import is_validated_on, task_of
from agl_otel.algorithms.checked_files import file_digest, read_checked, with_checksum, write_json
from agl_otel.algorithms.prompts import PromptSearch
from agl_otel.algorithms.prompts.candidates import prompts_in
from agl_otel.errors import AglError, DataError, ModelServerError
from agl_otel.jobs.improve import Improvement
from agl_otel.jobs.improve_cycle import PROMPTS, CycleFolder
from agl_otel.jobs.improve_evidence import PAGE, Evidence, bounds_of, rewards_of
from agl_otel.jobs.production import PROMOTED, Production
from agl_otel.jobs.prompts import PromptSearchRun
from agl_otel.proxy.canary import prompts_for
from agl_otel.store import Store
from agl_otel.types import LLM, NamedResources, PromptTemplate, Span

Prompts = dict[str, PromptTemplate]


class PublishedPrompts(Production):
    """Prompts beside the job's LLM. A canary's have the names of prompts_for, and its LLM is the same one with a share.

    Args:
        llm: answers all users.
        store: a connected store.
        named: the set's id and owner, as for Production.
    """

    canary_stays: ClassVar[bool] = True
    limits_canary: ClassVar[bool] = False

    def __init__(self, llm: LLM, store: Store, **named: str) -> None:
        super().__init__(store, **named)
        self._llm = llm
        self._promoted: Prompts = {}
        self._made: Prompts = {}

    def _resources(self, canary: str, share: float) -> NamedResources:
        found: NamedResources = {**self._promoted, PROMOTED: self._llm}
        return {**found, canary: self._llm.model_copy(update={"share": share}), **prompts_for(canary, self._made)} if canary else found

    async def begin(self, promoted: Path, promotions: int) -> None:
        """Read the promoted prompts."""
        self._promoted = read_prompts(promoted)

    async def start_canary(self, made: Path) -> None:
        """Read the prompts that a cycle made."""
        self._made = read_prompts(made)

    async def promote(self, made: Path) -> None:
        """Publish the prompts that a cycle made as the promoted ones."""
        self._promoted = read_prompts(made)
        await self.publish()

    async def close(self) -> None:
        """Withdraw a canary that nobody would watch any more."""
        if self._canary:
            with contextlib.suppress(AglError):
                await self._publish()
        await super().close()


class PromptsImprovement(Improvement):
    """The loop over prompts."""

    while_away: ClassVar[str] = "users are answered on, by the promoted prompts"

    def _began_with(self) -> dict[str, Any]:
        return {"prompts": {name: prompt.template for name, prompt in prompts_in(self.job.resources).items()}}

    async def _prepare(self) -> Path:
        path = self.folder / PROMPTS
        if not path.exists():
            write_prompts(path, prompts_in(self.job.resources))
        return path

    def _production(self, **named: str) -> PublishedPrompts:
        (llm,) = (each for each in self.job.resources.values() if isinstance(each, LLM))
        return PublishedPrompts(llm, self._plain, **named)

    async def _learnt(self, cycle: CycleFolder) -> dict[str, Any]:
        tasks = await self._tasks(cycle)
        if not (tasks["train"] or tasks["val"]):  # users are content, or silent: there is nothing to learn
            return {"run": "", "weights": "", "refused": tasks["left_out"]}
        begun = read_prompts(self.promoted)
        job = self.job.model_copy(update={"resources": {**self.job.resources, **begun}})
        scores: dict[str, list[float | None]] = {}
        async with PromptSearchRun(job, self._plain, cycle.run, settings=self.settings, force=self.force) as run, run.runners():
            self._learns(run.run_id)
            search = await run.search(tasks["train"], tasks["val"], aside=True)
            if (found := search.get_best_prompts()) != begun:
                scores = {name: await self._score(run, name, prompts) for name, prompts in (("before", begun), ("after", found))}
        if scores:
            write_prompts(cycle.prompts, found)
        else:
            check_editor(search)
        return {
            "run": run.run_id,
            "weights": file_digest(cycle.prompts) if scores else "",
            "steps": len(search.history),
            "trajectories": len(tasks["train"]) + len(tasks["val"]),
            "refused": tasks["left_out"],
            "before": scores.get("before"),
            "after": scores.get("after"),
            "stopped_because": search.stopped_because,
            **search.spend.described(),
        }

    async def _score(self, run: PromptSearchRun, name: str, prompts: Prompts) -> list[float | None]:
        """Return the rewards of prompts on the held-out tasks; once for each name of a run."""
        resources = {**self.job.resources, **prompts}
        run.resources_id = f"{run.run_id}-{name}"
        if (now := await self._plain.resources(run.resources_id)) is None or now.resources != resources:
            await self._plain.publish(resources, resources_id=run.resources_id, aside=True)
        return (await run.evaluate(self.job.tasks("val"), run_id=run.run_id, name=name)).rewards

    async def _tasks(self, cycle: CycleFolder) -> dict[str, Any]:
        """Return the tasks of a cycle, which stay what they are when the search goes on after a kill, whatever feedback comes late."""
        if (known := cycle.read("tasks")) is not None:
            return known
        ids: list[str] = cycle.of("window")["rollout_ids"]
        rewards = await rewards_of(self._plain, ids, self._sources)
        best, worst = (bound(rewards.values(), default=0.0) for bound in (max, min))
        train, val, left_out = list[Any](), list[Any](), Counter[str]()
        match = self.job.options.get("agent_match")
        for start in range(0, len(ids), PAGE):
            of: dict[str, list[Span]] = {each: [] for each in ids[start : start + PAGE]}
            for span in await self._plain.spans(list(of)):
                of[span.rollout_id].append(span)
            for rollout_id, spans in of.items():
                is_best = rewards.get(rollout_id) == best > worst  # of equal rewards none says that a reply was right
                task = task_of(
                    spans, is_best=is_best, sources=self._sources or (), agent_match=None if isinstance(match, Mapping) else match
                )
                if isinstance(task, str):
                    left_out[task] += 1
                else:
                    (val if is_validated_on(task) else train).append(task)
        if bool(train) != bool(val):
            raise DataError(
                f"the window's {len(train) or len(val)} tasks are about too few questions: a search needs some to learn from and others to "
                "choose by; ask for more attempts of a cycle"
            )
        cycle.write("tasks", {"train": train, "val": val, "left_out": dict(left_out)})
        return cycle.of("tasks")

    async def _evidence(self, cycle: CycleFolder) -> Evidence:
        rewards = await rewards_of(self._plain, cycle.of("window")["rollout_ids"], self._sources)
        return Evidence(bounds_of(list(rewards.values())))


def read_prompts(path: Path) -> Prompts:
    """Return the prompts in a file. Raises DataError where it is damaged."""
    return {name: PromptTemplate.model_validate(each) for name, each in read_checked(path)["prompts"].items()}


def write_prompts(path: Path, prompts: Prompts) -> None:
    """Write prompts to a file."""
    write_json(path, with_checksum({"prompts": {name: prompt.model_dump() for name, prompt in prompts.items()}}))


def check_editor(search: PromptSearch) -> None:
    """Raise ModelServerError where a search ended without another prompt and its last call of the editor failed."""
    if search.editor.fails:
        spend = search.spend
        raise ModelServerError(f"{spend.editor_failures} of {spend.editor_calls} calls of the editor failed: {search.stopped_because}")
