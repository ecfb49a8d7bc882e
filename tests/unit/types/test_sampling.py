"""The contract of a call: who set what of its sampling, and whether that is the distribution that is wanted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from agl_otel.proxy.dialects import DIALECTS
from agl_otel.types.sampling import FILLED, HARMLESS, LIMITS, NEUTRAL, SHAPES, Contract, all_parameters, heeded, lenient

TOLD = all_parameters(1.0, 64)


def processed(asked: Mapping[str, Any], told: Mapping[str, Any] = TOLD) -> Contract:
    """The contract of a call to a server whose log-probs are of the distribution."""
    return Contract.of(asked, told, logprobs="processed")


@pytest.mark.parametrize(
    ("asked", "fields"),
    [
        ({}, ()),
        ({"temperature": 0.2, "max_tokens": 7, "stop": ["\n"], "n": 4, "seed": 3}, ()),
        ({"top_p": 0.9}, ("top_p",)),
        ({"top_p": "0.9"}, ("top_p",)),
        ({"top_p": 1, "top_k": 0, "min_p": 0, "logit_bias": {}, "tool_choice": "none"}, ()),
        ({"top_k": 20, "min_p": 0.1}, ("top_k", "min_p")),
        ({"typical_p": 1.0}, ()),
        ({"typical_p": 0.9}, ("typical_p",)),
        ({"repetition_penalty": 1.1, "frequency_penalty": 0.5, "presence_penalty": -0.5}, tuple(NEUTRAL)[3:]),
        ({"logit_bias": {"7": -100}}, ("logit_bias",)),
        ({"response_format": {"type": "json_object"}}, ("response_format",)),
        ({"response_format": {"type": "text"}}, ()),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, ("response_format",)),
        ({"output_config": {"format": {"type": "json_schema"}}}, ("response_format",)),
        ({"response_format": {"type": "json_object"}, "text": {"format": {"type": "text"}}}, ("response_format",)),
        ({"response_format": {"type": "json_object"}, "output_format": "text"}, ("response_format",)),
        ({"response_format": {"type": "text"}, "output_config": {"format": {"type": "json_schema"}}}, ("response_format",)),
        ({"text": {"format": {"type": "json_schema"}}, "output_config": {"format": {"type": "text"}}}, ("response_format",)),
        ({"response_format": {"type": "text"}, "text": {"format": {"type": "text"}, "verbosity": "low"}}, ()),
        ({"tool_choice": "required"}, ("tool_choice",)),
        ({"tool_choice": {"type": "any"}}, ("tool_choice",)),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, ("tool_choice",)),
        ({"tool_choice": {"type": "auto"}}, ()),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, ("strict_tools",)),
        ({"tools": [{"type": "function", "name": "f", "strict": True}], "tool_choice": "auto"}, ("strict_tools",)),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}], "tool_choice": "none"}, ()),
        ({"tools": [{"name": "f", "input_schema": {}}]}, ()),
        *(
            ({"tools": [{"type": "function", "function": {"name": "f", "strict": each}}]}, ("strict_tools",))
            for each in ("true", "1", 1, "on")
        ),
        *(({"tools": [{"type": "function", "function": {"name": "f", "strict": each}}]}, ()) for each in (False, None, 0)),
        ({"tools": [{"name": "f", "input_schema": {}, "strict": 1}]}, ("strict_tools",)),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f", "strict": True}]}]}, ("strict_tools",)),
        ({"tools": [{"type": "custom", "name": "f", "format": {"type": "grammar", "syntax": "lark"}}]}, ("strict_tools",)),
        ({"tools": [{"type": "custom", "name": "f", "format": {"type": "text"}}]}, ()),
        ({"tools": [{"type": "custom", "custom": {"name": "f", "format": {"type": "grammar"}}}]}, ("strict_tools",)),
        ({"messages": [{"role": "system", "tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}]}, ("strict_tools",)),
        ({"guided_regex": "a+"}, ("guided_regex",)),
        ({"top_p": None, "temperature": None}, ()),
        ({"top_p": math.nan}, ("top_p",)),
        ({"tools": "none", "text": 7, "output_config": [], "tool_choice": ["odd"]}, ("tool_choice",)),
    ],
)
def test_a_call_differs_by_the_fields_that_change_its_distribution(asked: dict[str, Any], fields: tuple[str, ...]) -> None:
    written = Contract.of(asked, TOLD, logprobs="processed").dumps()
    contract = Contract.loads(written)
    assert contract is not None and contract.differing(TOLD) == fields, written


@pytest.mark.parametrize(
    "name",
    [
        *("thinking_token_budget", "vllm_xargs", "watermarking", "json_schema", "custom_logit_processor", "custom_params", "lora_path"),
        *("grammar", "guided_json_object", "structural_tag", "logits_processors", "no_repeat_ngram_size", "function_call"),
        *("structured_outputs", "session_params", "fallbacks", "some_field_of_tomorrow"),
    ],
)
def test_a_field_that_is_not_known_to_leave_the_distribution_alone_differs(name: str) -> None:
    for value in ({"a": 1}, "x", 3, True):
        for contract in (processed({name: value}), Contract.of({name: value}, TOLD, "*"), processed({}, {**TOLD, name: value})):
            read = Contract.loads(contract.dumps())
            assert read is not None and read.differing(TOLD) == (name,)
        assert processed({name: value}).notes({})[0].startswith(f"own {name}") and not processed({name: value}).is_plain
        assert Contract.of({name: value}, TOLD, "temperature").differing(TOLD) == (), "its server does not heed it"
    assert processed({name: None}).differing(TOLD) == (), "null is unset"


def test_a_parameter_that_few_servers_take_is_not_sent() -> None:
    assert "typical_p" not in TOLD


def test_the_fields_of_the_protocols_are_known_and_few_of_them_count() -> None:
    """Those of hosted models, whose calls nobody trains on, may."""
    hosted = {*("audio", "modalities", "web_search_options", "moderation", "image"), "access_programs", "speed"}
    for dialect in DIALECTS.values():
        asked = dict.fromkeys(dialect.fields, "x") | {"tools": [], "text": {}, "output_config": {}, "output_format": None}
        assert not dialect.samples or set(processed(asked).differing(TOLD)) <= {*hosted, *SHAPES}, dialect.path
    assert not HARMLESS & {*SHAPES, *LIMITS, "temperature"}


def test_fields_without_number_or_of_odd_names_take_no_room() -> None:
    contract = processed({f"field_{number}": 1 for number in range(10_000)} | {"top_k": 5})
    assert len(contract.dumps()) < 1000 and "top_k" in contract.differing(TOLD)
    assert processed({"x" * 1000: 1, "a\nb": 2, "": 3}).differing(TOLD) == ("unknown_field",)


HARNESSES: dict[str, dict[str, Any]] = {
    "Claude Code": {
        "model": "m", "messages": [], "system": [], "tools": [{"name": "Bash", "input_schema": {}}], "metadata": {"user_id": "u"},
        "max_tokens": 32000, "thinking": {"type": "enabled", "budget_tokens": 31999}, "context_management": {"edits": []},
        "output_config": {"effort": "high"}, "stream": True,
    },
    "Codex CLI": {
        "model": "m", "instructions": "…", "input": [], "tools": [{"type": "function", "name": "shell", "strict": False, "parameters": {}}],
        "tool_choice": "auto", "parallel_tool_calls": True, "reasoning": {"effort": "medium", "summary": "auto"}, "store": False,
        "stream": True, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k", "text": {"verbosity": "medium"},
        "client_metadata": {}, "service_tier": "auto",
    },
    "opencode": {
        "model": "m", "max_tokens": 32000, "messages": [], "tools": [], "tool_choice": "auto", "stream": True,
        "stream_options": {"include_usage": True}, "reasoning_effort": "medium", "verbosity": "low",
    },
    "vLLM's own": {
        "messages": [], "chat_template_kwargs": {"enable_thinking": False}, "add_generation_prompt": True, "return_token_ids": True,
        "logprobs": True, "top_logprobs": 1, "prompt_token_ids": [1], "kv_transfer_params": {}, "stop_token_ids": [2], "ignore_eos": True,
        "seed": 1, "priority": 0, "request_id": "r", "cache_salt": "s", "include_reasoning": True, "skip_special_tokens": False,
    },
    "SGLang's own": {
        "messages": [], "input_ids": [1], "rid": "r", "separate_reasoning": True, "stream_reasoning": True, "return_prompt_token_ids": True,
        "bootstrap_room": 1, "session_id": "s", "extra_key": "k", "no_stop_trim": True, "stop_regex": "a",
    },
}  # fmt: skip
"""{agent: the fields of its requests}, by what their releases send."""


@pytest.mark.parametrize("name", HARNESSES)
def test_what_agents_send_beside_the_distribution_is_not_refused(name: str) -> None:
    contract = processed(HARNESSES[name])
    assert (contract.differing(TOLD), contract.notes({}), contract.is_plain) == ((), [], True)


def test_what_nobody_sent_is_unknown_unless_the_server_says_that_it_fills_in_nothing() -> None:
    assert Contract.of({}, {}).differing(NEUTRAL) == (*FILLED[1:], "logprobs")
    assert math.isnan(Contract.of({}, {}).temperature)
    proven = Contract.of({}, {}, "*")
    assert (proven.differing(NEUTRAL), proven.temperature) == ((), 1.0)
    assert Contract.of({"top_k": 20}, {}, "*").differing(NEUTRAL) == ("top_k",)


def test_a_grammar_of_the_resources_is_not_hidden_by_a_format_of_the_agents() -> None:
    told = {**TOLD, "response_format": {"type": "json_object"}}
    assert processed({"text": {"format": {"type": "text"}}}, told).differing(TOLD) == ("response_format",)


def test_what_the_server_does_not_heed_changes_nothing() -> None:
    asked = {"temperature": 0.5, "top_p": 0.9, "top_k": 20, "response_format": {"type": "json_object"}, "max_tokens": 5}
    contract = Contract.of(asked, TOLD, "temperature, top_p")
    assert (contract.differing(NEUTRAL), contract.temperature) == (("top_p",), 0.5)
    assert contract.agent == {"temperature": 0.5, "top_p": 0.9, "max_tokens": 5}


def test_a_server_that_heeds_all_but_strict_tools_says_so() -> None:
    asked = {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}], "top_k": 5}
    assert Contract.of(asked, TOLD, "*").differing(TOLD) == ("top_k", "strict_tools")
    contract = Contract.of(asked, TOLD, "*, -strict_tools")
    assert (contract.differing(TOLD), contract.logprobs) == (("top_k",), "processed")
    assert Contract.of({**asked, "tool_choice": "required"}, TOLD, "*, -strict_tools").differing(TOLD) == ("top_k", "tool_choice")


def test_strict_tools_are_made_lenient_where_they_say_so() -> None:
    schema = {"type": "object", "properties": {"strict": {"type": "boolean"}, "tools": {"strict": True}}}
    plain = {"type": "function", "function": {"name": "f", "parameters": schema}}
    strict = [
        {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}},
        {"type": "function", "name": "g", "strict": 1, "parameters": schema},
        {"type": "namespace", "tools": [{"type": "function", "name": "h", "strict": "true"}]},
        plain,
        "odd",
    ]
    assert lenient([plain]) is lenient([]) is lenient(None) is lenient("odd") is None
    found = lenient(strict)
    assert found is not None and found[3:] == strict[3:]
    assert found[0]["function"] == {"name": "f", "parameters": schema, "strict": False}
    assert (found[1]["strict"], found[1]["parameters"], found[2]["tools"][0]["strict"]) == (False, schema, False)
    assert Contract.of({"tools": found}, TOLD, "*").differing(TOLD) == ()
    grammar = [{"type": "custom", "custom": {"name": "c", "format": {"type": "grammar"}}}]
    assert lenient(grammar) is None and Contract.of({"tools": grammar}, TOLD, "*").differing(TOLD) == ("strict_tools",)


@pytest.mark.parametrize(
    "header",
    [
        "-strict_tools",
        "*, -nonsense",
        "temperature, -strict_tools",
        "",
        "none",
        "garbage;q=1",
        "TEMPERATURE",
        "temperature top_p",
        "temperature;top_p",
        '"*"',
        "temperature, topp",
        "**",
        ",",
    ],
)
def test_a_header_that_cannot_be_read_says_nothing(header: str) -> None:
    asked = {"temperature": 0.5, "top_k": 5}
    assert heeded(header) is None and Contract.of(asked, TOLD, header) == Contract.of(asked, TOLD)
    assert Contract.of({}, {}, header).differing(NEUTRAL) == (*FILLED[1:], "logprobs")
    assert Contract.of(asked, TOLD, header, logprobs="raw").logprobs == "raw"


def test_the_agents_own_parameters_win_over_the_resources_and_equal_ones_do_not_differ() -> None:
    contract = Contract.of({"temperature": 0.2, "top_p": 0.9}, {**TOLD, "top_p": 0.8}, logprobs="processed")
    assert (contract.temperature, contract.resource.get("top_p"), contract.own()) == (0.2, None, {"temperature": 0.2, "top_p": 0.9})
    assert contract.differing({**TOLD, "top_p": 0.9}) == ()


def test_a_long_or_odd_value_is_shortened_and_text_of_something_else_is_no_contract() -> None:
    contract = Contract.of({"logit_bias": {str(token): 1 for token in range(1000)}, "stop": "x" * 1000}, {})
    assert len(contract.dumps()) < 400
    for text in ("", "[]", "7", "null", '{"agent": 7}', "{", DEEP):
        assert Contract.loads(text) is None


DEEP = "[" * 200_000 + "]" * 200_000


@pytest.mark.parametrize("name", ["temperature", "top_p", "max_tokens", "logit_bias"])
@pytest.mark.parametrize(
    "value",
    [10**400, -(10**400), 10**5000, "1" + "0" * 400, math.inf, 1e300, [10**5000], {"7": [[10**5000]]}],
    ids=["huge", "negative", "unprintable", "text", "infinite", "float", "list", "object"],
)
def test_a_number_beyond_all_bounds_is_no_error(name: str, value: Any) -> None:
    """Its server may have refused it, but each reader of the attempt's calls reads its contract."""
    for contract in (Contract.of({name: value}, TOLD), Contract.loads(Contract.of({name: value}, TOLD).dumps())):
        assert contract is not None and len(contract.dumps()) < 400
        assert math.isnan(contract.temperature) == (name == "temperature") and contract.is_plain == (name == "max_tokens")
        assert contract.notes({}) == ([f"own {name}"] if name != "max_tokens" else [])


