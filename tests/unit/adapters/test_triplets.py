from __future__ import annotations

import json
from typing import Any

import pytest

from agl_otel.adapters import LlmProxyTraceToTriplet, RewardMatchPolicy, TracerTraceToTriplet, TraceToMessages, TraceTree
from agl_otel.types import Event, Span
from agl_otel_hook import conventions
from tests.unit.adapters.spans import call, proxy_call, reward, span


def names(tree: TraceTree) -> object:
    return (tree.id, [names(child) for child in tree.children]) if tree.children else tree.id


def rewards(spans: list[Span], **options: object) -> list[float | None]:
    return [triplet.reward for triplet in TracerTraceToTriplet(**options)(spans)]  # type: ignore[arg-type] - rows of any kind


def test_triplet_has_tokens_content_and_metadata() -> None:
    asked = call(
        "a", 1, 2, "root", gen_ai__request__model="m", gen_ai__response__model="m-1", logprobs__content='[{"token": "x", "logprob": -1}]'
    )
    triplet = TracerTraceToTriplet()([span("root", 0, 9), asked, reward("r", 3, 0.5, "root")])[0]
    assert triplet.prompt == {"token_ids": [1, 2], "raw_content": [{"role": "user", "content": "ask a"}], "image_urls": []}
    assert triplet.response == {"token_ids": [3], "raw_content": [{"role": "assistant", "content": "answer a"}], "logprobs": [-1]}
    assert triplet.metadata == {
        "request": {"model": "m"},
        "response": {"id": "id-a", "model": "m-1"},
        "response_id": "id-a",
        "agent_name": "*",
    }
    assert triplet.reward == 0.5


def test_no_spans_and_a_circle_of_spans_are_errors() -> None:
    with pytest.raises(ValueError, match="no spans"):
        TracerTraceToTriplet()([])
    with pytest.raises(ValueError, match="circle"):
        TraceTree.from_spans([span("a", 0, 1, "b"), span("b", 0, 1, "a")])


def test_missing_parents_and_a_common_root_are_made_up() -> None:
    tree = TraceTree.from_spans([span("b", 2, 5, "gone"), span("a", 1, 2), span("c", 3, 4, "gone")])
    assert names(tree) == ("virtual-root", ["a", ("gone", ["b", "c"])])
    assert (tree.start_time, tree.end_time) == (1, 5)


def test_a_span_beside_its_enclosing_span_is_moved_below_it() -> None:
    tree = TraceTree.from_spans([span("root", 0, 9), span("agent", 1, 8, "root"), span("tight", 2, 5, "agent"), span("lost", 3, 4, "root")])
    tree.repair_hierarchy()
    assert names(tree) == ("root", [("agent", [("tight", ["lost"])])])


def test_repair_never_moves_a_span_up() -> None:
    inner = [span("a", 3, 4, "agent"), span("b", 5, 6, "agent")]
    tree = TraceTree.from_spans([span("root", 0, 9), span("chain", 1, 8, "root"), span("agent", 2, 7, "chain"), *inner])
    tree.repair_hierarchy()
    assert names(tree) == ("root", [("chain", [("agent", ["a", "b"])])])


def test_repair_never_moves_a_span_below_itself() -> None:
    tree = TraceTree.from_spans([span("root", 0, 9), span("a", 2, 4, "root"), span("inside", 1, 8, "a"), span("b", 5, 6, "root")])
    tree.repair_hierarchy()
    assert sorted(node.id for node in tree.traverse()) == ["a", "b", "inside", "root"]


def test_reward_goes_to_the_last_call_that_ended_and_has_none() -> None:
    spans = [
        span("root", 0, 9),
        call("a", 1, 2, "root"),
        call("b", 2, 5, "root"),
        reward("r1", 3, 0.1, "root"),
        reward("r2", 6, 0.2, "root"),
    ]
    assert rewards(spans) == [0.1, 0.2]
    assert rewards([*spans, reward("r3", 7, 0.3, "root")]) == [0.1, 0.2]


