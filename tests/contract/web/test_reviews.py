"""The routes of reviews against a running `agl-otel store`: rubrics, the queue by each rule, and agreement."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from agl_otel.store import Store
from agl_otel.types.selections import Selected
from tests.command import run_command
from tests.contract.web.conftest import Web
from tests.contract.web.reviewed import RUBRIC, Made, make, review
from tests.model_server import ModelServer, in_a_thread
from tests.system.stack_process import ENVIRONMENT

RUN = "to review"


@pytest.fixture(scope="module")
def made(web: Web) -> list[Made]:
    """Store six attempts, the first with the lowest log-probs."""
    return make(web, RUN, [(f"question {place}", f"answer {place}", [place - 9.0, place - 8.0]) for place in range(6)])


def queue(web: Web, rule: str, **more: Any) -> dict[str, Any]:
    answer = web.rest("GET", "/reviews/queue", {"rule": rule, "reviewer": "ann", "rubric": "tone@1", "run": RUN, **more})
    assert answer.status == 200, answer.body
    return answer.json


def ids(found: dict[str, Any]) -> list[str]:
    return [each["rollout_id"] for each in found["items"]]


def test_a_random_queue_is_stable_and_lacks_what_the_reviewer_has_reviewed(web: Web, made: list[Made]) -> None:
    first = queue(web, "random", seed="7")
    assert sorted(ids(first)) == sorted(each.rollout_id for each in made) and first == queue(web, "random", seed="7")
    assert {ids(queue(web, "random", seed=str(seed)))[0] for seed in range(20)} > {ids(first)[0]}
    assert (first["total"], first["reviewed"], first["searched"], first["ended"]) == (6, 0, 6, 6)
    assert ids(queue(web, "random", seed="7", limit=2)) == ids(first)[:2] and queue(web, "random", limit=2)["total"] == 6
    done = next(each for each in made if each.rollout_id == ids(first)[1])
    review(web, done, "ann", "queue@1", "good")
    after = queue(web, "random", seed="7", rubric="queue@1")
    assert ids(after) == [each for each in ids(first) if each != done.rollout_id] and (after["total"], after["reviewed"]) == (5, 1)
    assert queue(web, "random", seed="7", rubric="queue@2") == first, "under another version of the rubric nothing is reviewed"
    assert queue(web, "random", seed="7", rubric="queue@1", reviewer="bob") == first
    assert queue(web, "random", run="no such run")["items"] == []


def test_the_queue_of_low_log_probs_has_the_lowest_mean_first(web: Web, made: list[Made]) -> None:
    found = queue(web, "low_logprob")
    assert ids(found) == [each.rollout_id for each in made]
    assert found["items"][0]["why"] == "mean log-prob -8.500 of 2 tokens"


def test_the_queue_of_disagreeing_judges_has_the_widest_first(web: Web, made: list[Made]) -> None:
    assert queue(web, "disagreeing")["items"] == []
    for source, place, value in (("j1", 2, 1), ("j2", 2, 0.5), ("j1", 4, 1), ("j2", 4, 0), ("j1", 5, 1), ("j2", 5, 1), ("j1", 0, 1)):
        review(web, made[place], source, "judged@1", "", value=value)
    review(web, made[0], "j2", "judged@2", "", value=0)
    found = queue(web, "disagreeing")
    assert ids(found) == [made[4].rollout_id, made[2].rollout_id]
    assert [each["why"] for each in found["items"]] == ["judged@1: j1 1, j2 0", "judged@1: j1 1, j2 0.5"]
    review(web, made[4], "j2", "judged@1", "", value=1)  # it has changed its mind: the last counts
    assert ids(queue(web, "disagreeing")) == [made[2].rollout_id]


def test_the_queue_of_the_refused_says_why(web: Web, made: list[Made]) -> None:
    (failed,) = make(web, RUN + " failed", [("q", "a", [-1.0])], status="failed")
    (found,) = queue(web, "refused", run=RUN + " failed")["items"]
    assert (found["rollout_id"], found["attempt_id"], found["why"]) == (*failed, "the rollout failed")
    found = queue(web, "refused")
    assert ids(found) == [each.rollout_id for each in made[::-1]]
    assert found["items"][0]["why"].startswith("incomplete: ") and "proxy-1" in found["items"][0]["why"]


def test_the_queue_of_a_selection_has_its_attempts_in_its_order_and_says_why(web: Web, made: list[Made]) -> None:
    rows = [
        {"rollout_id": made[4].rollout_id, "attempt_id": made[4].attempt_id, "cluster": "KeyError: no order"},
        {"rollout_id": "ro-gone", "attempt_id": "at-gone"},
        {"rollout_id": made[1].rollout_id, "attempt_id": made[1].attempt_id, "value": 0.25},
        {"rollout_id": made[2].rollout_id, "attempt_id": "at-of-before"},
    ]

    async def put() -> None:
        async with Store(web.url) as store:
            await store.put_selection("hard", [Selected.model_validate(row) for row in rows], {})

    asyncio.run(put())
    found = queue(web, "selected", selection="hard")
    assert [(each["rollout_id"], each["why"]) for each in found["items"]] == [
        (made[4].rollout_id, "KeyError: no order"),
        (made[1].rollout_id, "value 0.25"),
    ]
    assert (found["total"], found["ended"]) == (2, 4)
    assert ids(queue(web, "low_logprob", selection="hard@1", run="")) == [made[1].rollout_id, made[4].rollout_id], "another rule, of these"
    assert queue(web, "selected", selection="hard", run="no such run")["items"] == []
    for given, status, why in (
        ({"rule": "selected"}, 400, "name one"),
        ({"rule": "random", "selection": "nobody"}, 404, "there is no selection"),
    ):
        refused = web.rest("GET", "/reviews/queue", {"reviewer": "ann", "rubric": "tone@1", **given})
        assert refused.status == status and why in refused.json["detail"]


def test_agreement_is_of_the_last_labels_of_each_two(web: Web, made: list[Made]) -> None:
    for place, (ann, bob) in enumerate([("good", "good"), ("good", "bad"), ("bad", "bad"), ("bad", "bad")]):
        review(web, made[place], "ann", "agreed@1", "odd")
        review(web, made[place], "ann", "agreed@1", ann)
        review(web, made[place], "bob", "agreed@1", bob)
    review(web, made[4], "ann", "agreed@1", "good")
    review(web, made[5], "cat", "agreed@1", "good")
    review(web, made[0], "bob", "agreed@2", "bad")
    found = web.rest("GET", "/reviews/agreement", {"rubric": "agreed@1", "reviewer_in": ["ann", "bob"]}).json
    (pair,) = found["pairs"]
    assert (pair["n"], pair["labels"], pair["counts"]) == (4, ["bad", "good"], [[2, 0], [1, 1]])
    assert (pair["observed"], pair["expected"], pair["kappa"], pair["undefined"]) == (0.75, 0.5, 0.5, "")
    whole = web.rest("GET", "/reviews/agreement", {"rubric": "agreed@1"}).json
    assert whole["reviewers"] == [{"reviewer": name, "reviews": count} for name, count in (("ann", 5), ("bob", 4), ("cat", 1))]
    assert [each["reviewers"] for each in whole["pairs"]] == [["ann", "bob"], ["ann", "cat"], ["bob", "cat"]]
    assert whole["pairs"][1]["kappa"] is None and whole["pairs"][1]["undefined"] == "no attempt has been reviewed by both"


def test_a_rubric_has_versions_and_is_no_default_of_rollouts(web: Web) -> None:
    before = web.rest("GET", "/resources/latest").json
    first = web.rest("POST", "/reviews/rubrics", {"name": "tone", "text": RUBRIC})
    assert first.status == 201 and (first.json["rubric"], first.json["version"]) == ("tone@1", 1)
    labels = [{"label": "good", "value": 1.0}, {"label": "not sure", "value": None}, {"label": "bad", "value": 0.0}]
    assert (first.json["labels"], first.json["text"]) == (labels, RUBRIC)
    assert web.rest("POST", "/reviews/rubrics", {"name": "tone", "text": RUBRIC}).json == first.json, "the same text is the same version"
    second = web.rest("POST", "/reviews/rubrics", {"name": "tone", "text": RUBRIC + "\nwrong = -1"}).json
    assert second["rubric"] == "tone@2" and len(second["labels"]) == 4
    assert [each for each in web.rest("GET", "/reviews/rubrics").json if each["name"] == "tone"] == [second]
    assert web.rest("GET", "/resources/latest").json == before


@pytest.mark.parametrize(
    ("given", "why"),
    [({"name": "a b", "text": RUBRIC}, "no name"), ({"name": "x", "text": "nothing"}, "no label"), ({"name": "x"}, "text")],
)
def test_a_wrong_rubric_is_refused_with_its_reason(web: Web, given: dict[str, str], why: str) -> None:
    refused = web.rest("POST", "/reviews/rubrics", given)
    assert refused.status == 400 and why in refused.json["detail"]


def test_a_queue_needs_a_reviewer_and_a_rule_that_there_is(web: Web) -> None:
    for given, why in (
        ({"rubric": "a@1"}, "reviewer"),
        ({"reviewer": "ann"}, "rubric"),
        ({"reviewer": "a", "rubric": "r", "rule": "x"}, "rule"),
    ):
        refused = web.rest("GET", "/reviews/queue", given)
        assert refused.status == 400 and why in refused.json["detail"]


def test_a_judge_is_compared_like_any_reviewer_and_is_not_asked_through_the_proxy(web: Web, made: list[Made]) -> None:
    web.rest("POST", "/reviews/rubrics", {"name": "judged-by-a-model", "text": RUBRIC})
    command = ["judge", "--rubric", "judged-by-a-model", "--model", "m", "--run", RUN, "--limit", "9", "--store", web.url]
    proxy = web.rest("GET", "/describe").json["proxy"]
    for own in (proxy, web.url):
        done = run_command([*command, "--endpoint", f"{own}/v1"], ENVIRONMENT)
        assert done.returncode == 2 and "is the stack's own proxy" in done.stderr, done
    with in_a_thread(ModelServer()) as server:
        server.reply = lambda *_: '{"reason": "it does", "label": "good"}'  # type: ignore[method-assign]
        done = run_command([*command, "--endpoint", server.url, "--json"], ENVIRONMENT)
    assert json.loads(done.stdout)["labels"] == {"good": 6, "not sure": 0, "bad": 0}, done
    review(web, made[0], "ann", "judged-by-a-model@1", "good")
    review(web, made[1], "ann", "judged-by-a-model@1", "bad")
    (pair,) = web.rest("GET", "/reviews/agreement", {"rubric": "judged-by-a-model@1"}).json["pairs"]
    assert (pair["reviewers"], pair["n"], pair["observed"]) == (["judge:m", "ann"], 2, 0.5)
