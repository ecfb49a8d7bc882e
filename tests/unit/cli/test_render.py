from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from agl_otel.cli.output import plain, table_of
from agl_otel.cli.render import SHOWN_CHARACTERS, attempt_tree, span_trees
from agl_otel.spans.conversations import read_call
from agl_otel.spans.log_records import with_records
from agl_otel.types import Attempt, Event, Rollout, Span, Verdict
from agl_otel.types.sampling import Contract
from agl_otel_hook import conventions
from tests.unit.adapters.spans import RECORDED, recorded


def span(name: str, span_id: str, parent: str | None = None, start: float = 0.0, **attributes: object) -> Span:
    return Span(
        rollout_id="ro-1", attempt_id="at-1", sequence_id=1, trace_id="t", span_id=span_id, parent_id=parent, name=name,
        start_time=start, end_time=start + 0.01, attributes=attributes,
    )  # fmt: skip


def rendered(spans: list[Span], *, messages: bool = False, sampling: dict[str, Any] | None = None) -> str:
    console = Console(width=200, file=io.StringIO())
    console.print(*span_trees(spans, messages=messages, sampling=sampling or {}))
    return console.file.getvalue()  # type: ignore[attr-defined]  # it is the StringIO above


def test_a_tree_follows_parents_and_orders_by_start() -> None:
    text = rendered([span("late", "c", "a", 2), span("root", "a"), span("early", "b", "a", 1)])
    assert [line.split()[-3] for line in text.splitlines()] == ["root", "early", "late"], text


def test_a_span_whose_parent_is_elsewhere_is_a_root_and_seals_are_left_out() -> None:
    text = rendered([span("alone", "a", "not-here"), span(conventions.SPAN_SEAL, "s")])
    assert "alone" in text and "seal" not in text


def test_spans_in_a_parent_cycle_are_shown() -> None:
    text = rendered([span("x", "a", "b"), span("y", "b", "a")])
    assert "x " in text and "y " in text


def test_a_deep_trace_is_shown_whole() -> None:
    spans = [span(f"s{i}", str(i), str(i - 1) if i else None) for i in range(3000)]
    assert len(span_trees(spans)) == 1


def test_rewards_and_tokens_are_highlighted() -> None:
    attributes = {
        conventions.LLM_CALL: 1,
        conventions.LLM_PROMPT_TOKEN_IDS: [1, 2],
        conventions.LLM_RESPONSE_TOKEN_IDS: [3],
        conventions.LLM_MODEL_VERSION: "7",
    }
    reward = {conventions.reward_name_key(0): "primary", conventions.reward_value_key(0): 0.5}
    text = rendered([span("call", "a", None, 0, **attributes), span("grade", "b", None, 1, **reward)])
    assert "2 + 1 tokens, weights 7" in text and "primary = 0.5" in text
    cached = span("call", "a", None, 0, **attributes, **{"gen_ai.usage.cache_read.input_tokens": 1})
    assert "2 (1 cached) + 1 tokens, weights 7" in rendered([cached])


def test_a_bridge_is_shown_or_why_there_is_none() -> None:
    def line(recorded: object) -> str:
        return rendered([span("call", "a", None, 0, **{conventions.LLM_BRIDGE: recorded})])

    assert "continues the tokens of call 3\n" in line('{"call": 3, "choice": 0, "template": {"tokens": 812, "shared": 640}}')
    assert "not bridged: edited\n" in line('{"refused": "edited"}')
    for odd in ("{", "[1]", '{"refused": 7}', "null", 7):
        assert "bridged" not in line(odd) and "continues" not in line(odd)


def test_evaluations_are_highlighted_as_rewards() -> None:
    given = {conventions.EVALUATION_NAME: "judge", conventions.EVALUATION_LABEL: "pass"}
    call = span("call", "a", None, 0).model_copy(update={"events": [Event(name=conventions.EVALUATION, attributes=given, timestamp=1.0)]})
    assert "judge = 1 (pass)\n" in rendered([call])