@pytest.mark.parametrize(
    "value",
    ["1" + "0" * 400, "1" + "0" * 5000, "1e999", "-Infinity", "NaN", "[[1]]", '{"a": 1}', DEEP],
    ids=["huge", "unreadable", "overflow", "negative", "nan", "list", "object", "deep"],
)
@pytest.mark.parametrize("part", ["agent", "resource", "overridden"])
def test_a_forged_contract_is_no_error(part: str, value: str) -> None:
    contract = Contract.loads(
        f'{{"{part}": {{"temperature": {value}, "top_p": {value}, "logit_bias": {value}}}, "server": ["min_p", [7], 7]}}'
    )
    if contract is not None:
        assert isinstance(contract.temperature, float) and contract.differing(TOLD) and isinstance(contract.notes({}), list)
        assert len(contract.dumps()) < 800 and contract.server == ("min_p",)


REMEMBERED: list[tuple[dict[str, Any], str]] = [
    ({"top_k": 1}, '{"top_k":1}'),
    ({"top_k": 1.0}, '{"top_k":1.0}'),
    ({"top_k": True}, '{"top_k":true}'),
    ({"top_k": 1, "model": "other", "messages": [{"role": "user", "content": "hi"}]}, '{"top_k":1}'),
    ({"top_k": 1, "text": {"format": {"type": "json_schema"}}}, '{"top_k":1,"response_format":"json_schema"}'),
    ({"top_k": 1, "output_format": "json"}, '{"top_k":1,"response_format":"json"}'),
    ({"top_k": 1, "tools": [{"type": "function", "strict": True}]}, '{"top_k":1,"strict_tools":true}'),
    ({"stop": "\ud800"}, '{"stop":"\\ud800"}'),
]
"""(request, what is written of it): alike in what a contract is remembered by."""


def test_a_contract_is_that_of_its_request_whatever_was_asked_before() -> None:
    for asked, written in 2 * REMEMBERED:
        assert f'"agent":{written}' in Contract.of(asked, {}).dumps()


@pytest.mark.parametrize("asked", [{"temperature": 0.7}, {"temperature": 2}, {"top_p": 0.9}])
def test_log_probs_count_only_if_they_are_known_to_be_of_the_sampled_distribution(asked: dict[str, Any]) -> None:
    wanted = {**NEUTRAL, **asked}
    assert Contract.of(asked, TOLD).differing(wanted) == Contract.of(asked, TOLD, logprobs="raw").differing(wanted) == ("logprobs",)
    assert Contract.of(asked, TOLD, logprobs="processed").differing(wanted) == Contract.of(asked, TOLD, "*").differing(wanted) == ()
    for found in ("", "raw", "processed"):
        assert Contract.of({"temperature": 1}, TOLD, logprobs=found).differing(NEUTRAL) == (), "at 1 they are the same"
