from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError

from agl_otel.proxy.canary import canary_for, drawn, prompts_for, served_to
from agl_otel.types import LLM, NamedResources, PromptTemplate, ResourcesUpdate

CONVERSATIONS = [f"conversation-{number}" for number in range(20_000)]
RESOURCES: TypeAdapter[NamedResources] = TypeAdapter(NamedResources)


def given(shares: dict[str, float]) -> dict[str, set[str]]:
    """{canary: its conversations}."""
    found: dict[str, set[str]] = {name: set() for name in shares}
    for each in CONVERSATIONS:
        if (name := canary_for(shares, each)) is not None:
            found[name].add(each)
    return found


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.5, 1.0])
def test_a_canary_has_the_conversations_drawn_below_its_share(share: float) -> None:
    (mine,) = given({"new": share}).values()
    assert mine == {each for each in CONVERSATIONS if drawn("new", each) < share}
    assert len(mine) == pytest.approx(share * len(CONVERSATIONS), abs=4 * (len(CONVERSATIONS) * share * (1 - share)) ** 0.5)


def test_a_share_that_grows_keeps_its_conversations() -> None:
    held: set[str] = set()
    for share in (0.05, 0.1, 0.5, 1.0):
        (mine,) = given({"new": share}).values()
        assert held < mine
        held = mine


def test_several_canaries_have_conversations_of_their_own_and_the_shares_that_they_say() -> None:
    shares = {"a": 0.1, "b": 0.3, "c": 0.6}
    found = given(shares)
    assert sum(map(len, found.values())) == len({each for mine in found.values() for each in mine}) == len(CONVERSATIONS)
    for name, share in shares.items():
        assert len(found[name]) == pytest.approx(share * len(CONVERSATIONS), abs=4 * (len(CONVERSATIONS) * share * (1 - share)) ** 0.5)


def test_a_canary_of_another_name_gets_other_conversations() -> None:
    first, second = given({"first": 0.1})["first"], given({"second": 0.1})["second"]
    assert len(first & second) < 0.2 * len(first)


def llm(share: float | None = None) -> LLM:
    return LLM(endpoint="http://here/v1", model="m", share=share)


@pytest.mark.parametrize(
    ("resources", "words"),
    [
        ({"main": llm(), "a": llm(0.6), "b": llm(0.5)}, "sum up to 1.1 (a 0.6, b 0.5)"),
        ({"a": llm(0.1)}, "a canary needs another LLM"),
        ({"main": llm().model_copy(update={"most_conversations": 3}), "a": llm(0.1)}, "main has most_conversations, which limits canaries"),
    ],
)
def test_shares_that_cannot_be_served_are_refused(resources: NamedResources, words: str) -> None:
    with pytest.raises(ValidationError, match="value_error") as refused:
        RESOURCES.validate_python(resources)
    assert words in str(refused.value)


def test_shares_that_sum_up_to_one_are_taken() -> None:
    shares = [0.1] * 10
    assert sum(shares) != 1.0
    RESOURCES.validate_python({"main": llm(), **{f"canary-{number}": llm(share) for number, share in enumerate(shares)}})


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan"), float("inf"), "much"])
def test_a_share_is_a_number_from_0_to_1(share: float) -> None:
    with pytest.raises(ValidationError):
        llm(share)


def prompts(**texts: str) -> dict[str, PromptTemplate]:
    return {name: PromptTemplate(template=text, engine="f-string") for name, text in texts.items()}


def served(resources: NamedResources, conversation: str) -> tuple[str, dict[str, str]]:
    update = ResourcesUpdate(resources_id="production", version=3, create_time=0.0, update_time=0.0, resources=resources)
    found = served_to(update, conversation)
    assert (found.resources_id, found.version) == ("production", 3)
    return found.arm, {name: prompt.template for name, prompt in found.prompts.items()}


def test_a_conversation_gets_the_prompts_of_the_arm_that_is_drawn_for_it() -> None:
    promoted, new, other = prompts(ask="old", tone="kind"), prompts(ask="new"), prompts(tone="stern")
    resources: NamedResources = {
        **promoted, "main": llm(), **prompts(improved_by="improve-1"),
        "canary-7": llm(0.3), **prompts_for("canary-7", new), "b": llm(0.2), **prompts_for("b", other),
    }  # fmt: skip
    expected = {
        "canary-7": {"ask": "new", "tone": "kind"},
        "b": {"ask": "old", "tone": "stern"},
        "main": {"ask": "old", "tone": "kind"},
    }
    arms: set[str] = set()
    for each in CONVERSATIONS[:200]:
        arm, texts = served(resources, each)
        assert arm == (canary_for({"canary-7": 0.3, "b": 0.2}, each) or "main") and texts == expected[arm]
        arms.add(arm)
    assert arms == {*expected}


def test_a_prompt_with_a_dot_in_its_name_is_no_canarys() -> None:
    assert served({"main": llm(), **prompts_for("canary", prompts(ask="x"))}, "talk") == ("main", {"canary.ask": "x"})
    assert served({**prompts(ask="x")}, "talk") == ("", {"ask": "x"}), "a set without an LLM has no arms"
