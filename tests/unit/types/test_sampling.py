"""The contract of a call: who set what of its sampling, and whether that is the distribution that is wanted."""

from __future__ import annotations

import math
from typing import Any

import pytest

from agl_otel.types.sampling import FILLED, NEUTRAL, Contract, all_parameters

TOLD = all_parameters(1.0, 64)


@pytest.mark.parametrize(
    ("asked", "fields"),
    [
        ({}, ()),
        ({"temperature": 0.2, "max_tokens": 7, "stop": ["\n"], "n": 4, "seed": 3}, ()),
        ({"top_p": 0.9}, ("top_p",)),
        ({"top_p": "0.9"}, ("top_p",)),
        ({"top_p": 1, "top_k": 0, "min_p": 0, "logit_bias": {}, "tool_choice": "none"}, ()),
        ({"top_k": 20, "min_p": 0.1}, ("top_k", "min_p")),
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


def test_what_nobody_sent_is_unknown_unless_the_server_says_that_it_fills_in_nothing() -> None:
    assert Contract.of({}, {}).differing(NEUTRAL) == (*FILLED[1:], "logprobs")
    assert math.isnan(Contract.of({}, {}).temperature)
    proven = Contract.of({}, {}, "*")
    assert (proven.differing(NEUTRAL), proven.temperature) == ((), 1.0)
    assert Contract.of({"top_k": 20}, {}, "*").differing(NEUTRAL) == ("top_k",)


def test_what_the_server_does_not_heed_changes_nothing() -> None:
    asked = {"temperature": 0.5, "top_p": 0.9, "top_k": 20, "response_format": {"type": "json_object"}, "max_tokens": 5}
    contract = Contract.of(asked, TOLD, "temperature, top_p")
    assert (contract.differing(NEUTRAL), contract.temperature) == (("top_p",), 0.5)
    assert contract.agent == {"temperature": 0.5, "top_p": 0.9, "max_tokens": 5}


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


@pytest.mark.parametrize("asked", [{"temperature": 0.7}, {"temperature": 2}, {"top_p": 0.9}])
def test_log_probs_count_only_if_they_are_known_to_be_of_the_sampled_distribution(asked: dict[str, Any]) -> None:
    wanted = {**NEUTRAL, **asked}
    assert Contract.of(asked, TOLD).differing(wanted) == Contract.of(asked, TOLD, logprobs="raw").differing(wanted) == ("logprobs",)
    assert Contract.of(asked, TOLD, logprobs="processed").differing(wanted) == Contract.of(asked, TOLD, "*").differing(wanted) == ()
    for found in ("", "raw", "processed"):
        assert Contract.of({"temperature": 1}, TOLD, logprobs=found).differing(NEUTRAL) == (), "at 1 they are the same"
