"""Trainer.fit and dev with agents as users write them, in threads of this process over one real stack."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace

import agl_otel as agl
from agl_otel.errors import UsageError
from agl_otel.jobs.check import CheckReport, check_job
from agl_otel.store import InMemoryLightningStore, LightningStore
from agl_otel.types import RUN_LABEL
from agl_otel_hook import conventions
from tests.contract.collector.stack import until
from tests.contract.store.test_export import span_of


@pytest.fixture(scope="module")
def store() -> Iterator[LightningStore]:
    made = InMemoryLightningStore()
    yield made
    asyncio.run(made.close())


def rewards(store: LightningStore) -> dict[Any, list[float]]:
    """{input: rewards stored} of everything that has succeeded."""

    async def read() -> dict[Any, list[float]]:
        found: dict[Any, list[float]] = {}
        for rollout in await store.query_rollouts(status=["succeeded"]):
            spans = list(await store.query_spans(rollout.rollout_id))
            found[rollout.input] = [value for span in agl.find_reward_spans(spans) if (value := agl.get_reward_value(span)) is not None]
        return found

    return asyncio.run(read())


def trained(store: LightningStore, **given: Any) -> agl.Trainer:
    return agl.Trainer(store=store, strategy="shm", tracer=agl.OtelTracer(), **given)


def test_two_runs_at_once_on_one_stack_have_runners_of_their_own(store: LightningStore) -> None:
    seen: dict[str, set[str]] = {"one": set(), "two": set()}

    def run(name: str) -> None:
        def agent(task: str) -> float:
            seen[name].add(task.split()[0])
            return 1.0

        trained(store, algorithm=agl.Baseline(polling_interval=0.2), n_runners=2).fit(agent, [f"{name} {n}" for n in range(10)])

    threads = [threading.Thread(target=run, args=(name,)) for name in seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"one": {"one"}, "two": {"two"}}


def test_a_run_that_goes_on_owns_the_rollouts_of_its_earlier_attempts(store: LightningStore, tmp_path: Path) -> None:
    owned: list[dict[str, str] | None] = []

    @agl.algo
    async def enqueues(*, store: LightningStore, train_dataset: list[str]) -> None:
        (rollout,) = await store.wait([(await store.enqueue_rollout(task)).rollout_id for task in train_dataset])
        owned.append(rollout.labels)

    for _ in range(2):
        trained(store, algorithm=enqueues, run_dir=tmp_path / "run").fit(lambda task: 1.0, ["owned"])
    run_id = json.loads((tmp_path / "run" / "run.json").read_text())["run_id"]
    assert owned == [{RUN_LABEL: run_id}] * 2


def test_runners_take_what_others_enqueue_while_no_run_owns_it(store: LightningStore) -> None:
    """A function of the user's own, over a store that it did not get from the trainer."""

    @agl.algo
    async def enqueues(train_dataset: list[str]) -> None:
        (ended,) = await store.wait_for_rollouts([(await store.enqueue_rollout(train_dataset[0])).rollout_id])
        assert ended.status == "succeeded"

    trained(store, algorithm=enqueues).fit(lambda task: 1.0, ["of no run"])


def test_dev_runs_a_plain_function_on_each_task(store: LightningStore) -> None:
    def agent(task: str) -> float:
        async def inside() -> float:
            return float(len(task))

        return asyncio.run(inside())  # a sync agent has a thread, and so a loop, of its own

    trained(store).dev(agent, dev_dataset=["a", "bb"])
    found = rewards(store)
    assert (found["a"], found["bb"]) == ([1.0], [2.0])


