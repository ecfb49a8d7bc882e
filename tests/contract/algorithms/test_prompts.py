"""Prompt searches with a real store, a Trainer's runners, an agent with the OpenAI SDK, and an editor behind HTTP.

The model's answers are determined by its prompt. No test depends on timing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import agl_otel as agl
from agl_otel.errors import DataError, ModelServerError, UsageError
from agl_otel.jobs.improve_prompts import check_editor
from agl_otel.store import LightningStore
from tests.contract.algorithms.conftest import Models, example

SEED_PROMPT = "answer"
MERGE_SEED = 23
"""A seed with which children of the first candidate improve both prompts."""
SMALL: dict[str, Any] = {
    "gradient_model": "critic",
    "apply_edit_model": "editor",
    "gradient_batch_size": 3,
    "val_batch_size": 4,
    "beam_width": 2,
    "branch_factor": 2,
    "beam_rounds": 2,
}
tasks = example("tasks")
answer = example("agent").answer


def fit(
    algorithm: Any,
    models: Models,
    store: LightningStore,
    target: str,
    *,
    agent: Any = answer,
    train: Any = None,
    val: Any = None,
    **prompts: str,
) -> None:
    trainer = agl.Trainer(
        algorithm=algorithm,
        adapter=agl.TraceToMessages(),
        store=store,
        strategy="shm",
        n_runners=3,
        tracer=agl.AgentOpsTracer(),
        initial_resources={
            **{name: agl.PromptTemplate(template=text, engine="f-string") for name, text in (prompts or {"p": SEED_PROMPT}).items()},
            "main_llm": agl.LLM(endpoint=models.url, model="words"),
        },
    )
    trainer.fit(agent, tasks.train(target) if train is None else train, val_dataset=tasks.val(target) if val is None else val)


def true_score(models: Models, prompt: str, target: str) -> float:
    """Compute the model's score with this prompt on all digits, without rollouts."""
    wanted = {task["digit"]: task["wanted"] for task in [*tasks.train(target), *tasks.val(target)]}
    return sum(models.words.answer(prompt, digit) == answer for digit, answer in wanted.items()) / len(wanted)


def rollouts_of(store: LightningStore) -> int:
    return asyncio.run(_count(store))


async def _count(store: LightningStore) -> int:
    return (await store.statistics()).get("total_rollouts", 0)


def steps_of(store: LightningStore, algorithm: str) -> list[agl.TrainingStep]:
    """Read the recorded steps of the latest run of an algorithm from the store."""

    async def found() -> list[agl.TrainingStep]:
        run = next(run for run in await store.training_runs() if run.algorithm == algorithm)
        return await store.training_steps(run.run_id)

    return asyncio.run(found())


@pytest.mark.parametrize(("target", "seed"), [("next", 0), pytest.param("flip", 1, marks=pytest.mark.full)])
def test_apo_finds_the_best_prompt_for_the_tasks(models: Models, store: LightningStore, target: str, seed: int) -> None:
    assert true_score(models, SEED_PROMPT, target) <= 0.5
    apo = agl.APO[Any](models.as_editor("reads"), seed=seed, **SMALL)
    with pytest.raises(ValueError, match="no best prompt yet"):
        apo.get_best_prompt()
    fit(apo, models, store, target)
    assert true_score(models, apo.get_best_prompt().template, target) == 1.0, apo.history
    assert apo.best_score == 1.0 and apo.stopped_because == "all rounds are done"
    assert apo.spend.editor_calls == models.server.calls == 2 * 2 * 4
    scores = [row["best_score"] for row in apo.history]
    assert scores == sorted(scores) and len(scores) == 3

    async def latest() -> Any:
        return await store.get_latest_resources()

    published = asyncio.run(latest())
    assert published.resources["p"] == apo.get_best_prompt() and published.resources["main_llm"].model == "words"