def feedback_on(on: Span, value: float | None = None, *, of_attempt: bool = False, **fields: str) -> Span:
    given: dict[str, Any] = {conventions.EVALUATION_NAME: "feedback"} | ({} if value is None else {conventions.EVALUATION_SCORE: value})
    keys = {"label": conventions.EVALUATION_LABEL, "text": conventions.EVALUATION_TEXT, "correction": conventions.FEEDBACK_CORRECTION}
    keys |= {"source": conventions.FEEDBACK_SOURCE, "rubric": conventions.FEEDBACK_RUBRIC}
    given |= {keys[name]: text for name, text in fields.items()}
    event = Event(name=conventions.EVALUATION, attributes=given, timestamp=1.0, is_record=True, is_of_attempt=of_attempt)
    return on.model_copy(update={"events": [*on.events, event]})


def test_all_that_feedback_says_is_shown_at_its_span() -> None:
    said = feedback_on(span("chat", "a"), 0.5, source="ann", rubric="tone@2", text="too\nshort\x1b[2J", correction="Try again, please.")
    line = 'feedback = 0.5 by ann (tone@2): "too short\\x1b[2J"; should have been "Try again, please."'
    assert line in rendered([said])
    assert "feedback = meh, which is no reward\n" in rendered([feedback_on(span("chat", "a"), label="meh")])
    assert 'feedback by bo: "why?"\n' in rendered([feedback_on(span("chat", "a"), source="bo", text="why?")])
    assert "feedback" not in rendered([feedback_on(span("chat", "a"), 0.5, of_attempt=True)]), "it does not rate this span"


def test_feedback_on_the_proxys_span_is_shown_where_both_are_one_node() -> None:
    agents = span("chat", "a", None, 0, **{"gen_ai.request.model": "m", "gen_ai.response.id": "r1"})
    proxied = span(conventions.SPAN_LLM, "b", "a", 0, **{"gen_ai.request.model": "m", "gen_ai.response.id": "r1", conventions.LLM_CALL: 1})
    shown = rendered([agents, feedback_on(proxied, 0.25)])
    assert shown.count("\n") == 1 and "feedback = 0.25" in shown


def test_sampling_that_deviates_from_the_resources_is_marked_as_own() -> None:
    call = span("call", "a", None, 0, **{"gen_ai.request.temperature": 0.2, "gen_ai.request.top_p": 1})
    assert "own temperature 0.2\n" in rendered([call])
    assert "own" not in rendered([call], sampling={"temperature": 0.2})
    asked = {"temperature": 0.2, "top_p": 0.9, "tool_choice": "required", "max_tokens": 7}
    call = span("call", "a", None, 0, **{conventions.LLM_SAMPLING: Contract.of(asked, {}).dumps()})
    assert "not trained on: top_p 0.9, tool_choice; own temperature 0.2\n" in rendered([call])
    assert "not trained on: top_p 0.9, tool_choice\n" in rendered([call], sampling={"temperature": 0.2, "top_p": 0.9})


@pytest.mark.parametrize(
    ("agent", "why"),
    [({"top_p": 0.9}, "top_p 0.9"), ({"temperature": 0}, "temperature 0"), ({"temperature": 0.5}, ""), ({"max_tokens": 8}, "")],
)
def test_what_training_would_refuse_of_a_call_is_marked(agent: dict[str, float], why: str) -> None:
    """As doctor counts it: of a job, which sends what nobody else does, and scores calls at their own temperature."""
    call = span("call", "a", None, 0, **{conventions.LLM_SAMPLING: Contract.of(agent, {}).dumps()})
    assert (f"not trained on: {why}\n" in rendered([call])) if why else ("not trained on" not in rendered([call]))


def test_what_a_policy_replaced_and_log_probs_from_before_the_temperature_are_marked() -> None:
    contract = Contract.of({"n": 2}, {"temperature": 1.0}, overridden={"temperature": 0.2, "logit_bias": {"7": 1}}, logprobs="raw")
    call = span("call", "a", None, 0, **{conventions.LLM_SAMPLING: contract.dumps()})
    assert "replaced temperature 0.2, logit_bias; raw log-probs" in rendered([call])


@pytest.mark.parametrize("recording", sorted(path.stem for path in RECORDED.glob("*.json")))
def test_the_model_of_every_dialect_is_shown(recording: str) -> None:
    calls = [(each, call) for each in with_records(*recorded(recording)) if (call := read_call(each)) is not None and call.model]
    assert calls
    for each, call in calls:
        assert call.model in rendered([each]).partition(" ← ")[0].split()


