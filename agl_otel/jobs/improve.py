"""`agl-otel improve`: from the traffic of a running product to better weights or prompts, and back.

A cycle has five stages: window (which rated attempts), update (learn from them), gate (what speaks against what was made), canary (a
share of the users gets it, then perhaps a greater one), verdict (promoted, or not). Each ends with a file in the cycle's folder and a
span in the store. A stage that has its file is not repeated; one that a kill interrupted is (a canary from the step that was under way),
and what it changes elsewhere can be done twice with the same result.
What a cycle made is promoted by a verdict alone, which holds the digests of the files it rests on.

What is particular to weights is in improve_weights.py, to prompts in improve_prompts.py.

    run.json, lock              the run's identity (algorithms/run_folder.py)
    policy, prompts.json        what it began with: the model, if that is `tiny`, or the job's prompts
    slots/a, slots/b            the model servers of production_weights.py
    cycles/0001                 improve_cycle.py
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

import numpy as np

from agl_otel.adapters.cycles import CANARY_STEP, IMPROVE, WAITS
from agl_otel.adapters.gates import LEAST_RATED, REFUSALS, Rated, Rules
from agl_otel.adapters.offpolicy import Estimate
from agl_otel.algorithms.checked_files import digest_of
from agl_otel.algorithms.offline import Offline
from agl_otel.algorithms.run_folder import Fingerprint, RunFolder, lock_run, run_id_of
from agl_otel.errors import AgentError, AglError, ConflictError, DataError, ModelServerError, SettingsError, TrainingError
from agl_otel.jobs.improve_canary import CanarySteps, judged_step, seen_step
from agl_otel.jobs.improve_cycle import CycleFolder, figures_of, step_figures
from agl_otel.jobs.improve_evidence import Evidence, arms_since, judged_update
from agl_otel.jobs.improve_options import NO_IMPROVE, SEARCHES
from agl_otel.jobs.improve_progress import TOLD_SECONDS, WAITS_FIRST, Progress, canary_waits, window_waits
from agl_otel.jobs.job import Job
from agl_otel.jobs.production import Production, patiently
from agl_otel.jobs.run import JobRun, unless_failed
from agl_otel.store import Store
from agl_otel.store.selections import MOST
from agl_otel.types import ADOPTED, AttemptedRollout, Rollout, TrainingStage, TrainingStep
from agl_otel.types.selections import Selected

POLL_SECONDS: Final = 1.0
KEPT_MODELS: Final = 2
"""The promoted weights, and those before."""
LARGE: Final = ("checkpoints", "weights", "rounds", "policy")
"""What of a training run is removed when its cycle has ended: its weights are in the cycle's `model`."""

_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Ended:
    """A cycle that has its verdict."""

    number: int
    verdict: str
    """promoted, rolled_back (after a canary), or refused (by the gate)."""
    why: list[str]
    """Keys of gates.REFUSALS."""
    ended: float
    """Unix seconds."""


def improvement_of(job: Job) -> type[Improvement]:
    """Return the class that improves by the algorithm of a job with [improve]."""
    if job.improve is None:
        raise SettingsError(NO_IMPROVE)
    if job.algorithm.get("name") in SEARCHES:
        return import_module("agl_otel.jobs.improve_prompts").PromptsImprovement
    return import_module("agl_otel.jobs.improve_weights").WeightsImprovement