def test_apo_improves_nothing_if_rewards_are_independent_of_the_prompt(
    models: Models, store: LightningStore, caplog: pytest.LogCaptureFixture
) -> None:
    """A control experiment: the editor guesses, rewards depend on the task only, and the agent calls no model."""

    def dealt(task: dict[str, Any], prompt_template: agl.PromptTemplate) -> float:
        return float(task["digit"] % 2)

    apo = agl.APO[Any](models.as_editor("guesses"), seed=0, **SMALL)
    fit(apo, models, store, "next", agent=dealt)
    assert apo.get_best_prompt().template == SEED_PROMPT, "no candidate is strictly better"
    assert len({row["best_score"] for row in apo.history}) == 1
    assert "TraceToMessages found no messages in 3 of 3 rollouts for the editor: ro-" in caplog.text


class WithoutCritic:
    """A client whose critique model fails; other calls go to `client`."""

    def __init__(self, client: Any) -> None:
        self._client, self.chat, self.completions = client, self, self

    async def create(self, *, model: str, **more: Any) -> Any:
        if model == "critic":
            raise ConnectionError("no critic here")
        return await self._client.chat.completions.create(model=model, **more)


def test_after_a_failed_critique_the_candidate_has_the_parents_text(models: Models, store: LightningStore) -> None:
    apo = agl.APO[Any](WithoutCritic(models.as_editor("reads")), seed=0, **{**SMALL, "beam_rounds": 1, "branch_factor": 1})
    fit(apo, models, store, "next")
    (*_, row) = apo.history
    assert (row["made"], row["editor_failures"], models.server.calls) == (2, 2, 0), "and the editor is not asked to edit by nothing"
    assert {candidate["templates"]["p"] for candidate in row["candidates"]} == {SEED_PROMPT}
    assert apo.stopped_because == "all rounds are done"


@pytest.mark.parametrize("habit", ["repeats", "babbles", "invents"])
def test_a_useless_editor_does_not_lose_the_best_prompt(models: Models, store: LightningStore, habit: str) -> None:
    apo = agl.APO[Any](models.as_editor(habit), seed=0, **{**SMALL, "beam_rounds": 1, "branch_factor": 1})
    fit(apo, models, store, "copy")
    assert true_score(models, apo.get_best_prompt().template, "copy") >= true_score(models, SEED_PROMPT, "copy")
    made = apo.history[-1]["made"]
    assert made == (0 if habit == "invents" else 2), "an edit with a placeholder that no agent fills is left out"