def test_sibling_policy_looks_beside_the_reward_only() -> None:
    spans = [span("root", 0, 9), span("x", 0, 4, "root"), span("y", 4, 9, "root"), call("a", 1, 2, "x"), reward("r", 5, 1.0, "y")]
    spans += [call("b", 4.5, 4.8, "y")]
    assert rewards(spans, repair_hierarchy=False) == [None, 1.0]
    spans[-1] = call("b", 6, 7, "y")
    assert rewards(spans, repair_hierarchy=False, reward_match=RewardMatchPolicy.FIRST_OCCURRENCE) == [1.0, None]
    assert rewards(spans, repair_hierarchy=False, reward_match="first_sibling") == [None, None]


def test_final_reward_is_the_last_triplets() -> None:
    adapter = TracerTraceToTriplet()
    tree = adapter.tree([span("root", 0, 9), call("a", 1, 2, "root"), call("b", 3, 4, "root")])
    assert [triplet.reward for triplet in adapter.to_trajectory(tree, final_reward=2.0)] == [None, 2.0]


def test_agents_are_selected_by_the_nearest_one_around_a_call() -> None:
    spans = [
        span("root", 0, 20, agent__name="team"),
        span("w", 1, 9, "root", agentops__span__kind="agent", operation__name="write"),
        call("a", 2, 3, "w"),
        span("c", 4, 8, "w", recipient_agent_type="check"),
        call("b", 5, 6, "c"),
        call("d", 10, 11, "root"),
    ]
    found = TracerTraceToTriplet(agent_match="write|check")(spans)
    assert [(t.metadata["response_id"], t.metadata["agent_name"]) for t in found] == [("id-a", "write"), ("id-b", "check")]
    assert [t.metadata["response_id"] for t in TracerTraceToTriplet(agent_match="^write$")(spans)] == ["id-a"]
    assert [t.metadata["agent_name"] for t in TracerTraceToTriplet()(spans)] == ["write", "check", "team"]


def evaluated(source: Span, value: float, at: float = 1.0, response: str = "", **more: bool) -> Span:
    given = {conventions.EVALUATION_NAME: "judge", conventions.EVALUATION_SCORE: value, conventions.RESPONSE_ID: response}
    return source.model_copy(
        update={"events": [*source.events, Event(name=conventions.EVALUATION, attributes=given, timestamp=at, **more)]}
    )


@pytest.mark.parametrize("adapter", [TracerTraceToTriplet(), LlmProxyTraceToTriplet()], ids=["spans", "proxy"])
def test_an_evaluation_is_of_the_call_of_its_span_or_of_its_response(adapter: TracerTraceToTriplet | LlmProxyTraceToTriplet) -> None:
    """One on an agent's span is of no call, and does not make a judge of the agent."""
    calls = [proxy_call(name, 2 * n + 1, 2 * n + 2, "root", **{conventions.LLM_CALL: n + 1}) for n, name in enumerate("abcd")]
    calls[1] = evaluated(evaluated(calls[1], 0.9, 3), 0.2, 4)
    calls[2] = evaluated(calls[2], 0.6, 5, is_record=True, is_of_attempt=True)
    root = evaluated(evaluated(span("root", 0, 20), 0.7), 0.1, response="id-a")
    assert [triplet.reward for triplet in adapter([root, *calls, reward("r", 9, 0.4, "root")])] == [0.1, 0.2, None, 0.4]


def test_calls_of_a_judge_are_left_out_unless_wanted() -> None:
    judge = span("j", 4, 8, "root", name=conventions.SPAN_OPERATION, agentlightning__operation__name=conventions.SPAN_REWARD)
    spans = [span("root", 0, 9), call("a", 1, 2, "root"), judge, call("b", 5, 6, "j")]
    assert len(TracerTraceToTriplet()(spans)) == 1
    assert len(TracerTraceToTriplet(exclude_llm_call_in_reward=False)(spans)) == 2