def test_baseline_goes_through_both_data_sets_and_tells_what_came_of_each(store: LightningStore, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[tuple[str, str | None]] = []

    @agl.rollout
    def agent(task: str, prompt_template: agl.PromptTemplate, rollout: agl.AttemptedRollout) -> float:
        seen.append((task, rollout.mode))
        if task == "broken":
            raise RuntimeError("no answer")
        return float(prompt_template.format(q=task) == f"<{task}>")

    baseline = agl.Baseline(n_epochs=2, max_queue_length=0, polling_interval=0.2, span_verbosity="key_values")
    template = agl.PromptTemplate(template="<{q}>", engine="f-string")
    with caplog.at_level(logging.INFO, logger="agl_otel.algorithms.fast"):
        trained(store, algorithm=baseline, n_runners=2, initial_resources={"p": template}).dev(agent, ["t1", "broken"], val_dataset=["v1"])
    assert sorted(seen) == sorted([("t1", "train"), ("broken", "train"), ("v1", "val")] * 2)
    told = [record.getMessage() for record in caplog.records if record.name == "agl_otel.algorithms.fast"]
    assert sum("succeeded, mode train" in line and "final reward: 1.0" in line for line in told) == 2
    assert sum("succeeded, mode val" in line for line in told) == 2
    assert sum("attempt 1: failed (RuntimeError: no answer)" in line for line in told) == 2, told
    assert any("agentlightning.reward.0.value': 1.0" in line for line in told) and any("adapted: " in line for line in told)
    resources = asyncio.run(store.get_resources_by_id("default"))
    assert resources is not None and resources.resources == {"p": template}
    with pytest.raises(ValueError, match="greater than 0 and less than 1"):
        agl.Baseline(train_split=1.0)


def test_a_baseline_that_is_kept_goes_on_and_runs_nothing_twice(store: LightningStore, tmp_path: Path) -> None:
    """As if it had been killed after two of three tasks: the third was not asked for, or had failed."""
    seen: list[str] = []

    def agent(task: str) -> float:
        seen.append(task)
        if task == "bad" and seen.count("bad") == 1:
            raise RuntimeError("no answer")
        return 0.5

    def run(tasks: list[str]) -> agl.Baseline:
        baseline = agl.Baseline(polling_interval=0.2)
        trained(store, algorithm=baseline, run_dir=tmp_path / "run").fit(agent, tasks)
        return baseline

    first = run(["good", "bad"])
    assert sorted(played.status for played in first.ended) == ["failed", "succeeded"]
    assert first.scored()["train"].described() == "0.250 on 2 tasks (1 without a reward counts as 0)"
    again = run(["good", "bad"])
    assert seen == ["good", "bad", "bad"] and [played.status for played in again.ended] == ["succeeded", "succeeded"]
    assert {played.rollout_id for played in first.ended} == {played.rollout_id for played in again.ended}
    told = json.loads((tmp_path / "run" / "run.json").read_text())
    (line,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert told["algorithm"] == "baseline" and (line["rollouts"], line["succeeded"], line["score.train"]) == (2, 2, 0.5)
    with pytest.raises(UsageError, match="was begun with another tasks"):
        run(["good"])

    async def steps() -> list[agl.TrainingStep]:
        found = await store.training_steps(told["run_id"])
        (listed,) = await store.queue.query_runs(told["run_id"])
        assert (listed.rollouts, listed.last_step) == (2, 1), "its rollouts are listed as the run's"
        return found

    assert [(step.step, step.samples, len(step.attempts)) for step in asyncio.run(steps())] == [(1, 2, 2)]


def test_an_algorithm_of_ones_own_has_a_run_that_is_kept_too(store: LightningStore, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []

    @agl.algo
    def mine(run_folder: Any) -> None:
        done = run_folder.metrics(None)
        run_folder.metric({"step": len(done) + 1})
        told.append((run_folder.run_id, run_folder.seed, len(done)))

    for _ in range(2):
        trained(store, algorithm=mine, run_dir=tmp_path / "run").fit(len)
    (first, second) = told
    assert first[:2] == second[:2] and (first[2], second[2]) == (0, 1)
    assert first[0].startswith("mine-") and mine.get_run_folder() is None
    with pytest.raises(UsageError, match="was begun with another train"):
        trained(store, algorithm=mine, run_dir=tmp_path / "run").fit(len, ["a task"])


def test_how_a_run_ended_is_recorded(store: LightningStore, tmp_path: Path) -> None:
    def outcome(run_dir: Path) -> tuple[str, str]:
        async def read() -> tuple[str, str]:
            (run,) = await store.training_runs(run_id=json.loads((run_dir / "run.json").read_text())["run_id"])
            return run.algorithm, run.outcome

        return asyncio.run(read())

    seen: list[tuple[str, str]] = []

    @agl.algo
    def mine(run_folder: Any) -> None:
        seen.append(outcome(run_folder.folder))
        if len(seen) == 1:
            raise RuntimeError("no answer")

    with pytest.raises(RuntimeError, match="no answer"):
        trained(store, algorithm=mine, run_dir=tmp_path / "mine").fit(len)
    assert outcome(tmp_path / "mine") == ("mine", "error: RuntimeError: no answer")
    trained(store, algorithm=mine, run_dir=tmp_path / "mine").fit(len)
    assert outcome(tmp_path / "mine") == ("mine", "finished") and seen == [("mine", "")] * 2

    async def cancelled() -> None:
        baseline = agl.Baseline(run_dir=tmp_path / "baseline")
        baseline.set_store(store)
        baseline.set_adapter(adapter := agl.TracerTraceToTriplet())
        running = asyncio.ensure_future(baseline.run(["of the baseline"]))
        await until(lambda: store.query_rollouts(status=["queuing"]), lambda found: "of the baseline" in [each.input for each in found])
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert adapter

    asyncio.run(cancelled())
    assert outcome(tmp_path / "baseline") == ("baseline", "interrupted")
    trained(store, algorithm=agl.Baseline(run_dir=tmp_path / "baseline", polling_interval=0.2)).fit(lambda task: 1.0, ["of the baseline"])
    assert outcome(tmp_path / "baseline") == ("baseline", "finished")


def test_trainers_of_weights_take_whose_calls_to_train_from_an_adapter_and_refuse_any_other(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs the [train] extra")
    from agl_otel.algorithms.grpo.algorithm import GRPO
    from agl_otel.algorithms.sft.algorithm import SFT

    served: Any = {"model_dir": tmp_path, "model_server_url": "http://127.0.0.1:1"}
    makers: Any = (partial(GRPO.from_options, **served), partial(SFT, **served), partial(agl.VERL, {}))
    for make in makers:
        algorithm: Any = make()
        agl.Trainer(algorithm=algorithm, adapter={"agent_match": "writer"})
        rules = getattr(algorithm, "rollouts", getattr(algorithm, "rules", algorithm))
        assert rules.agent_match == "writer"
        agl.Trainer(algorithm=make(agent_match="writer"), adapter=agl.LlmProxyTraceToTriplet())
        for adapter, words in (
            (agl.TraceToMessages(), "does not use a TraceToMessages: leave it out"),
            ({"reward_match": "first_sibling"}, "does not support the adapter's reward_match: leave it out"),
            ({"agent_match": "checker"}, "is 'writer', and the adapter's is 'checker': give one"),
        ):
            with pytest.raises(UsageError, match=words):
                agl.Trainer(algorithm=make(agent_match="writer"), adapter=adapter)


def test_a_reward_that_is_returned_and_emitted_counts_once(store: LightningStore, caplog: pytest.LogCaptureFixture) -> None:
    def agent(task: str) -> float:
        agl.emit_reward(0.5)
        return 0.5

    with caplog.at_level(logging.WARNING, logger="agl_otel"):
        trained(store).dev(agent, ["twice"])
    assert rewards(store)["twice"] == [0.5]
    assert sum("returned the reward 0.5 and emitted [0.5] as well" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("tracer", "kind", "hooked"), [(agl.OtelTracer(), "complete", True), (agl.DummyTracer(), "empty", False)], ids=["ours", "none"]
)
def test_a_lit_agents_attempt_is_proven_by_what_its_runner_hands_over(
    store: LightningStore, tracer: agl.Tracer, kind: str, hooked: bool
) -> None:
    def agent(task: str) -> float:
        if hooked:
            trace.get_tracer("agent").start_span("work").end()
        return 1.0

    async def read(name: str) -> None:
        [rollout] = [r for r in await store.query_rollouts() if r.input == name]
        assert isinstance(rollout, agl.AttemptedRollout)
        traces = await store.traces([rollout])
        verdict = traces.verdicts[rollout.rollout_id, rollout.attempt.attempt_id]
        assert (verdict.kind, verdict.reasons, verdict.alarm) == (kind, [], False)
        assert sum((rollout.attempt.seals or {}).values()) == 1 + hooked
        [root] = await store.query_spans(rollout.rollout_id, name=conventions.SPAN_ATTEMPT, everything=True)
        assert root.attributes.get(conventions.ATTEMPT_HOOKED, False) is hooked

    name = f"verdict of {kind}"
    agl.Trainer(store=store, strategy="shm", tracer=tracer).dev(agent, [name])
    asyncio.run(read(name))


def test_fit_without_data_runs_what_the_algorithm_enqueues(store: LightningStore) -> None:
    seen: list[str] = []

    @agl.algo
    async def algorithm(*, store: LightningStore, initial_resources: agl.NamedResources) -> None:
        await store.add_resources(initial_resources)
        rollout = await store.enqueue_rollout("of the algorithm")
        finished = await store.wait_for_rollouts([rollout.rollout_id])
        seen.extend(r.status for r in finished)

    @agl.rollout
    async def agent(task: str, prompt_template: agl.PromptTemplate) -> float:
        return 1.0 if prompt_template.format(q=task) == "<of the algorithm>" else 0.0

    template = agl.PromptTemplate(template="<{q}>", engine="f-string")
    trained(store, algorithm=algorithm, initial_resources={"p": template}, n_runners=1).fit(agent)
    assert seen == ["succeeded"] and rewards(store)["of the algorithm"] == [1.0]


def test_fit_without_an_algorithm_publishes_the_resources_and_serves_the_queue(store: LightningStore) -> None:
    """Until it is interrupted; here an agent's hook ends it."""
    done = threading.Event()

    class Ends(agl.Hook):
        async def on_rollout_end(self, **_: Any) -> None:
            done.set()

    async def queued() -> None:
        await store.enqueue_rollout("waits")

    asyncio.run(queued())
    trained(store, max_rollouts=1, hooks=Ends()).fit(lambda task: 1.0)  # pyright: ignore[reportUnknownLambdaType] - an agent in one line
    assert done.is_set() and rewards(store)["waits"] == [1.0]


def test_an_error_of_the_algorithm_ends_fit(store: LightningStore) -> None:
    @agl.algo
    def algorithm() -> None:
        raise RuntimeError("no idea")

    with pytest.raises(RuntimeError, match="no idea"):
        trained(store, algorithm=algorithm).fit(lambda task: 1.0)  # pyright: ignore[reportUnknownLambdaType] - an agent in one line


def test_an_agent_match_that_matches_nothing_is_known_before_a_job_starts(store: LightningStore, tmp_path: Path) -> None:
    """`train --check` holds it against the agents of the last rollouts of the same tasks."""
    pytest.importorskip("torch", reason="needs the [train] extra")
    task = {"question": "of an agent_match"}
    (tmp_path / "mine.py").write_text(f"def agent(task): return 1.0\ndef tasks(): return [{task!r}]\n")

    async def address() -> str:
        return str((await store.open()).description.queue)

    def checked(pattern: str) -> CheckReport:
        job = '[agent]\nfunction = "mine.py:agent"\n[data]\ntrain = "mine.py:tasks"\nval = "mine.py:tasks"\n[algorithm]\n'
        (tmp_path / "job.toml").write_text(f'{job}agent_match = "{pattern}"\n')
        return asyncio.run(check_job(tmp_path / "job.toml", store=asyncio.run(address())))

    found = checked("write")
    assert found.problems == [] and "the store has no model calls of these tasks yet" in found.notes[-1]

    async def played() -> None:
        begun = await store.start_rollout(task)
        ids = (begun.rollout_id, begun.attempt.attempt_id)
        for number, name in enumerate(("writer", "checker"), 1):
            call = {conventions.LLM_CALL: number, conventions.LLM_CHOICE: 0, "gen_ai.agent.name": name}
            await store.add_many_spans([span_of(*ids, number, conventions.SPAN_LLM, call)])
        await store.update_attempt(*ids, status="succeeded")

    asyncio.run(played())
    found = checked("^wri")
    assert found.problems == [] and [note for note in found.notes if "agent_match" in note] == []
    (problem,) = checked("rewrite").problems
    assert problem.endswith("agent_match = 'rewrite' matches none of the agents that the store knows of these tasks: checker, writer")


OWN_STORE = """
import sys

import agl_otel as agl


class Noting(agl.LightningStore):
    def __init__(self):
        self.noted = []

    async def enqueue_rollout(self, *given, **named):
        rollout = await super().enqueue_rollout(*given, **named)
        self.noted.append(rollout.rollout_id)
        return rollout


@agl.algo
async def learn(store, train_dataset):
    ids = [(await store.enqueue_rollout(task, mode="train")).rollout_id for task in train_dataset]
    done = await store.wait_for_rollouts(rollout_ids=ids, timeout=200)
    spans = [span.name for rollout_id in ids for span in await store.query_spans(rollout_id)]
    print(type(store).__name__, store.noted == ids, sorted(each.status for each in done), spans, flush=True)


def agent(task):
    return 1.0


if __name__ == "__main__":
    agl.Trainer(store=Noting(), algorithm=learn, strategy=sys.argv[1], tracer=agl.OtelTracer()).fit(agent, ["a", "b"])
"""


@pytest.mark.parametrize("strategy", [pytest.param("cs", marks=pytest.mark.full), "shm"])
def test_a_users_own_store_works_with_both_strategies(tmp_path: Path, strategy: str) -> None:
    (tmp_path / "program.py").write_text(OWN_STORE)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AGL_")}
    done = subprocess.run(
        [sys.executable, "program.py", strategy], cwd=tmp_path, capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"Noting True ['succeeded', 'succeeded'] {[conventions.SPAN_ANNOTATION] * 2}", (
        done.stdout + done.stderr
    )