@pytest.mark.full
def test_a_failing_editor_ends_the_search_and_is_called_again_on_resume(
    models: Models, store: LightningStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {**SMALL, "beam_rounds": 3, "seed": 0, "run_dir": tmp_path}
    apo = agl.APO[Any](models.as_editor("reads", shut=True), **options)
    fit(apo, models, store, "next")
    assert apo.get_best_prompt().template == SEED_PROMPT
    assert "the editor failed 5 times in a row" in apo.stopped_because and "503" in apo.stopped_because
    assert apo.spend.editor_failures == 5 == models.server.calls
    with pytest.raises(ModelServerError, match="5 of 5 calls of the editor failed: the editor failed 5 times in a row"):
        check_editor(apo)  # that nothing better was found is no finding about prompts
    assert json.loads((tmp_path / "best.json").read_text())["templates"] == {"p": SEED_PROMPT}
    paid = rollouts_of(store)

    again = agl.APO[Any](models.as_editor("reads"), **options)
    fit(again, models, store, "next")
    assert true_score(models, again.get_best_prompt().template, "next") == 1.0
    check_editor(again)
    assert rollouts_of(store) - paid < again.spend.rollouts, "recorded rollouts are not run again"
    steps = steps_of(store, "apo")
    assert [(step.step, step.version_after) for step in steps] == [(row["round"], row["best_version"]) for row in again.history]

    with caplog.at_level(logging.ERROR):
        once_more = agl.APO[Any](models.as_editor("reads", shut=True), **options)
        before = rollouts_of(store)
        fit(once_more, models, store, "next")
    assert once_more.history == again.history and models.server.calls == 0 and rollouts_of(store) == before
    assert steps_of(store, "apo") == steps


@pytest.mark.parametrize(
    ("bound", "words"),
    [
        ({"max_editor_calls": 3}, "max_editor_calls = 3 are made"),
        ({"max_editor_tokens": 1}, "max_editor_tokens = 1 are spent"),
        ({"max_rollouts": 9}, "max_rollouts = 9 do not allow"),
    ],
)
def test_a_limit_on_spending_ends_the_search_and_is_named(models: Models, store: LightningStore, bound: dict[str, int], words: str) -> None:
    apo = agl.APO[Any](models.as_editor("reads"), seed=0, **SMALL, **bound)
    before = rollouts_of(store)
    fit(apo, models, store, "next")
    assert words in apo.stopped_because
    assert models.server.calls == apo.spend.editor_calls <= bound.get("max_editor_calls", 2)
    assert rollouts_of(store) - before == apo.spend.rollouts <= bound.get("max_rollouts", 100)
    assert apo.get_best_prompt().template


def test_gepa_finds_the_best_prompt_for_the_tasks(models: Models, store: LightningStore) -> None:
    gepa = agl.GEPA[Any](models.as_editor("reads"), reflection_model="editor", max_iterations=8, seed=0, max_rollouts=120)
    fit(gepa, models, store, "back")
    assert true_score(models, gepa.get_best_prompt().template, "back") == 1.0, gepa.history
    assert all(sum(row["front"].values()) >= 1 for row in gepa.history)
    assert gepa.spend.editor_calls == models.server.calls and gepa.spend.rollouts <= 120


def history_of(gepa: agl.GEPA[Any]) -> list[dict[str, Any]]:
    """Return its history without the editor's token counts, which vary with the digits of measured times in the prompts."""
    return [{name: value for name, value in row.items() if name != "editor_tokens"} for row in gepa.history]


@pytest.mark.full
def test_a_resumed_gepa_run_equals_an_uninterrupted_one(models: Models, store: LightningStore, tmp_path: Path) -> None:
    def run(**given: Any) -> agl.GEPA[Any]:
        gepa = agl.GEPA[Any](models.as_editor("reads"), reflection_model="editor", max_iterations=3, perfect_reward=None, seed=0, **given)
        fit(gepa, models, store, "next")
        return gepa

    alone = run()
    stopped = run(run_dir=tmp_path, max_editor_calls=1)
    assert stopped.stopped_because == "max_editor_calls = 1 are made" and len(stopped.history) < len(alone.history)
    paid = rollouts_of(store)
    again = run(run_dir=tmp_path)
    assert history_of(again) == history_of(alone) and again.get_best_prompt() == alone.get_best_prompt()
    assert models.server.calls == alone.spend.editor_calls - 1
    assert rollouts_of(store) - paid == alone.spend.rollouts - stopped.spend.rollouts


@pytest.mark.full
def test_gepa_improves_several_prompts_in_turn(models: Models, store: LightningStore) -> None:
    async def agent(task: dict[str, Any], resources: agl.NamedResources, llm: agl.LLM) -> float:
        template = resources[task["prompt"]]
        assert isinstance(template, agl.PromptTemplate)
        return await answer(task, template, llm)

    both = [{**task, "prompt": name} for name in ("first", "second") for task in tasks.train("flip")[:3]]
    gepa = agl.GEPA[Any](models.as_editor("reads"), reflection_model="editor", minibatch_size=6, max_iterations=8, seed=0)
    fit(gepa, models, store, "flip", agent=agent, train=both, val=both, first=SEED_PROMPT, second=SEED_PROMPT)
    assert {name: true_score(models, found.template, "flip") for name, found in gepa.get_best_prompts().items()} == {
        "first": 1,
        "second": 1,
    }


def test_gepa_improves_nothing_with_independent_rewards_or_a_useless_editor(models: Models, store: LightningStore) -> None:
    """Control experiments: rewards that depend on the task only, and an editor with meaningless answers."""

    def dealt(task: dict[str, Any], prompt_template: agl.PromptTemplate) -> float:
        return float(task["digit"] % 2)

    def run(habit: str, agent: Any) -> agl.GEPA[Any]:
        gepa = agl.GEPA[Any](models.as_editor(habit), reflection_model="editor", max_iterations=2, perfect_reward=None, seed=0)
        fit(gepa, models, store, "next", agent=agent)
        return gepa

    for gepa in (run("guesses", dealt), run("repeats", answer)):
        assert gepa.get_best_prompt().template == SEED_PROMPT and gepa.spend.editor_calls == 2, "it asked, and nothing was better"
        assert [row["joined"] for row in gepa.history] == ["v0", None, None]


@pytest.mark.full
def test_gepa_merges_candidates_that_improved_different_prompts(models: Models, store: LightningStore) -> None:
    """One candidate improved the first prompt and another the second, and each lost a task that the seed solved. Their child has both
    improvements (algorithm 4) and scores better than either."""

    async def agent(task: dict[str, Any], resources: agl.NamedResources, llm: agl.LLM) -> float:
        template = resources[task["prompt"]]
        assert isinstance(template, agl.PromptTemplate)
        return await answer(task, template, llm)

    train = [{**task, "prompt": name} for name in ("first", "second") for task in tasks.train("flip")[:3]]
    own = [{"digit": digit, "wanted": models.words.answer(SEED_PROMPT, digit)} for digit in range(10)]
    lost = next(task for task in own if int(task["wanted"]) != 9 - task["digit"])
    val = [*train, *({**lost, "prompt": name} for name in ("first", "second"))]
    gepa = agl.GEPA[Any](
        models.as_editor("reads", seed=MERGE_SEED),
        reflection_model="editor",
        minibatch_size=6,
        max_iterations=3,
        seed=MERGE_SEED,
    )
    fit(gepa, models, store, "flip", agent=agent, train=train, val=val, first=SEED_PROMPT, second=SEED_PROMPT)
    place, row = next((place, row) for place, row in enumerate(gepa.history) if row["kind"] == "merge" and row["joined"])
    assert row["best_version"] == row["joined"] and row["best_score"] > gepa.history[place - 1]["best_score"], gepa.history
    assert row["editor_calls"] == gepa.history[place - 1]["editor_calls"], "several prompts are merged without the editor"
    assert {name: true_score(models, found.template, "flip") for name, found in gepa.get_best_prompts().items()} == {
        "first": 1,
        "second": 1,
    }


@pytest.mark.full
def test_gepa_merges_prompts_that_are_best_at_different_tasks(models: Models, store: LightningStore) -> None:
    """Tasks need three different operations, one of them the initial prompt's, so that no prompt is best at all of them."""
    own = [{"digit": digit, "wanted": models.words.answer(SEED_PROMPT, digit)} for digit in range(10)]
    wanted = [tasks.OPERATIONS[word] for word in ("next", "flip")]
    unchanged = [task for task in own if all(int(task["wanted"]) != does(task["digit"]) for does in wanted)][:4]
    mixed = [{"digit": digit, "wanted": answer} for digit, answer in ((0, "1"), (2, "3"), (2, "7"), (3, "6"))]
    gepa = agl.GEPA[Any](
        models.as_editor("guesses"),
        reflection_model="editor",
        minibatch_size=4,
        max_iterations=14,
        max_merges=1,
        seed=1,
        perfect_reward=None,
    )
    fit(gepa, models, store, "next", train=mixed, val=[*mixed, *unchanged])
    merges = [row for row in gepa.history if row["kind"] == "merge"]
    assert len(merges) == 1 and len(merges[0]["front"]) >= 2, gepa.history
    assert models.server.calls == gepa.spend.editor_calls <= 14


class Reading:
    """An editor that answers nothing, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.chat = self.completions = self

    async def create(self, *, messages: list[dict[str, str]], **_: Any) -> Any:
        self.asked.append(messages[0]["content"])
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=""))], usage=None)


async def two_agents(task: dict[str, Any], resources: agl.NamedResources, llm: agl.LLM) -> float:
    """Play a planner and a solver, each with a prompt and a model call of its own, and a tool."""
    for name in ("plan", "solve"):
        template = resources[name]
        assert isinstance(template, agl.PromptTemplate)
        named: dict[str, Any] = {"gen_ai.agent.name": f"agent of {name}"}
        with agl.operation(**named):
            await answer(task, template, llm)
    with agl.operation(name="a tool"):
        return 0.5


@pytest.mark.parametrize(
    ("kind", "agent_match", "edited"),
    [
        (agl.APO, {"solve": "^agent of solve$"}, ["solve"]),
        pytest.param(agl.APO, "plan", ["plan"], marks=pytest.mark.full),
        pytest.param(agl.GEPA, {"solve": "solve"}, ["solve"], marks=pytest.mark.full),
        (agl.GEPA, {"plan": "plan", "solve": "solve"}, ["plan", "solve"]),
    ],
)
def test_the_editor_sees_the_calls_of_the_agent_whose_prompt_it_edits(
    models: Models, store: LightningStore, kind: Any, agent_match: Any, edited: list[str]
) -> None:
    editor = Reading()
    options = {**SMALL, "beam_rounds": 1} if kind is agl.APO else {"max_iterations": 2, "perfect_reward": None}
    search = kind(editor, agent_match=agent_match, seed=0, **options)
    prompts = {"plan": "the plan please copy", "solve": "the solution please copy"}
    fit(search, models, store, "next", agent=two_agents, **prompts)
    shown = [[name for name, text in prompts.items() if text in asked] for asked in editor.asked]
    assert sorted({name for names in shown for name in names}) == edited and len(shown) >= 2
    assert all(len(names) == 1 for names in shown), "what another agent was told is not shown"
    assert kind is agl.APO or all("a tool" in asked for asked in editor.asked), "what is no model call is"


def test_wrong_agents_of_prompts_are_named(models: Models, store: LightningStore) -> None:
    with pytest.raises(UsageError, match=r"agent_match names q: the initial resources' prompts are p; name these"):
        fit(agl.GEPA[Any](models.as_editor("reads"), agent_match={"q": "solver"}), models, store, "next")
    with pytest.raises(UsageError, match=r"agent_match names plan, solve: APO edits one prompt; name one, or use GEPA"):
        agl.APO[Any](models.as_editor("reads"), agent_match={"plan": "planner", "solve": "solver"})
    with pytest.raises(UsageError, match=r'agent_match = "\(": it is no regular expression'):
        agl.APO[Any](models.as_editor("reads"), agent_match={"p": "("})
    apo = agl.APO[Any](models.as_editor("reads"), agent_match="solver")
    apo.set_store(store)
    adapter = agl.TraceToMessages(agent_match="planner")
    apo.set_adapter(adapter)
    with pytest.raises(UsageError, match=r"agent_match of APO is 'solver', and the adapter's is 'planner': give one"):
        asyncio.run(apo.run([1], [1]))


def test_random_search_evaluates_all_and_keeps_the_best(models: Models, store: LightningStore) -> None:
    search = agl.RandomSearch(["please copy", "please back", "please flip"], seed=0)
    fit(search, models, store, "back")
    assert search.get_best_prompt().template == "please back" and search.best_score == 1.0
    assert [row["version"] for row in search.history] == ["v0", "v1", "v2", "v3"]
    assert search.spend.rollouts == 20 and search.spend.editor_calls == 0
    steps = steps_of(store, "random_search")
    assert [(step.step, step.version_before, step.version_after) for step in steps[1:]] == [
        (number, before["best_version"], after["best_version"]) for number, (before, after) in enumerate(pairwise(search.history), 1)
    ]
    assert all(len(step.attempts) == step.samples == 5 and step.unlinked == 0 for step in steps)
    assert max(step.metrics["reward_mean"] for step in steps) == steps[-1].metrics["best_score"] == 1.0


def test_unsuitable_input_of_a_search_is_named(models: Models, store: LightningStore, tmp_path: Path) -> None:
    apo = agl.APO[Any](models.as_editor("reads"), **SMALL, seed=0, run_dir=tmp_path)
    apo.set_store(store)

    def run(algorithm: Any, *data: Any) -> None:
        asyncio.run(algorithm.run(*data))

    triplets, messages = agl.TracerTraceToTriplet(), agl.TraceToMessages()
    apo.set_adapter(triplets)
    with pytest.raises(ValueError, match="APO reads messages, not a TracerTraceToTriplet"):
        run(apo, [1], [1])
    apo.set_adapter(messages)
    with pytest.raises(ValueError, match="needs train_dataset"):
        run(apo, None, [1])
    with pytest.raises(ValueError, match="needs val_dataset"):
        run(apo, [1])
    with pytest.raises(ValueError, match="needs a prompt to begin with"):
        run(apo, [1], [1])
    with pytest.raises(ValueError, match=r"APO cannot edit prompt p: it is no f-string template: \{task\.text\} reaches"):
        fit(apo, models, store, "back", p="Say {task.text}")
    with pytest.raises(UsageError, match="choices for q: the initial resources' prompts are p"):
        fit(agl.RandomSearch({"q": ["x"]}), models, store, "back")
    with pytest.raises(ValueError, match="RandomSearch needs tasks"):
        fit(agl.RandomSearch(["x"]), models, store, "back", train=[], val=[])
    assert not (tmp_path / "run.json").exists(), "nothing was begun"


def search_of(tmp_path: Path) -> Any:
    return agl.RandomSearch(["please copy"], seed=0, run_dir=tmp_path / "run", metrics=[])


def test_a_search_with_a_failing_agent_resumes_after_the_agent_is_fixed(models: Models, store: LightningStore, tmp_path: Path) -> None:
    def broken(task: dict[str, Any]) -> float:
        raise RuntimeError("no such model")

    before = rollouts_of(store)
    with pytest.raises(DataError, match=r"none of the 5 rollouts of candidate v0 has a reward: 5 × .*no such model.*start the run again"):
        fit(search_of(tmp_path), models, store, "copy", agent=broken)
    assert rollouts_of(store) - before == 5
    search = search_of(tmp_path)
    fit(search, models, store, "copy", agent=lambda task: 0.5)  # pyright: ignore[reportUnknownLambdaType] - an agent in one line
    assert [row["score"] for row in search.history] == [0.5, 0.5]
    assert rollouts_of(store) - before == 10, "what had failed was tried again, under the same ids"


def test_a_search_survives_nan_rewards_and_deleted_rollouts(
    models: Models, store: LightningStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = iter([math.nan, None])

    async def agent(task: dict[str, Any], rollout: agl.AttemptedRollout) -> float | None:
        reward = next(given, 1.0)
        if reward is None:
            await store.queue.delete([rollout.rollout_id])
        return reward

    search = search_of(tmp_path)
    with caplog.at_level(logging.WARNING):
        fit(search, models, store, "copy", agent=agent)
    assert [row["score"] for row in search.history] == [0.6, 1.0], "of 5 tasks a NaN counts 0, and so does one that is gone"
    assert "a reward must be finite, the agent returned nan" in caplog.text
    assert search.stopped_because == "all trials are done"


async def nothing(task: dict[str, Any]) -> None:
    """An agent without rewards."""


def test_candidates_without_rewards_are_named_and_score_zero(
    models: Models, store: LightningStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    search = search_of(tmp_path)
    with caplog.at_level(logging.WARNING):
        fit(search, models, store, "copy", agent=nothing)
    assert "none of the 5 rollouts of candidate v1 has a reward: agents and graders gave none; it counts 0" in caplog.text
    assert search.get_best_prompt().template == SEED_PROMPT
