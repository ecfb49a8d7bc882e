"""What doctor finds in an attempt: in each case one cross, its text and its remedy; what depends on it is skipped."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import pytest

from agl_otel.adapters import remedies
from agl_otel.cli.attempt_checks import CHECKS, OVERRIDDEN, examine, wrong_in
from agl_otel.cli.findings import Finding, wrong
from agl_otel.cli.once import FinishedAttempt
from agl_otel.runner.injection import install_line
from agl_otel.types import AttemptedRollout, AttemptLedger, AttemptStatus, LedgerReach, ProcessRecord, Span, VerdictKind
from agl_otel.types.sampling import Contract
from agl_otel_hook import conventions
from tests.unit.adapters.conftest import CallRow, TracesBuilder, reward
from tests.unit.adapters.spans import proxy_call, span

KEY = ("ro-1", "at-1")
OWN = span("own", 1, 2, **{conventions.PROCESS: "m"})
EMPTY = CallRow(prompt=[], response=[], incomplete="upstream_error")
"""A call without an answer."""
TRACEBACK = 'ValueError: no number\nTraceback (most recent call last):\n  File "agent.py", line 3, in <module>\n    raise ValueError'


def once(*rows: CallRow, spans: list[Span] | None = None, given: float | None = 1.0, verdict: VerdictKind = "complete") -> FinishedAttempt:
    """An attempt whose calls were recorded, with a span of its own, and a reward."""
    traces = TracesBuilder(verdict={KEY: verdict}, rewards={KEY: [] if given is None else [reward(given)]}).build(*rows)
    asked: list[dict[str, Any]] = [
        {conventions.LLM_CALL: row.call, conventions.LLM_CHOICE: row.choice}
        | ({conventions.LLM_INCOMPLETE: row.incomplete} if row.incomplete else {})
        for row in rows
    ]
    calls = [proxy_call(f"s{place}", place, place + 1, **attributes) for place, attributes in enumerate(asked)]
    return FinishedAttempt(cast("AttemptedRollout", traces.rollouts[0]), traces, [*calls, OWN] if spans is None else spans)


def answered(status: int, said: str = "", **attributes: Any) -> FinishedAttempt:
    """An attempt whose only call was answered by this status of HTTP."""
    found = once(EMPTY)
    more = {"http.response.status_code": status, conventions.LLM_INCOMPLETE: "upstream_status", **attributes}
    failed = found.spans[0].model_copy(update={"attributes": {**found.spans[0].attributes, **more}})
    failed.status.status_code, failed.status.description = "ERROR", said
    return replace(found, spans=[failed, OWN])


def ended(
    found: FinishedAttempt,
    *,
    error: str | None = None,
    status: AttemptStatus = "failed",
    ledger: AttemptLedger | None = None,
    **changes: Any,
) -> FinishedAttempt:
    """The attempt with another end."""
    attempt = found.rollout.attempt.model_copy(
        update={"error": error, "status": status if error is not None else "succeeded", "ledger": ledger}
    )
    rollout = found.rollout.model_copy(update={"attempt": attempt, "status": "failed" if error is not None else "succeeded"})
    return replace(found, rollout=rollout, traces=replace(found.traces, rollouts=[rollout]), **changes)


def ledger(reach: LedgerReach, command: str, *processes: str) -> AttemptLedger:
    return AttemptLedger(reach=reach, command=command, processes=[ProcessRecord(pid=1, command=each, marker="m") for each in processes])


def asking(own: dict[str, float]) -> FinishedAttempt:
    """An attempt whose only call was asked for by the agent with parameters of its own."""
    contract = Contract.of(own, {}, "temperature, top_p")
    found = once(CallRow(temperature=own.get("temperature", 1.0), top_p=own.get("top_p", 1.0)))
    call = found.spans[0].model_copy(update={"attributes": {**found.spans[0].attributes, conventions.LLM_SAMPLING: contract.dumps()}})
    return replace(found, spans=[call, OWN])


NO_CALLS = once(verdict="empty", given=None, spans=[])
DIRECT = span("direct", 1, 2, **{conventions.PROCESS: "m", "gen_ai.request.model": "gpt", "server.address": "api.openai.com"})
ADDRESS = "the agent must take its model's address from OPENAI_BASE_URL (or OPENAI_API_BASE, ANTHROPIC_BASE_URL, GOOGLE_GEMINI_BASE_URL)"
PROTOCOL = "let the agent use one of the protocols that the proxy has (docs/model-servers.md#the-protocols-of-agents)"

WRONG = {
    "the agent raises": (
        ended(once(CallRow()), error=f"python ended with exit code 1: {TRACEBACK}"),
        "the command ended well: python ended with exit code 1: ValueError: no number",
        "run it by hand and mend it first",
    ),
    "the agent takes too long": (
        ended(NO_CALLS, error="the agent ran past the attempt's 120 s", status="timeout"),
        "the command ended well: the agent ran past the attempt's 120 s",
        "give it longer: --timeout SECONDS",
    ),
    "the model server fails, and so does the agent": (
        ended(answered(500, "told to fail"), error="python ended with exit code 1: openai.InternalServerError"),
        "the model answers its calls: 0 of 1: HTTP 500: told to fail",
        "see the log of the model server",
    ),
    "the model server does not have the model": (
        answered(404, "The model `gpt` does not exist."),
        "the model answers its calls: 0 of 1: HTTP 404: The model `gpt` does not exist.",
        "is the model's name one that the server has (OPENAI_MODEL), and does its address end in /v1?",
    ),
    "the model server lacks Responses": (
        answered(501),
        "the model answers its calls: 0 of 1: the model server does not have the protocol of the call, Responses (of OpenAI)",
        "let the agent use chat/completions, or set AGL_LITELLM, so that such calls are translated",
    ),
    "the model server lacks Messages": (
        answered(501, **{"gen_ai.provider.name": "anthropic"}),
        "the model answers its calls: 0 of 1: the model server does not have the protocol of the call, Messages (of Anthropic)",
        "let the agent use chat/completions, or set AGL_LITELLM, so that such calls are translated",
    ),
    "the model server refuses the key": (
        answered(401, "invalid api key"),
        "the model answers its calls: 0 of 1: HTTP 401: invalid api key",
        "set OPENAI_API_KEY (of a stack that runs already: AGL_UPSTREAM_KEY) to a key of this server",
    ),
    "the model server refuses a field": (
        answered(400, "top_k is not supported by this server"),
        "the model answers its calls: 0 of 1: HTTP 400: top_k is not supported by this server",
        "the model server does not take top_k as the agent sends it: leave it out of the agent's requests, or use a server that takes it",
    ),
    "the model server refuses a request": (
        answered(400, "the prompt has 2000 tokens; the model's context is 1024, reply included"),
        "the model answers its calls: 0 of 1: HTTP 400: the prompt has 2000 tokens; the model's context is 1024, reply included",
        "change what the model server refuses in the agent's requests, or use a server that takes it",
    ),
    "the hook is loaded nowhere": (
        ended(NO_CALLS, ledger=ledger("hooked", "python -I agent.py")),
        "it runs under the hook: it was loaded in no process of python -I agent.py",
        "does it replace its process, its environment (env={…} without **os.environ) or Python's path (python -I, -S, -E)? "
        "Then the hook is not loaded: pass the environment on",
    ),
    "the agent calls no model": (
        ended(NO_CALLS, ledger=ledger("hooked", "python", "python agent.py")),
        "its model calls pass through the proxy: none",
        ADDRESS,
    ),
    "the agent calls its model at a path that the proxy does not have": (
        replace(NO_CALLS, unknown_paths={"/v9/images": 2, "/v9/audio": 1}),
        "its model calls pass through the proxy: none; 3 requests came at paths that it does not have: /v9/images (2), /v9/audio (1)",
        PROTOCOL,
    ),
    "the agent calls its model directly": (
        replace(NO_CALLS, spans=[DIRECT]),
        "its model calls pass through the proxy: none; its own spans show 1 call to api.openai.com",
        f"its code names the model's address: {ADDRESS}",
    ),
    "DSPy's cache answers": (
        replace(NO_CALLS, packages={"dspy": "3.0"}),
        "its model calls pass through the proxy: none",
        f"{ADDRESS}. DSPy keeps replies in a cache on the disk, so that a repeated task calls nothing: "
        "dspy.configure_cache(enable_disk_cache=False, enable_memory_cache=False)",
    ),
    "a hosted model": (
        once(CallRow(prompt=[], response=[])),
        "token ids come with them: 0 of 1 call",
        "the model server must support return_token_ids: vLLM 0.10.2 or newer, SGLang, or this package's. Hosted models do not return "
        "token ids. Messages and Responses mostly lack them: with litellm (AGL_LITELLM) such calls are sent to chat/completions",
    ),
    "no log-probs": (
        once(CallRow(), CallRow(call=2, logprobs=[])),
        "and log-probs: 1 of 2 calls",
        "the model server must return the log-probs of the distribution that it samples from: vLLM with --logprobs-mode processed_logprobs",
    ),
    "a reward that is no number": (
        once(CallRow(), given=math.nan),
        "it has a reward: nan",
        "a reward is a finite number of at most 1e9 either way",
    ),
    "a grader without a reward": (
        replace(once(CallRow(), given=None), graded=True),
        "it has a reward: none: the grader returned None",
        "return a number; attempts without a reward are not trained on",
    ),
    "a grader that raises": (
        ended(once(CallRow(), given=None), error="grader grade raised KeyError: 'x'", graded=True),
        "it has a reward: grader grade raised KeyError: 'x'",
        "correct the grader",
    ),
    "spans are lost": (
        once(CallRow(), verdict="incomplete"),
        "everything it emitted is stored: incomplete",
        "a process that is killed, or ends by os._exit, loses its last spans",
    ),
    "greedy calls": (
        once(CallRow(temperature=0.0)),
        "training takes its calls: none",
        'let the agent set no temperature, or one of at least 0.01, or let GRPO replace it: sampling_policy = "enforce_all"',
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_one_cause_is_one_cross(case: str) -> None:
    given, text, remedy = WRONG[case]
    found = examine(given)
    (cross,) = [each for each in found if each.state == "wrong"]
    assert (f"{cross.what}: {cross.detail}", cross.remedy) == (text, remedy)
    for each in found:
        if each.state == "skipped":
            assert each.detail.endswith(f"(first: {cross.what})") and not each.remedy


ADVICE = {
    "no reward yet": (
        once(CallRow(), given=None),
        "it has a reward: none yet",
        "attempts without one are not trained on: check your grader here with --grader FILE.py:function, "
        "or emit one (agl_otel.emit_reward)",
    ),
    "several trajectories": (
        once(CallRow(), CallRow(call=2, prompt=[9])),
        "its calls make one trajectory: 2 calls make 2, each with the attempt's reward",
        "only add to the conversation, in one list of messages",
    ),
    "a program that the runner cannot hook": (
        ended(once(CallRow(), spans=once(CallRow()).spans[:1]), ledger=ledger("unhooked", "uv run agent")),
        "it runs under the hook: no: it was loaded in no process of uv run agent",
        "its model calls are recorded all the same. Its own spans are, too, if they come from Python 3.10 to 3.13 with OpenTelemetry's "
        "SDK, which --inject brings, and with the environment of its command (not python -I, -E or -S)",
    ),
    "a Python without this package": (
        ended(once(CallRow(), spans=once(CallRow()).spans[:1]), ledger=ledger("unhooked", "/usr/bin/python3 agent.py")),
        "it runs under the hook: no: it was loaded in no process of /usr/bin/python3 agent.py",
        "it is loaded when OpenTelemetry, a model's SDK or a framework is imported, in Python 3.10 to 3.13 with OpenTelemetry's SDK: "
        f"--inject brings that, or {install_line()} into its environment",
    ),
    "an agent without an instrumented library": (
        once(CallRow(), spans=once(CallRow()).spans[:1]),
        "its own spans arrive, with ids and marker: none",
        "to see its steps, install the instrumentation of a library that it uses (opentelemetry-instrumentation-…), or switch on its "
        "framework's own telemetry. Its model calls are recorded all the same",
    ),
    "a provider in the agent's code": (
        replace(once(CallRow()), printed=f"{OVERRIDDEN}\n"),
        "its telemetry goes where it went before: no: its code sets a tracer provider of its own, which is not used",
        "the hook's provider is there first, so spans made by libraries go to this stack alone. To keep the copy, start the stack with "
        "AGL_FORWARD_OTLP=ADDRESS (and AGL_FORWARD_HEADERS)",
    ),
    "agents without names beside others": (
        once(CallRow(agent="planner"), CallRow(call=2, prompt=[1, 2, 3, 7, 8, 4], agent="")),
        "its agents have names: 1 of 2 calls has none",
        "agent_match cannot tell them: give each agent a name, as in Agent(name=…)",
    ),
    "an agent with an empty name": (
        once(CallRow(), spans=[*once(CallRow()).spans, span("a", 1, 2, **{conventions.PROCESS: "m", "gen_ai.agent.name": ""})]),
        "its agents have names: 1 of 1 call has none",
        "agent_match cannot tell them: give each agent a name, as in Agent(name=…)",
    ),
    "a temperature of the agent's own": (
        asking({"temperature": 0.2}),
        "it leaves the temperature to training: 1 of 1 call sets temperature 0.2",
        "GRPO scores such calls at their own temperature, verl refuses them. To sample at the run's, leave it out, or let GRPO replace it: "
        'sampling_policy = "enforce" (docs/training.md#sampling)',
    ),
    "a last call that failed, and the agent went on": (
        once(CallRow(), CallRow(call=2, incomplete="upstream_error")),
        "the model answers its calls: 1 of 2: upstream_error",
        "calls without an answer are not trained on",
    ),
    "a call that failed before others": (
        once(CallRow(incomplete="upstream_error"), CallRow(call=2)),
        "the model answers its calls: 1 of 2: upstream_error",
        "calls without an answer are not trained on",
    ),
}


@pytest.mark.parametrize("case", ADVICE)
def test_what_does_not_prevent_training_is_advice(case: str) -> None:
    given, text, remedy = ADVICE[case]
    found = examine(given)
    assert all(each.state != "wrong" for each in found), found
    assert (text, remedy) in [(f"{each.what}: {each.detail}", each.remedy) for each in found if each.state == "advice"], found


def test_a_good_attempt_is_good_in_all() -> None:
    found = examine(ended(once(CallRow()), ledger=ledger("hooked", "python", "python agent.py")))
    assert {each.state for each in found} == {"good"} and len(found) >= len(CHECKS) - 4


def test_the_temperature_of_a_run_and_what_training_refuses_anyway_are_no_advice_of_their_own() -> None:
    def told(**own: float) -> tuple[tuple[str, str], tuple[str, str]]:
        found = details(asking(own))
        return found["it leaves the temperature to training"], found["training takes its calls"]

    assert told() == (("good", "no model call sets it"), ("good", "all"))
    assert told(temperature=1) == (("good", "1 of 1 call sets temperature 1, the default of a run"), ("good", "all"))
    assert told(top_p=0.9) == (("good", "no model call sets it"), ("wrong", "none"))
    assert told(temperature=0)[1] == ("wrong", "none") and told(temperature=0)[0][0] == "good"


def test_what_nobody_sends_is_advice_because_a_job_sends_it() -> None:
    contract = Contract.of({"max_tokens": 8}, {})
    found = once(CallRow(temperature=math.nan), CallRow(call=2))
    found.traces.calls.contract[0] = contract.dumps()
    (sent,) = [each for each in examine(found) if each.what == "no sampling parameter is left to the model server"]
    assert (sent.state, sent.detail) == ("advice", "1 of 2 calls left temperature, top_p, top_k, min_p, repetition_penalty to it")
    assert sent.remedy == f"in a job nothing: its resource sends them. Else {remedies.SAMPLING['unsent']}"
    assert details(found)["training takes its calls"] == ("good", "all, in a job")


def test_the_exception_is_first_and_whole_and_its_traceback_below() -> None:
    error = f"python ended with exit code 1: ValueError: {'x' * 1000}\nTraceback (most recent call last):\n  File …"
    (command,) = [each for each in examine(ended(once(CallRow()), error=error)) if each.state == "wrong"]
    assert command.detail.endswith("x" * 1000) and command.reasons == ["Traceback (most recent call last):", "  File …"]


def test_reasons_of_trajectories_and_refusals_are_listed() -> None:
    found = {each.what: each for each in examine(once(CallRow(), CallRow(call=2, prompt=[9]), CallRow(call=3, temperature=0.0)))}
    assert found["its calls make one trajectory"].reasons == [
        "1 × branch: it repeats an earlier prompt, or continues an earlier call that another call of its trajectory has continued already",
        "1 × prompt_changed: it does not start with an earlier prompt; its messages are unknown",
    ]
    refused = found["training takes its calls"]
    assert (refused.state, refused.detail) == ("advice", "2 of 3 calls")
    assert refused.reasons[0].startswith("1 × greedy: ")


def test_what_was_found_around_the_agent_spoils_too() -> None:
    before = [wrong("a variable", "off", "unset it", spoils=("stored",))]
    found = [each.detail for each in examine(once(CallRow(), verdict="incomplete"), before) if each.state == "skipped"]
    assert found == ["incomplete (first: a variable)", "none (first: a variable)"]


def test_run_tells_what_is_wrong_but_for_the_error_and_the_verdict_that_it_shows() -> None:
    def told(found: FinishedAttempt) -> list[str]:
        return [each.what for each in wrong_in(found)]

    assert told(once(CallRow())) == told(once(CallRow(), verdict="incomplete")) == told(once(CallRow(), given=None)) == []
    assert told(ended(NO_CALLS, error="python ended with exit code 1")) == []
    assert told(NO_CALLS) == ["its model calls pass through the proxy"]
    assert told(replace(once(CallRow()), printed=OVERRIDDEN)) == ["its telemetry goes where it went before"]


def details(found: FinishedAttempt) -> dict[str, tuple[str, str]]:
    return {each.what: (each.state, each.detail) for each in examine(found)}


def test_choices_of_one_call_count_as_one_and_give_advice() -> None:
    found = details(once(*(CallRow(choice=choice) for choice in range(3)), CallRow(call=2)))
    assert found["its model calls pass through the proxy"] == ("good", "2 calls")
    assert found["token ids come with them"] == found["and log-probs"] == ("good", "2 of 2 calls")
    assert found["each call asks for one choice"][0] == "advice"
    assert "each call asks for one choice" not in details(once(CallRow(), CallRow(call=2)))


def test_a_call_with_one_choice_without_log_probs_counts_as_without() -> None:
    found = details(once(CallRow(choice=0), CallRow(choice=1, logprobs=[]), CallRow(call=2)))
    assert found["token ids come with them"] == ("good", "2 of 2 calls")
    assert found["and log-probs"] == ("wrong", "1 of 2 calls")


def test_calls_without_an_answer_are_not_missed_among_those_with_token_ids() -> None:
    refused = CallRow(prompt=[], response=[], incomplete="upstream_status")
    found = details(once(CallRow(), replace(refused, call=2)))
    assert found["token ids come with them"] == found["and log-probs"] == ("good", "1 of 1 call")
    assert found["the model answers its calls"][0] == "advice"
    cut = CallRow(prompt=[], response=[], call=2, incomplete="client_gone")
    assert details(once(CallRow(), cut))["token ids come with them"] == ("wrong", "1 of 2 calls")


def test_every_finding_is_printable_as_json() -> None:
    assert Finding("what", "good", "yes").as_json() == {"what": "what", "state": "good", "detail": "yes", "remedy": "", "reasons": ()}
