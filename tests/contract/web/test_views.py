"""The dashboard's routes beyond those of 0.3 against a running `agl-otel store`, and the OpenAPI document against the service."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agl_otel.proxy.canary import drawn
from agl_otel.store.steps import outcome_request, step_requests
from agl_otel.types import TrainingStep
from agl_otel.web.app import TABLE
from agl_otel_hook import conventions
from tests.contract.collector.otlp import span_request
from tests.contract.web.conftest import OTLP, Web, with_bytes
from tests.environments import AbsentError, installed
from tests.system.stack_process import run

SCHEMATHESIS = ("schemathesis==4.32.5",)
TRACE = "0af7651916cd43dd8448eb211c8031{:02x}"
PROMPT = {"resource_type": "prompt_template", "template": "{q}", "engine": "f-string"}
RUN = "search/1 <b>"


def span(begun: dict[str, Any], number: int, name: str, **attributes: Any) -> dict[str, Any]:
    ids = {"rollout_id": begun["rollout_id"], "attempt_id": begun["attempt"]["attempt_id"], "sequence_id": number}
    trace = {"trace_id": TRACE.format(number), "span_id": f"b7ad6b71692033{number:02x}", "parent_id": None}
    times = {"start_time": 1_790_000_000.0 + number, "end_time": 1_790_000_000.5 + number, "context": None, "parent": None}
    rest = {"events": [], "links": [], "resource": {"attributes": {}, "schema_url": ""}, "status": {"status_code": "OK"}}
    return {**ids, **trace, **times, **rest, "name": name, "attributes": attributes}


def call(begun: dict[str, Any], number: int, prompt: list[dict[str, Any]], reply: str, **more: Any) -> dict[str, Any]:
    tokens = {
        conventions.LLM_PROMPT_TOKEN_IDS: [1, 2, 3],
        conventions.LLM_RESPONSE_TOKEN_IDS: [4, 5],
        conventions.LLM_RESPONSE_LOGPROBS: [-0.5, -2.0],
    }
    messages = {"gen_ai.input.messages": json.dumps(prompt), "gen_ai.output.messages": json.dumps([message("assistant", reply)])}
    place = {conventions.LLM_CALL: number, conventions.LLM_CHOICE: 0, conventions.PROCESS: "proxy-1", "gen_ai.request.model": "m", **more}
    return span(begun, number, conventions.SPAN_LLM, **tokens, **messages, **place)


def message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": text}]}


@pytest.fixture(scope="module")
def begun(web: Web) -> dict[str, Any]:
    """Store a finished rollout of a run, with two model calls and a reward."""
    web.rest("POST", "/resources/rs-views", {"resources": {"p": PROMPT}})
    web.rest("POST", "/resources/rs-views", {"resources": {"p": {**PROMPT, "template": "{q}!"}}})
    metadata = {"run": RUN, "step": 4, "loss": 0.5}
    made = web.rest("POST", "/rollouts", {"input": 1, "mode": "train", "metadata": metadata, "resources_id": "rs-views"}).json
    asked = message("user", "2+2?")
    spans = [
        call(made, 1, [asked], "four"),
        call(made, 2, [asked, message("assistant", "four"), message("user", "sure?")], "yes", **{conventions.LLM_PREFIX_CALL: 1}),
        span(made, 3, conventions.SPAN_ANNOTATION, **{conventions.reward_name_key(0): "exact", conventions.reward_value_key(0): 0.75}),
    ]
    for each in spans:
        assert web.rest("POST", "/spans", each).status == 201
    web.rest("POST", f"/rollouts/{made['rollout_id']}/attempts/latest", {"status": "succeeded"})
    return made


def test_a_run_has_counts_a_curve_and_verdicts(web: Web, begun: dict[str, Any]) -> None:
    [run] = [run for run in web.rest("GET", "/runs").json if run["run_id"] == RUN]
    assert (run["rollouts"], run["by_status"], run["by_mode"], run["last_step"]) == (1, {"succeeded": 1}, {"train": 1}, 4)
    curve = web.rest("GET", "/runs/curve", {"run": RUN}).json
    [point] = curve["points"]
    assert curve["run"] == run and (point["mode"], point["rollouts"], point["ended"], point["rewarded"]) == ("train", 1, 1, 1)
    assert (point["reward_mean"], point["spans"], point["prompt_tokens"], point["response_tokens"]) == (0.75, 3, 6, 4)
    verdicts = web.rest("GET", "/runs/verdicts", {"run": RUN}).json
    assert (verdicts["of"], verdicts["counts"]) == (1, {"incomplete": 1}) and "sent no seal" in next(iter(verdicts["reasons"]))
    assert web.rest("GET", "/runs/curve", {"run": "none"}).status == 404
    assert web.rest("GET", "/runs/steps", {"run": RUN}).json == [], "it trained nothing"
    assert web.rest("GET", "/rollouts", {"run": RUN, "mode_in": ["train"]}).json["total"] == 1
    assert web.rest("GET", "/rollouts", {"run": RUN, "mode_in": ["val"]}).json["total"] == 0


def test_the_steps_of_a_training_say_what_they_lost_and_with_which_code_they_ran(web: Web) -> None:
    for number, more in ((1, {}), (2, {"other_code": "grader grade.py", "refused.no_reward": 1, "rollouts": 4})):
        metrics = {"reward_mean": 0.5, **more}
        step = TrainingStep(
            run_id="grpo-views", algorithm="grpo", step=number, samples=3, start_time=1.79e9, end_time=1.79e9, metrics=metrics
        )
        for request in step_requests(step, {}):
            assert web.call("POST", "/v1/traces", request, OTLP).status == 200
    first, second = web.rest("GET", "/runs/steps", {"run": "grpo-views"}).json
    assert (first["other_code"], second["other_code"]) == ("", "grader grade.py")
    assert (second["step"], second["refused"], second["samples"]) == (2, {"no_reward": 1}, 3) and "no_reward" in second["lost"]
    outcome = outcome_request("grpo-views", "interrupted", "grpo", 1_790_000_000 * 10**9)
    assert web.call("POST", "/v1/traces", outcome, OTLP).status == 200
    (training,) = web.rest("GET", "/runs/training", {"run": "grpo-views"}).json
    assert (training["steps"], training["last_step"], training["outcome"]) == (2, 2, "interrupted")
    assert training in web.rest("GET", "/runs/training").json and not web.rest("GET", "/runs/training", {"run": "none"}).json


def test_a_curve_marks_the_step_that_an_interrupted_run_had_not_made(web: Web) -> None:
    for number in (1, 2, 3):
        web.rest("POST", "/rollouts", {"input": number, "mode": "train", "metadata": {"run": "grpo-views", "step": number}})
    assert [point["made"] for point in web.rest("GET", "/runs/curve", {"run": "grpo-views"}).json["points"]] == [True, True, False]


def test_rollouts_have_figures(web: Web, begun: dict[str, Any]) -> None:
    [figures] = web.rest("POST", "/rollouts/figures", {"rollout_ids": [begun["rollout_id"], "ro-none"]}).json
    assert (figures["reward"], figures["rewards"], figures["spans"], figures["calls"]) == (0.75, {"exact": 0.75}, 3, 2)
    assert (figures["verdict"]["kind"], figures["prompt_tokens"], figures["response_tokens"]) == ("incomplete", 6, 4)
    assert web.rest("GET", f"/rollouts/{begun['rollout_id']}/figures").json == [figures]


def test_rollouts_have_the_last_reply_of_a_model(web: Web, begun: dict[str, Any]) -> None:
    made = web.rest("POST", "/rollouts", {"input": 2}).json
    long = 'a "quoted" line\n' * 2000  # longer than OUTPUT_BYTES: its JSON is truncated
    for each in (
        call(made, 1, [message("user", "?")], long),
        span(made, 2, "tool", **{"gen_ai.output.messages": '[{"role": "assistant"}]'}),
    ):
        assert web.rest("POST", "/spans", each).status == 201
    silent = web.rest("POST", "/rollouts", {"input": 3}).json
    asked = {"rollout_ids": [begun["rollout_id"], silent["rollout_id"]]}
    assert web.rest("POST", "/rollouts/outputs", asked).json == [{"rollout_id": begun["rollout_id"], "text": "yes"}]
    [found] = web.rest("POST", "/rollouts/outputs", {"rollout_ids": [made["rollout_id"]]}).json
    assert found["text"] == '[{"role": "assistant"}]', "the last one, though it holds no text"
    cut = call(made, 3, [message("user", "?")], long)
    assert web.rest("POST", "/spans", cut).status == 201
    [found] = web.rest("POST", "/rollouts/outputs", {"rollout_ids": [made["rollout_id"]]}).json
    assert found["text"].startswith('a "quoted" line\na "quoted"') and len(found["text"]) == 300
    assert web.rest("POST", "/rollouts/outputs", {"rollout_ids": []}).json == []


def test_rollouts_are_found_by_the_models_last_reply(web: Web) -> None:
    mine = {"metadata": {"run": "replies"}}
    made = [web.rest("POST", "/rollouts", {"input": {"q": f"weather in {town}"}, **mine}).json for town in ("Oslo", "Zürich", "Rome")]
    replies = {0: ["sun", 'it\'s "cold"'], 1: ["cold", "naïve 雨"]}
    for place, texts in replies.items():
        for number, text in enumerate(texts, 1):
            assert web.rest("POST", "/spans", call(made[place], number, [message("user", "?")], text)).status == 201

    def found(**asked: Any) -> tuple[list[int], int, int | None]:
        answer = web.rest("POST", "/rollouts/search", {"run": "replies", **asked}).json
        ids = [each["rollout_id"] for each in made]
        return [ids.index(each["rollout_id"]) for each in answer["items"]], answer["total"], answer.get("searched")

    assert found(output_contains="cold") == ([0], 1, None), "the last reply only"
    assert found(output_contains='it\'s "cold"') == ([0], 1, None)
    assert found(output_contains="雨") == found(output_contains="雨", input_contains="Zürich") == ([1], 1, None)
    assert found(output_contains="雨", input_contains="Oslo") == ([], 0, None)
    assert found(output_contains="') OR 1 --") == ([], 0, None)
    assert found(output_contains="assistant", sort_by="rollout_id", sort_order="desc", limit=1) == ([1], 2, None)
    assert found(input_contains="weather", attempts_from=1) == ([0, 1, 2], 3, None)
    assert found(attempts_from=2) == ([], 0, None)
    assert web.rest("GET", "/rollouts", {"output_contains": "x" * 201}).status == 400


def test_an_outline_leaves_out_large_attributes(web: Web, begun: dict[str, Any]) -> None:
    outline = web.rest("GET", f"/rollouts/{begun['rollout_id']}/outline", {"limit": 2}).json
    assert outline["total"] == 3 and [(s["name"], s["call"], s["response_tokens"]) for s in outline["spans"]] == [
        (conventions.SPAN_LLM, 1, 2),
        (conventions.SPAN_LLM, 2, 2),
    ]
    assert outline["spans"][0]["start_nano"] == "1790000001000000000" and outline["spans"][0]["duration_nano"] == "500000000"
    whole = web.rest("GET", f"/rollouts/{begun['rollout_id']}/outline", {"attempt_id": begun["attempt"]["attempt_id"]}).json
    assert whole["spans"][-1]["rewards"] == {"exact": 0.75}


def test_a_conversation_counts_repeated_messages_and_tokens_are_whole(web: Web, begun: dict[str, Any]) -> None:
    path = f"/rollouts/{begun['rollout_id']}"
    answer = web.rest("GET", f"{path}/conversation").json
    first, second = answer["calls"]
    assert [m["content"] for m in (*first["messages"], *second["messages"])] == ["2+2?", "sure?"] and second["reply"][0]["content"] == "yes"
    [alone] = web.rest("GET", f"{path}/conversation", {"offset": 1}).json["calls"]
    assert [m["content"] for m in alone["messages"]] == ["2+2?", "four", "sure?"] and alone["repeated"] == 2
    assert (answer["total"], first["repeated"], second["repeated"], second["model"]) == (2, 0, 2, "m")
    assert (first["prompt_tokens"], second["prompt_tokens"], second["response_tokens"]) == (3, 8, 2)
    asked = {"attempt_id": begun["attempt"]["attempt_id"], "span_id": second["token_span_id"]}
    tokens = web.rest("GET", f"{path}/tokens", asked).json
    assert tokens == {"prompt_token_ids": [1, 2, 3, 4, 5, 1, 2, 3], "response_token_ids": [4, 5], "logprobs": [-0.5, -2.0]}
    assert web.rest("GET", f"{path}/tokens", {**asked, "span_id": "none"}).status == 404


VIEWS_OF_ONE = ("outline", "evaluations", "conversation", "figures", "tokens?attempt_id=at-none&span_id=none")


@pytest.mark.parametrize("view", VIEWS_OF_ONE)
def test_an_unknown_rollout_is_named_and_one_without_spans_is_empty(web: Web, begun: dict[str, Any], view: str) -> None:
    unknown = web.rest("GET", f"/rollouts/ro-none/{view}")
    assert unknown.status == 404 and "'ro-none'" in unknown.json["detail"], unknown
    if view not in ("figures", "evaluations"):
        joint = "&" if "?" in view else "?"
        path = f"/rollouts/{begun['rollout_id']}/{view.replace('at-none', 'at-x')}"
        unknown = web.rest("GET", path if "at-x" in path else f"{path}{joint}attempt_id=at-x")
        assert unknown.status == 404 and "'at-x'" in unknown.json["detail"], unknown
    empty = {"outline": {"spans": [], "total": 0}, "conversation": {"calls": [], "total": 0, "spans_left_out": 0}}.get(view)
    if empty is not None:
        made = web.rest("POST", "/rollouts", {"input": 1}).json
        given = {"attempt_id": made["attempt"]["attempt_id"]}
        assert [web.rest("GET", f"/rollouts/{made['rollout_id']}/{view}", asked).json for asked in (None, given)] == [empty, empty]


def test_spans_of_a_rollout_that_the_queue_does_not_know_are_shown(web: Web) -> None:
    headers = {"Content-Type": "application/x-protobuf", conventions.HEADER_ACK: "stored"}
    sent = web.call("POST", "/v1/traces", span_request([("ro-stray", "at-stray")], spans=1).SerializeToString(), headers)
    assert sent.status == 200, sent
    assert web.rest("GET", "/rollouts/ro-stray/outline", {"attempt_id": "at-stray"}).json["total"] == 1


def test_bytes_that_are_not_text_are_shown_as_base64(web: Web, tmp_path: Path) -> None:
    made = web.rest("POST", "/rollouts", {"input": 1}).json
    rollout_id, attempt_id = made["rollout_id"], made["attempt"]["attempt_id"]
    sent = web.call("POST", "/v1/traces", with_bytes(rollout_id, attempt_id).SerializeToString(), OTLP)
    assert sent.status == 200, sent
    answer = web.rest("GET", "/spans", {"rollout_id": rollout_id})
    assert answer.status == 200, answer
    (listed,) = answer.json["items"]
    told = json.loads(run("traces", "show", rollout_id, "--json", "--store", web.url, cwd=tmp_path).stdout)
    (printed,) = told["spans"]
    for shown in (listed, printed):
        for place in (shown, shown["events"][0], shown["resource"]):
            assert (place["attributes"]["raw"], place["attributes"]["list"]) == ("//4=", ["//4="])
    assert "work" in run("traces", "show", rollout_id, "--store", web.url, cwd=tmp_path).stdout
    for view in ("outline", "conversation", "figures"):
        answer = web.rest("GET", f"/rollouts/{rollout_id}/{view}")
        assert answer.status == 200, answer
    (outlined,) = web.rest("GET", f"/rollouts/{rollout_id}/outline").json["spans"]
    assert outlined["name"] == "work"


def test_resources_have_versions(web: Web, begun: dict[str, Any]) -> None:
    page = web.rest("GET", "/resources/rs-views/versions", {"sort_order": "desc", "limit": 1}).json
    assert (page["total"], page["items"][0]["version"]) == (2, 2)
    assert web.rest("GET", "/resources/rs-views/versions/1").json["resources"] == {"p": PROMPT}
    for path, status in (
        ("rs-none/versions", 404),
        ("rs-views/versions/9", 404),
        ("rs-views/versions/x", 400),
        (f"rs-views/versions/{'9' * 5000}", 400),
    ):
        assert web.rest("GET", f"/resources/{path}").status == status


def test_a_conversation_gets_the_prompts_of_its_arm(web: Web) -> None:
    llm = {"resource_type": "llm", "endpoint": "http://m/v1", "model": "m"}
    better = {**PROMPT, "template": "Say it well."}
    given = {"main": llm, "p": PROMPT, "next": {**llm, "share": 0.5}, "next.p": better}
    web.rest("POST", "/resources/production", {"resources": given})
    web.rest("POST", "/resources/rs-served", {"resources": {"p": PROMPT}})
    talks = [f"talk {number}" for number in range(20)]
    found = {talk: web.rest("GET", "/resources/served", {"conversation_id": f" {talk} "}).json for talk in talks}
    assert {talk: each["arm"] for talk, each in found.items()} == {talk: "next" if drawn("next", talk) < 0.5 else "main" for talk in talks}
    assert all(each["prompts"] == {"p": better if each["arm"] == "next" else PROMPT} for each in found.values())
    assert {(each["resources_id"], each["version"]) for each in found.values()} == {("production", 1)}
    other = web.rest("GET", "/resources/served", {"conversation_id": "a", "resources_id": "rs-served"}).json
    assert (other["arm"], other["prompts"]) == ("", {"p": PROMPT})
    for asked, status in (
        ({}, 400), ({"conversation_id": " "}, 400), ({"conversation_id": "a\nb"}, 400), ({"conversation_id": "a" * 257}, 400),
        ({"conversation_id": "a", "resources_id": "rs-none"}, 404),
    ):  # fmt: skip
        assert web.rest("GET", "/resources/served", asked).status == status, asked


def test_sql_reads_and_only_reads(web: Web, begun: dict[str, Any]) -> None:
    answer = web.rest("POST", "/sql", {"query": "SELECT number AS n, 'a' AS t FROM numbers(5);", "limit": 2}).json
    assert answer == {"columns": ["n", "t"], "types": ["UInt64", "String"], "rows": [[0, "a"], [1, "a"]], "truncated": True}
    for query in ("DROP TABLE otel.otel_traces", "SELECT 1 INTO OUTFILE '/tmp/x'", "SELECT * FROM file('/etc/passwd')", "SELEC 1"):
        refused = web.rest("POST", "/sql", {"query": query})
        assert refused.status in (400, 403) and refused.json["detail"], (query, refused)


def test_a_limit_of_0_returns_nothing(web: Web, begun: dict[str, Any]) -> None:
    path = f"/rollouts/{begun['rollout_id']}"
    assert web.rest("GET", f"{path}/outline", {"limit": 0}).json == {"spans": [], "total": 3}
    conversation = web.rest("GET", f"{path}/conversation", {"limit": 0}).json
    assert (conversation["calls"], conversation["total"]) == ([], 2)
    answer = web.rest("POST", "/sql", {"query": "SELECT number AS n FROM numbers(5)", "limit": 0}).json
    assert answer == {"columns": ["n"], "types": ["UInt64"], "rows": [], "truncated": True}
    assert web.rest("GET", f"{path}/outline", {"limit": -1}).status == 400


def test_an_error_in_a_query_refers_to_the_query_as_written(web: Web) -> None:
    for query, says in (
        ("SELECT", "end of query"),
        ("SELECT 1 +", "end of query"),
        ("SELECT 1 FORMAT CSV;", "leave `FORMAT CSV` out"),
        ("SELECT nosuch FROM otel_traces", "nosuch"),
    ):
        refused = web.rest("POST", "/sql", {"query": query})
        assert refused.status == 400 and says in refused.json["detail"], refused
        assert "JSONCompact" not in refused.json["detail"], refused


def test_a_number_outside_json_is_null(web: Web) -> None:
    made = web.call("POST", "/v1/agl/rollouts", b'{"input": 1, "metadata": {"loss": NaN}}', {"Content-Type": "application/json"}).json
    assert b"NaN" not in web.rest("GET", f"/rollouts/{made['rollout_id']}").body


@pytest.mark.parametrize("number", ["1e999", "-1E+0400", "1" + "0" * 250 + "e99", "1" + "0" * 400 + ".5"])
def test_a_number_that_cannot_be_stored_is_refused(web: Web, number: str) -> None:
    for body in (f'{{"input": {{"limit": [{number}]}}}}', f'{{"input": 1, "metadata": {{"loss": {number}}}}}'):
        refused = web.call("POST", "/v1/agl/rollouts", body.encode(), {"Content-Type": "application/json"})
        assert refused.status == 400 and f"the number {number[:40]}" in refused.json["detail"], refused
    kept = {"large": 1.5e308, "text": "1e999", "small": 1e-300, "many": 10**300, "said": "e999, " + "9" * 300}
    made = web.rest("POST", "/rollouts", {"input": kept})
    assert made.status == 201 and web.rest("GET", f"/rollouts/{made.json['rollout_id']}").json["input"] == kept


def test_the_openapi_document_has_every_route(web: Web) -> None:
    document = web.call("GET", "/v1/agl/openapi.json").json
    documented = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert documented == {(route.method, "/v1/agl" + route.path) for route in TABLE}
    assert len({op["operationId"] for methods in document["paths"].values() for op in methods.values()}) == len(documented)


@pytest.mark.full
def test_the_service_conforms_to_its_openapi_document(web: Web, begun: dict[str, Any], tmp_path: Path) -> None:
    """Schemathesis generates valid and invalid requests; no route may fail or deviate from the document."""
    try:
        tool = installed("schemathesis", SCHEMATHESIS) / "bin" / "schemathesis"
    except AbsentError as reason:
        pytest.skip(str(reason))
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    options = [
        "--phases",
        "examples,coverage,fuzzing",
        "--max-examples",
        "4",
        "--seed",
        "7",
        "--generation-deterministic",
        "--checks",
        checks,
    ]
    wait = ["--exclude-path", "/v1/agl/waits/rollouts"]  # a wait lasts as long as the request says
    command = [str(tool), "run", f"{web.url}/v1/agl/openapi.json", "--no-color", *options, *wait]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