def test_agent_output_cannot_control_the_terminal() -> None:
    assert "\x1b" not in plain("\x1b[31mred\x1b[0m\x07\u202e")
    hostile = span("\x1b]0;title\x07[bold]name[/bold]", "a", None, 0, **{"gen_ai.input.messages": json.dumps([{"content": "\x1b[2J"}])})
    console = Console(width=200, file=io.StringIO(), force_terminal=True, color_system=None)
    rollout = Rollout(rollout_id="ro-1", input={"q": "\x1b[2J"}, start_time=0)
    attempt = Attempt(rollout_id="ro-1", attempt_id="at-1", sequence_id=1, start_time=0, error="\x1b[2Jboom")
    verdict = Verdict(rollout_id="ro-1", attempt_id="at-1", kind="incomplete", reasons=["[red]x[/red]"])
    console.print(attempt_tree(rollout, attempt, [hostile], verdict))
    text = console.file.getvalue()  # type: ignore[attr-defined]  # it is the StringIO above
    assert "\x1b[2J" not in text and "\x1b]0" not in text and "[bold]name[/bold]" in text and "[red]x[/red]" in text


def test_an_alarm_is_shown_beside_the_verdict() -> None:
    console = Console(width=200, file=io.StringIO(), color_system=None)
    rollout = Rollout(rollout_id="ro-1", input={}, start_time=0)
    attempt = Attempt(rollout_id="ro-1", attempt_id="at-1", sequence_id=1, start_time=0)
    for alarm in (False, True):
        verdict = Verdict(rollout_id="ro-1", attempt_id="at-1", kind="unproven", alarm=alarm)
        console.print(attempt_tree(rollout, attempt, [], verdict))
        assert ("ALARM" in console.file.getvalue()) is alarm  # type: ignore[attr-defined]  # it is the StringIO above


def test_the_last_message_of_each_form_is_in_the_label() -> None:
    def label(held: object) -> str:
        return rendered([span("call", "a", None, 0, **{"gen_ai.input.messages": held})])

    assert "← 'a'" in label(json.dumps([{"role": "user", "content": "x"}, {"role": "user", "content": "a"}]))
    assert "← 'b'" in label(json.dumps([{"role": "user", "parts": [{"type": "text", "content": "b"}]}]))
    for broken in (None, "", "{}", "[]", "not json"):
        assert "←" not in label(broken)


@pytest.mark.parametrize("recording", ["openai_agents", "openai_agents_openinference", "openllmetry_langchain", "pydantic_ai", "vercel"])
def test_the_arguments_and_the_result_of_a_tool_call_are_shown(recording: str) -> None:
    spans, logs = recorded(recording)
    lines = [
        line
        for line in rendered(with_records(spans, logs)).splitlines()
        if any(name in line.partition("←")[0] for name in ("get_weather", "toolCall"))
    ]
    assert any("city" in line.partition("←")[2] and "→" in line for line in lines), lines


def test_the_input_of_an_operation_is_shown_on_one_line() -> None:
    given: dict[str, Any] = {conventions.OPERATION_INPUT: '{"city":\n"Paris"}', conventions.OPERATION_OUTPUT: '"sunny"'}
    text = rendered([span("look_up", "a", None, 0, **given)])
    assert text.strip().endswith('← {"city": "Paris"}  → "sunny"')


MODEL: dict[str, Any] = {"gen_ai.request.model": "m"}
LLM_SPAN: dict[str, Any] = {
    conventions.LLM_PROMPT_TOKEN_IDS: [1, 2],
    conventions.LLM_RESPONSE_TOKEN_IDS: [3],
    conventions.LLM_MODEL_VERSION: "7",
}


def test_a_model_call_is_one_node_merged_from_agent_and_proxy() -> None:
    own: dict[str, Any] = {"gen_ai.request.model": "policy"}
    spans = [span("openai.chat", "a", **own), span("POST", "h", "a"), span(conventions.SPAN_LLM, "p", "h", **LLM_SPAN)]
    (line,) = rendered(spans).splitlines()
    assert "openai.chat" in line and "policy" in line and "2 + 1 tokens, weights 7" in line
    assert rendered([*spans, span(conventions.SPAN_SEAL, "s", "h")]).splitlines() == [line], "the proxy's seal, which is not shown"