def test_two_instrumentations_of_one_call_count_once() -> None:
    same = {"gen_ai__response__id": "x"}
    assert len(TracerTraceToTriplet()([span("root", 0, 9), call("a", 1, 4, "root", **same), call("b", 2, 3, "a", **same)])) == 1
    assert len(TracerTraceToTriplet()([span("root", 0, 9), call("a", 1, 4, "root", **same), call("b", 5, 6, "root", **same)])) == 1
    nameless = call("a", 1, 4, "root", gen_ai__response__id="")
    assert len(TracerTraceToTriplet()([span("root", 0, 9), nameless, call("b", 2, 3, "a")])) == 1
    assert len(TracerTraceToTriplet()([span("root", 0, 9), call("a", 1, 4, "root"), call("b", 2, 3, "a")])) == 2


def test_of_two_calls_with_one_response_id_the_first_counts() -> None:
    """A model server may name every reply alike."""
    same = {"gen_ai__response__id": "x"}
    blank: dict[str, Any] = {**same, "prompt_token_ids": [], "response_token_ids": []}
    later: dict[str, Any] = {conventions.LLM_CALL: 2, conventions.LLM_RESPONSE_TOKEN_IDS: [4], **same}
    calls = [call("a", 1, 4, "root", **same), call("c", 5, 8, "root", response_token_ids=[4], **same)]
    untold = [call("a", 1, 4, "root", **blank), call("c", 5, 8, "root", **blank)]
    inside = [proxy_call("b", 2, 3, "a", **same), proxy_call("d", 6, 7, "c", **later)]
    beside = [proxy_call("b", 2, 3, "root", **same), proxy_call("d", 6, 7, "root", **later)]
    for name, spans, tokens in (
        ("calls alone", calls, [3]),
        ("inside", [*untold, *inside], [9]),
        ("calls with others inside", [*calls, *inside], [9]),
        ("beside", [*untold, *beside], [9]),
        ("alone", beside, [9]),
    ):
        triplets = TracerTraceToTriplet(repair_hierarchy=False)([span("root", 0, 9), *spans])
        assert [t.response["token_ids"] for t in triplets] == [tokens], name
    assert [t.response["token_ids"] for t in LlmProxyTraceToTriplet()(beside)] == [[9]]


def test_the_proxys_tokens_join_the_agents_instrumentation() -> None:
    agents = call("a", 1, 4, "root", gen_ai__response__id="x", prompt_token_ids=[], response_token_ids=[])
    triplet = TracerTraceToTriplet()([span("root", 0, 9), agents, proxy_call("b", 2, 3, "a", gen_ai__response__id="x")])[0]
    assert (triplet.prompt["token_ids"], triplet.response["token_ids"], triplet.response["logprobs"]) == ([7, 8], [9], [-0.5])
    assert triplet.prompt["raw_content"] == [{"role": "user", "content": "ask a"}]


def test_the_last_try_of_a_call_repeated_by_an_sdk_counts() -> None:
    again: dict[str, Any] = {conventions.LLM_CALL: 2, conventions.LLM_RETRY_OF: 1, conventions.LLM_RESPONSE_TOKEN_IDS: [4]}
    tries = [proxy_call("b", 2, 3, "a", gen_ai__response__id="lost"), proxy_call("c", 3, 4, "a", gen_ai__response__id="used", **again)]
    agents = call("a", 1, 5, gen_ai__response__id="used", prompt_token_ids=[], response_token_ids=[])
    for spans in ([agents, *tries], tries):
        for adapter in (TracerTraceToTriplet(), LlmProxyTraceToTriplet()):
            assert [t.response["token_ids"] for t in adapter(spans)] == [[4]], (adapter, len(spans))


def test_prompts_in_prefix_form_are_expanded() -> None:
    follow_up: dict[str, Any] = {conventions.LLM_PREFIX_CALL: 1, conventions.LLM_PREFIX_CHOICE: 0, conventions.LLM_PROMPT_TOKEN_IDS: [5]}
    spans = [span("root", 0, 9), proxy_call("a", 1, 2, "root"), proxy_call("b", 3, 4, "root", **{conventions.LLM_CALL: 2, **follow_up})]
    for adapter in (TracerTraceToTriplet(), LlmProxyTraceToTriplet()):
        assert [t.prompt["token_ids"] for t in adapter(spans)] == [[7, 8], [7, 8, 9, 5]]
    assert [t.prompt["token_ids"] for t in TracerTraceToTriplet()([spans[0], spans[2]])] == [[]]
    assert LlmProxyTraceToTriplet()([spans[2]]) == []