class Improvement(JobRun):
    """The loop of a job with [improve] over a store. Use `async with`; a folder that already holds it resumes it.

    A subclass knows what is improved: how a cycle learns from its attempts, and how users are served.

    Args:
        job, store, folder, options: as for JobRun.
        on_event: receives a line for each thing that happens.
    """

    def __init__(self, job: Job, store: Store, folder: Path, *, on_event: Callable[[str], object] = lambda _: None, **options: Any) -> None:
        super().__init__(job, store, folder, **options)
        assert job.improve is not None, "improvement_of"
        self.spec = job.improve
        self._plain = store
        self._trains = self._algorithm
        self._algorithm = IMPROVE
        self._say = on_event
        self._progress = Progress("window", time.time(), WAITS_FIRST["window"])
        self._changed, self._telling = asyncio.Event(), asyncio.Lock()
        self._sources: list[str] | None = job.options.get("reward_sources", job.improve.reward_sources)

    # --- of a subclass

    while_away: ClassVar[str]
    """What users get while the command does not run, for people."""

    def _began_with(self) -> dict[str, Any]:
        """Return what the run began with, for its fingerprint."""
        raise NotImplementedError

    async def _prepare(self) -> Path:
        """Return the path of what the run began with."""
        raise NotImplementedError

    def _production(self, **named: str) -> Production:
        """Return what serves users; `named`: the id and the owner of its set, as Production has them."""
        raise NotImplementedError

    def _held_back(self, rollout_ids: Sequence[str], trusted: Collection[str]) -> list[str]:
        """Return which of the attempts that users rated are not learnt from; `trusted`: those with a trusted reward."""
        return []

    async def _learnt(self, cycle: CycleFolder) -> dict[str, Any]:
        """Learn from a window, from what is promoted, and score both on the held-out tasks; `weights` is a digest, empty without change."""
        raise NotImplementedError

    def _rules(self) -> Rules:
        """Return what the gate asks for."""
        drop = self.spec.max_drop if self.spec.trusted_sources else None
        return Rules(held_out=self.spec.held_out, backtest=self.spec.backtest, max_trusted_drop=drop)

    async def _evidence(self, cycle: CycleFolder) -> Evidence:
        """Return what the attempts of a cycle say of what it made."""
        raise NotImplementedError

    # --- the run

    async def _start(self) -> None:
        self._exit.callback((lock := lock_run(self.folder)).close)
        self._first = await self._prepare()
        options = {"job": digest_of(self.job.options), "algorithm": self._trains, **self._began_with()}
        made = Fingerprint.of(IMPROVE, options, self.job.policy.seed)
        self.run = RunFolder(self.folder, algorithm=made.algorithm, options=made.options, seed=made.seed, lock=lock)
        self.production = self._production(resources_id=self.settings.upstream_resources, owner=self.run_id)
        self._exit.push_async_callback(self.production.close)
        last, begun = CycleFolder(self.folder, len(self.ended)), CycleFolder(self.folder, len(self.ended) + 1)
        promoted = [each.number for each in self.ended if each.verdict == "promoted"]
        if promoted:
            await asyncio.to_thread(CycleFolder(self.folder, promoted[-1]).check_promotion)
        await self.production.own(force=self.force)
        await self.production.begin(self.promoted, len(promoted))
        if begun.read("gate") is None or not self.production.canary_stays:
            await self.production.publish()  # else a canary may be under way, and goes on
        if self.ended and last.read("recorded") is None:
            await self._finish(last)
        self.production.failed.add_done_callback(self._on_stack_failed)

    # --- what has been

    @property
    def ended(self) -> list[Ended]:
        """The cycles with a verdict, in order."""
        found: list[Ended] = []
        while (facts := CycleFolder(self.folder, len(found) + 1).read("verdict")) is not None:
            found.append(Ended(len(found) + 1, facts["verdict"], facts["why"], facts["ended"]))
        return found

    @property
    def promoted(self) -> Path:
        """The folder of the promoted weights, or the file of the promoted prompts."""
        last = next((each for each in reversed(self.ended) if each.verdict == "promoted"), None)
        return self._first if last is None else CycleFolder(self.folder, last.number).made

    def canary_of(self, cycle: CycleFolder) -> str:
        """Return the resource name of a cycle's canary: no other run's has the same."""
        return f"canary-{self.run_id.rpartition('-')[2]}-{cycle.number:04d}"

    # --- the loop

    async def improve(self, cycles: int | None = None) -> list[Ended]:
        """Run until so many cycles have a verdict (None: for ever); return all. Raises what a training run raises."""
        while cycles is None or len(self.ended) < cycles:
            await unless_failed(self.failed, self.cycle(CycleFolder(self.folder, len(self.ended) + 1)))
        return self.ended

    async def cycle(self, cycle: CycleFolder) -> Ended:
        """Run one cycle, or what is left of it."""
        window = await self._stage(cycle, "window", self._window)
        await self._stage(cycle, "update", self._update)
        gate = await self._stage(cycle, "gate", self._gate)
        why, canary = list(gate["why"]), None
        if not why:
            canary = await self._stage(cycle, "canary", self._canary)
            why = [canary["why"]] if canary["why"] else []
        verdict = "promoted" if not why else "refused" if canary is None else "rolled_back"
        facts = {"verdict": verdict, "why": why, "evidence": cycle.digests(), "before": window["version"]}
        now = time.time()
        cycle.write("verdict", {"began": now, **facts, "ended": now})
        if verdict == "promoted":
            await asyncio.to_thread(cycle.check_promotion)
            await self._told(cycle, "verdict", self.production.promote(cycle.made))
        else:
            await self.production.withdraw()
        await self._finish(cycle)
        return self.ended[-1]

    async def _stage(self, cycle: CycleFolder, name: str, work: Callable[[CycleFolder], Any]) -> dict[str, Any]:
        if (found := cycle.read(name)) is None:
            began = time.time()
            self._say(f"cycle {cycle.number}: {name} …")
            facts = await self._told(cycle, name, work(cycle))
            cycle.write(name, {"began": began, **facts, "ended": time.time()})
            found = cycle.of(name)
        if name == "canary" and found["why"]:
            await self.production.withdraw()  # before anything that may take long, as where no collector answers
        await self._record_stage(cycle, name, found, figures_of(name, found))  # also one that a kill kept from it
        return found

    async def _told(self, cycle: CycleFolder, name: str, work: Awaitable[T]) -> T:
        """Return the result of `work`, a stage, and tell meanwhile how far it is."""
        self._go_on(Progress(name, time.time(), WAITS_FIRST[name]))
        telling = asyncio.create_task(self._tell(cycle), name="telling")
        try:
            return await unless_failed(telling, work)
        finally:
            telling.cancel()
            await asyncio.wait({telling})
            _ = telling.cancelled() or telling.exception()  # another stage would raise it

    async def _tell(self, cycle: CycleFolder) -> None:
        """Record again and again how far the stage under way is. Raises ConflictError where another run has taken over."""
        while True:
            self._changed.clear()
            async with self._telling:
                told, progress = time.time(), self._progress
                figures = {**progress.figures, WAITS: progress.waits}
                try:
                    await self.production.current()
                    await self._plain.record_stage(self._span_of(cycle, progress.name, progress.began, told, figures))
                except ConflictError:
                    raise
                except AglError as error:  # what the stage itself does waits for the stack; to be told is worth no training
                    _log.warning("cycle %s cannot tell how far it is: %s", cycle.number, error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(progress.pause(told)):
                    await self._changed.wait()

    def _go_on(self, progress: Progress) -> None:
        """Tell of another stage, or step of a canary, from now on."""
        self._progress = progress
        self._changed.set()

    async def _window(self, cycle: CycleFolder) -> dict[str, Any]:
        """Wait for enough rated attempts, and store them as a selection, with those of cycles whose update failed."""
        taken, failed = set[str](), set[str]()
        for before in (CycleFolder(self.folder, number) for number in range(1, cycle.number)):
            (failed if before.of("update").get("error") else taken).update(before.of("window")["rollout_ids"])
        promotions = [each.ended for each in self.ended if each.verdict == "promoted"]
        changed = promotions[-self.spec.max_promotions - 1] if len(promotions) > self.spec.max_promotions else 0.0
        rated, watched = set[str](), set[str]()
        said, told = "", 0.0
        traffic = Offline(self._plain, self.job.options.get("offline_mode", ADOPTED), None)
        while True:
            began = time.monotonic()
            found = await self._patiently(lambda: traffic.rollouts(taken))
            oldest = time.time() - self.spec.window_seconds
            fresh = [each for each in found if each.start_time >= max(oldest, changed)]
            old = {"too_long_ago": sum(each.start_time < oldest for each in found)}
            old |= {"old_weights": len(found) - len(fresh) - old["too_long_ago"]}
            rated |= await self._rewarded(fresh, rated, self._sources)
            watched |= await self._rewarded(fresh, watched, self.spec.trusted_sources) if self.spec.trusted_sources else set()
            ids = [each.rollout_id for each in fresh if each.rollout_id in rated]
            learnt = set(ids) - set(self._held_back(ids, watched))
            known = rated | watched
            ready = [each for each in fresh if each.rollout_id in known][-MOST:]
            unseen = [each.rollout_id for each in ready if each.rollout_id not in learnt]
            missing = self.spec.trusted_rated - len(watched.intersection(unseen)) if self.spec.trusted_sources else 0
            new = sum(each not in failed for each in ids)
            if learnt and new >= self.spec.attempts and missing <= 0:
                break
            line = window_waits(seen=len(found), rated=new, wanted=self.spec.attempts, unrated=len(fresh) - len(ready), missing=missing)
            self._progress.waits, self._progress.figures = line, {"version": self.production.version}
            if time.time() - told > TOLD_SECONDS:
                if told and line != said:
                    self._say(f"cycle {cycle.number}: {line}")
                    said = line
                told = time.time()
            await asyncio.sleep(max(POLL_SECONDS, 10 * (time.monotonic() - began)))  # a long history is read more rarely
        made = {"by": f"improve {self.run_id}", "cycle": cycle.number, "sources": self._sources}
        selected = [_selected(each) for each in ready if each.rollout_id in learnt]
        kept = await self._patiently(lambda: self._plain.put_selection(self.run_id, selected, made))
        self._say(f"cycle {cycle.number}: {len(ready)} rated attempts ({kept.selection}); {len(fresh) - len(ready)} have no reward")
        return {
            "selection": kept.selection,
            "digest": kept.digest,
            "rollout_ids": [each.rollout_id for each in ready],
            "held_back": unseen,
            "version": self.production.version,
            "unrated": len(fresh) - len(ready),
            "too_old": old,
        }

    async def _rewarded(self, rollouts: Iterable[Rollout], known: Collection[str], sources: Collection[str] | None) -> set[str]:
        """Return which of the rollouts have a reward of these sources by now, without those that are known to have one."""
        unknown = [each.rollout_id for each in rollouts if each.rollout_id not in known]
        return await self._patiently(lambda: self._plain.rewarded(unknown, sources)) if unknown else set()

    async def _patiently(self, work: Callable[[], Awaitable[T]]) -> T:
        """Await `work()`, and begin it again where the stack was away, as while it is restarted."""
        return await patiently(work, lambda error: self._say(f"waiting for the stack: {error}"))

    async def _update(self, cycle: CycleFolder) -> dict[str, Any]:
        """Learn from the window; an error of agents, graders or models ends the cycle, and not the command."""
        window = cycle.of("window")
        if (await self._patiently(lambda: self._plain.selection(window["selection"]))).digest != window["digest"]:
            raise DataError(f"the selection {window['selection']} is not the one that cycle {cycle.number} began with")
        await self.production.settle()
        try:
            return await self._patiently(lambda: self._learnt(cycle))
        except (
            AgentError,
            DataError,
            ModelServerError,
            TrainingError,
        ) as error:  # the next window may be better
            self._say(f"cycle {cycle.number}: the update failed: {error}")
            return {"run": run_id_of(cycle.run, self._trains), "weights": "", "error": str(error)}

    def _learns(self, run_id: str) -> None:
        """Tell by which training run, or search, the update is made."""
        self._progress.waits, self._progress.figures = f"the run {run_id}", {"training_run": run_id}

    async def _gate(self, cycle: CycleFolder) -> dict[str, Any]:
        """Ask what speaks against what the cycle made."""
        update = cycle.of("update")
        if not update["weights"]:
            return {"why": ["update_failed" if update.get("error") else "no_new_weights"]}
        found = await self._patiently(lambda: self._evidence(cycle))
        gate = judged_update(self._rules(), before=update["before"], after=update["after"], found=found, first=self._first_rated())
        self._say(
            f"cycle {cycle.number}: held-out {gate['held_out']['before']:.3f} -> {gate['held_out']['after']:.3f}"
            + (f", drift {found.drift:.3f}, back-test {_told(found.backtest)}" if found.drift is not None else "")
            + (f", by trusted rewards {_told(found.trusted)}" if self.spec.trusted_sources else "")
        )
        return gate

    def _first_rated(self) -> Rated | None:
        """Return the attempts of the first cycle that had enough with both rewards."""
        for number in range(1, len(self.ended) + 1):
            gate = CycleFolder(self.folder, number).of("gate")
            if len((rated := gate.get("rated") or [[]])[0]) >= LEAST_RATED:
                return Rated(*(np.array(values, np.float64) for values in rated))
        return None

    async def _canary(self, cycle: CycleFolder) -> dict[str, Any]:
        """Let a share of the conversations be answered by what the cycle made until their users have judged it, then the next share."""
        found = cycle.read("canary_begun")
        steps = CanarySteps(self.spec.shares) if found is None else CanarySteps.of(found)
        await asyncio.to_thread(cycle.check_made)
        of_stage = self._progress
        await self.production.start_canary(cycle.made)
        while not steps.over:
            began = time.time()  # before it is published: what the canary takes from then on began in the step
            await self.production.publish(self.canary_of(cycle), steps.share)
            steps = steps.published(self.production.version, began)
            cycle.write("canary_begun", steps.as_json())
            self._say(f"cycle {cycle.number}: a canary of {steps.share:.0%} since {time.strftime('%H:%M:%S', time.localtime(steps.began))}")
            self._go_on(Progress(_name_of(steps), steps.began or began, "its first conversations"))
            step = await self._canary_step(cycle, steps)
            self._go_on(replace(of_stage, waits="what became of a share"))
            self._say(
                f"cycle {cycle.number}: canary of {step['share']:.0%}: {_mean(step['mean'])} of {step['rated']} "
                f"against {_mean(step['promoted_mean'])} of {step['promoted_rated']}"
            )
            if step["why"]:
                await self.production.withdraw()  # before it is told, which may take long
            await self._record_stage(cycle, _name_of(steps), step, step_figures(step))
            if step["why"]:
                return {"why": step["why"], "steps": [*steps.passed, step], "began": steps.since}
            steps = steps.after(step)
            cycle.write("canary_begun", steps.as_json())
        return {"why": "", "steps": steps.passed, "began": steps.since}

    async def _canary_step(self, cycle: CycleFolder, steps: CanarySteps) -> dict[str, Any]:
        """Wait until the users of the share that is published have judged."""
        began = steps.began
        assert began is not None, "it was published"
        canary, bounds, most = self.canary_of(cycle), tuple(cycle.of("gate")["bounds"]), self.spec.canary_most
        about: dict[str, Any] = {"step": began, "version": steps.version, "most": most}
        wait = self.spec.canary_wait_seconds if self.production.limits_canary else 0.0
        while True:
            looked = time.monotonic()
            arms = await self._patiently(lambda: arms_since(self._plain, canary, steps.since, self._sources, **about))
            await self._patiently(self.production.current)
            runs, over = await self.production.canary_answers(), arms.filled is not None and time.time() >= arms.filled + wait
            if (step := judged_step(self.spec, steps, arms, bounds=bounds, runs=runs, over=over)) is not None:
                return {**step, "ended": time.time()}
            self._progress.figures = step_figures(seen_step(steps, arms, bounds))
            self._progress.waits = canary_waits(arms, rated=self.spec.canary_rated, most=most, wait=wait)
            await asyncio.sleep(max(POLL_SECONDS, time.monotonic() - looked))

    async def _finish(self, cycle: CycleFolder) -> None:
        """Record a cycle that has its verdict, once, and remove what nothing needs any more."""
        verdict = cycle.of("verdict")
        await self._record_stage(cycle, "verdict", {**verdict, "ended": time.time()}, {"why": ", ".join(verdict["why"])})
        await self._record(cycle)
        cycle.write("recorded", {"version": self.production.version})
        kept = [each.number for each in self.ended if each.verdict == "promoted"][-KEPT_MODELS:]
        for number in range(1, cycle.number + 1):
            old = CycleFolder(self.folder, number)
            large = [old.run / name for name in LARGE] + ([] if number in kept else [old.model])
            for folder in large:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        ended = self.ended[-1]
        self._say(f"cycle {cycle.number}: {ended.verdict}" + "".join(f"; {name}: {REFUSALS[name]}" for name in ended.why))

    async def _record(self, cycle: CycleFolder) -> None:
        """Record the cycle as a step of the run, linked to its attempts."""
        verdict, window, update = (cycle.of(stage) for stage in ("verdict", "window", "update"))
        step = TrainingStep(
            run_id=self.run_id,
            algorithm=IMPROVE,
            step=cycle.number,
            resources_id=self.settings.upstream_resources,
            version_before=verdict["before"],
            version_after=self.production.version,
            samples=update.get("trajectories", 0),
            refused=sum(update.get("refused", {}).values()),
            start_time=window["began"],
            end_time=verdict["ended"],
            metrics=cycle.metrics(),
            attempts=[(rollout_id, "") for rollout_id in window["rollout_ids"]],
        )
        await self._patiently(lambda: self._plain.record_step(step))

    async def _record_stage(self, cycle: CycleFolder, name: str, facts: dict[str, Any], figures: dict[str, Any]) -> None:
        """Record a stage, or a step of a canary, that has ended as a span below the cycle's: so the history shows a cycle under way."""
        async with self._telling:  # else what was told of it before might count
            stage = self._span_of(cycle, name, facts["began"], facts["ended"], figures)
            await self._patiently(lambda: self._plain.record_stage(stage))

    def _span_of(self, cycle: CycleFolder, name: str, began: float, ended: float, figures: dict[str, Any]) -> TrainingStage:
        return TrainingStage(
            run_id=self.run_id,
            algorithm=IMPROVE,
            step=cycle.number,
            name=name,
            resources_id=self.settings.upstream_resources,
            start_time=began,
            end_time=ended,
            metrics=figures,
        )


def _name_of(steps: CanarySteps) -> str:
    """Return the name of the stage that is a canary's step under way."""
    return f"{CANARY_STEP}{len(steps.passed) + 1}"


def _selected(rollout: Rollout | AttemptedRollout) -> Selected:
    attempt = rollout.attempt.attempt_id if isinstance(rollout, AttemptedRollout) else ""
    return Selected(rollout_id=rollout.rollout_id, attempt_id=attempt)


def _told(found: Estimate | None) -> str:
    if found is None:
        return "no attempt counts"
    said = ", ".join(found.doubts) if found.verdict == "cannot_tell" else found.verdict
    return f"{found.gain.value:+.3f} [{found.gain.low:+.3f}, {found.gain.high:+.3f}] ({said.replace('_', ' ')})"


def _mean(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"