def test_spans_of_one_response_are_joined_without_a_traceparent() -> None:
    response: dict[str, Any] = {"gen_ai.response.id": "chatcmpl-1"}
    spans = [span("chat m", "a", **response, **MODEL), span(conventions.SPAN_LLM, "p", **response, **LLM_SPAN)]
    (line,) = rendered(spans).splitlines()
    assert "chat m" in line and "tokens" in line


def test_retries_of_one_call_are_one_node_and_proxy_only_calls_stay() -> None:
    spans = [span("openai.chat", "a", **MODEL)]
    spans += [span(conventions.SPAN_LLM, f"p{n}", "a", **{**LLM_SPAN, conventions.LLM_CALL: n}) for n in (1, 2)]
    spans += [span("agent", "x"), span("other", "y", "x"), span(conventions.SPAN_LLM, "z", "x", **LLM_SPAN)]
    text = rendered(spans)
    assert "2 tries" in text and len(text.splitlines()) == 4 and text.count("tokens") == 2


def choices(parent: str | None) -> list[Span]:
    """One call as the proxy stores it, with three choices of 1, 2 and 3 tokens."""
    return [
        span(conventions.SPAN_LLM, f"p{n}", parent, n, **{
            **LLM_SPAN, conventions.LLM_CALL: 1, conventions.LLM_CHOICE: n, conventions.LLM_RESPONSE_TOKEN_IDS: [3] * (n + 1),
        })
        for n in range(3)
    ]  # fmt: skip


def test_a_call_with_several_choices_shows_their_number_and_all_tokens() -> None:
    shown = rendered([span("openai.chat", "a", **MODEL), *choices("a")]).splitlines()
    assert "openai.chat" in shown[0] and "2 + 6 tokens in 3 choices" in shown[0]
    assert ["2 + 2 tokens," in shown[1], "2 + 3 tokens," in shown[2], len(shown)] == [True, True, 3]
    alone = rendered(choices(None)).splitlines()
    assert ["in 3 choices" in line for line in alone] == [True, False, False] and "2 + 6 tokens" in alone[0]


def test_choices_of_different_calls_are_not_added_up() -> None:
    other = [each.model_copy(update={"attempt_id": "at-2", "span_id": f"o{n}"}) for n, each in enumerate(choices(None)[:1])]
    assert rendered([*choices(None)[:1], *other]).count("2 + 1 tokens, weights") == 2


def msg(role: str, *parts: Any) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": part} if isinstance(part, str) else part for part in parts]}


def conversation() -> list[Span]:
    """Two calls as the proxy stores them: the second has only its new messages."""
    tool = {"type": "tool_call", "name": "weather", "arguments": {"city": "Ulm"}}
    first = {
        conventions.LLM_CALL: 1, conventions.LLM_PROMPT_TOKEN_IDS: [1, 2, 3], conventions.LLM_RESPONSE_TOKEN_IDS: [4, 5],
        "gen_ai.input.messages": json.dumps([msg("system", "be kind"), msg("user", "how is\nthe weather")]),
        "gen_ai.output.messages": json.dumps([msg("assistant", tool)]),
    }  # fmt: skip
    second = {
        conventions.LLM_CALL: 2, conventions.LLM_PREFIX_CALL: 1, conventions.LLM_PREFIX_CHOICE: 0, conventions.LLM_PROMPT_TOKEN_IDS: [6],
        conventions.LLM_RESPONSE_TOKEN_IDS: [7], conventions.LLM_MESSAGES_CALL: 1, conventions.LLM_MESSAGES_BEFORE: 2,
        "gen_ai.input.messages": json.dumps([msg("assistant", tool), msg("tool", {"type": "tool_call_response", "response": "sunny"})]),
        "gen_ai.output.messages": json.dumps([msg("assistant", "it is sunny")]),
    }  # fmt: skip
    return [span(conventions.SPAN_LLM, "p1", "m1", 1, **first), span(conventions.SPAN_LLM, "p2", "m2", 2, **second)]