def test_further_choices_of_a_call_are_triplets_of_their_own() -> None:
    second: dict[str, Any] = {conventions.LLM_CHOICE: 1, conventions.LLM_RESPONSE_TOKEN_IDS: [4]}
    choice = proxy_call("c", 2, 3, "a", gen_ai__response__id="x", **second)
    spans = [call("a", 1, 4, gen_ai__response__id="x"), proxy_call("b", 2, 3, "a", gen_ai__response__id="x"), choice]
    assert [t.response["token_ids"] for t in TracerTraceToTriplet()(spans)] == [[9], [4]]


def test_a_pattern_is_taken_literally() -> None:
    spans = [
        span("root", 0, 9),
        call("a", 1, 2, "root"),
        span("b", 3, 4, "root", name="my.call", prompt_token_ids=[1], response_token_ids=[2]),
    ]
    assert len(TracerTraceToTriplet()(spans)) == 1
    assert [t.response["token_ids"] for t in TracerTraceToTriplet(llm_call_match=r"^my\.call$")(spans)] == [[2]]
    assert TracerTraceToTriplet(llm_call_match="nothing")(spans) == []


def test_the_default_pattern_of_0_3_finds_calls_under_the_names_of_today() -> None:
    today = call("a", 1, 2, "root").model_copy(update={"name": "openai.chat"})
    spans = [span("root", 0, 9), today, call("b", 3, 4, "root")]
    assert len(TracerTraceToTriplet(llm_call_match=r"openai\.chat\.completion")(spans)) == 2
    assert len(TraceToMessages(llm_call_match=r"openai\.chat\.completion")(spans)) == 2


def test_calls_without_tokens_are_skipped_on_request() -> None:
    spans = [span("root", 0, 9), call("a", 1, 2, "root", prompt_token_ids=[]), call("b", 3, 4, "root")]
    assert len(TracerTraceToTriplet()(spans)) == 2
    assert len(TracerTraceToTriplet(_skip_empty_token_spans=True)(spans)) == 1


def test_images_are_kept() -> None:
    content = json.dumps([{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": "https://x/cat.png"}}])
    triplet = TracerTraceToTriplet()([call("a", 1, 2, gen_ai__prompt__0__content=content)])[0]
    assert triplet.prompt["image_urls"] == ["https://x/cat.png"]


def test_ten_thousand_nested_spans_and_calls_are_handled() -> None:
    deep = [span(f"s{i}", i / 1e4, 10, f"s{i - 1}" if i else None) for i in range(10_000)]
    assert len(TracerTraceToTriplet()([*deep, call("a", 2, 3, "s9999")])) == 1
    wide = [span("root", 0, 1e6), *(call(f"c{i}", 2 * i + 1, 2 * i + 2, "root") for i in range(2_000))]
    assert len(TracerTraceToTriplet()(wide)) == 2_000


def test_the_proxy_adapter_follows_sequence_numbers_and_reads_litellms_spans() -> None:
    raw = span("x", 5, 6, name="raw_gen_ai_request", **{"llm.hosted_vllm.prompt_token_ids": "[1, 2]", "llm.hosted_vllm.id": "i"})
    raw.attributes["llm.hosted_vllm.choices"] = "[{'token_ids': [3, 4], 'index': 0, 'x': None}]"
    outer = span("y", 5.1, 6, name="litellm_request", prompt_token_ids=[1, 2], response_token_ids=[3, 4], gen_ai__response__id="i")
    late = reward("r", 9, 0.5)
    late.start_time = 0.0
    found = LlmProxyTraceToTriplet()([late, outer, raw, call("a", 1, 2), span("z", 7, 8, name="litellm_request", prompt_token_ids=[1])])
    assert [(t.prompt, t.response["token_ids"], t.reward, t.metadata) for t in found] == [
        ({"token_ids": [1, 2]}, [3, 4], 0.5, {"response_id": "i"})
    ]