def test_a_call_that_extends_another_is_shown_with_its_whole_prompt() -> None:
    own = [span("openai.chat", f"m{n}", None, n, **{"gen_ai.request.model": "m"}) for n in (1, 2)]
    text = rendered([*own, *conversation()])
    assert "3 + 2 tokens" in text and "6 + 1 tokens" in text and "be kind" not in text
    lines = [line.strip() for line in rendered([*own, *conversation()], messages=True).splitlines()]
    assert lines[0].startswith("openai.chat") and len([line for line in lines if line.startswith(("openai", "agentlightning"))]) == 2
    whole = ["system be kind", "user how is", "the weather", 'assistant weather({"city": "Ulm"})']
    assert lines[1:5] == whole
    assert lines[6:] == [*whole, "tool sunny", "assistant it is sunny"]


def test_without_the_earlier_call_neither_length_nor_messages_are_shown() -> None:
    text = rendered(conversation()[1:], messages=True)
    assert "? + 1 tokens" in text and "sunny" not in text


def test_messages_beyond_a_limit_are_left_out_and_the_tree_says_where_they_are() -> None:
    text = "\n".join(["x" * 100] * 5_000)
    spans = [
        span(conventions.SPAN_LLM, f"p{n}", None, n, **{
            **LLM_SPAN, conventions.LLM_CALL: n, "gen_ai.input.messages": json.dumps([msg("user", text if n == 1 else "more")]),
            **({conventions.LLM_MESSAGES_CALL: 1, conventions.LLM_MESSAGES_BEFORE: 1} if n > 1 else {}),
        })
        for n in range(1, 121)
    ]  # fmt: skip
    labels = [str(tree.label) for tree in span_trees(spans, messages=True)]
    assert SHOWN_CHARACTERS < sum(map(len, labels)) < SHOWN_CHARACTERS + 2 * len(text) and len(labels) == 120
    assert ["agl-otel export --as messages" in label for label in labels].count(True) == 1


def test_messages_of_any_form_are_shown_and_cannot_control_the_terminal() -> None:
    parts = [
        {"role": "user", "content": "plain \x1b[2J"},
        {"role": "user", "content": [{"a": 1}]},
        msg("user", {"type": "image", "uri": "u"}),
        3,
    ]
    text = rendered([span("c", "a", None, 0, **{"gen_ai.request.model": "m", "gen_ai.input.messages": json.dumps(parts)})], messages=True)
    assert "\x1b" not in text and "plain" in text and '[{"a": 1}]' in text and '"uri": "u"' in text
    assert "not json" not in rendered(
        [span("c", "a", None, 0, **{"gen_ai.request.model": "m", "gen_ai.input.messages": "not json"})], messages=True
    )


def test_messages_of_every_dialect_are_shown() -> None:
    for path in sorted(RECORDED.glob("*.json")):
        if path.stem not in ("agent_lightning_weave", "litellm"):  # the first call of these has no tool
            text = rendered(with_records(*recorded(path.stem)), messages=True)
            assert "user What is the weather in Rome?" in text, path.stem
    assert 'get_weather({"city": "Rome"})' in rendered(recorded("openinference")[0], messages=True)


def test_reasoning_and_parts_unknown_to_openai_are_shown() -> None:
    parts = [{"type": "reasoning", "content": "hm"}, "a", "b", {"type": "sound", "data": "x"}]
    output = {"gen_ai.operation.name": "chat", "gen_ai.output.messages": json.dumps([msg("assistant", *parts)])}
    lines = [line.strip() for line in rendered([span("c", "a", None, 0, **output)], messages=True).splitlines()]
    assert lines[1:] == ["assistant hm", "a", "b", '{"type": "sound", "data": "x"}']


def test_a_tables_title_headings_and_cells_cannot_control_the_terminal() -> None:
    hostile = "\x1b]0;owned\x07[bold]run[/bold]\u202e"
    out = io.StringIO()
    Console(file=out, width=200, force_terminal=False).print(table_of(hostile, ("what", hostile), [(hostile, hostile)]))
    text = out.getvalue()
    assert text.count("[bold]run[/bold]") == 4 and not {"\x1b", "\x07", "\u202e"} & set(text)
