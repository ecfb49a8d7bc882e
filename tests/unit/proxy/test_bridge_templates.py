"""Random conversations through the chat templates of model families: what is sent in place of their rendering, token by token.

`BRIDGE_TREES=100000` plays more of them. The simulated model writes what models write and templates do not repeat: thinking, spaces, other
spellings of a tool call, tokens that the tokeniser would merge.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from agl_otel.proxy.bridge import Bridge, Conversations, bridged, frame_of, renderings
from agl_otel.proxy.reply import Choice, Json, Reply, ToolCall
from agl_otel.types.resources import Bridging
from tests.chat_templates import FAMILIES, TOOLS, WORDS, tokenizer_of

TREES = int(os.environ.get("BRIDGE_TREES", "350"))


@dataclass
class Node:
    """A conversation up to an answer."""

    messages: list[Json]
    ids: list[int]
    """All of its tokens, as sampled and sent."""
    end: str
    depth: int = 1


@dataclass
class World:
    """A model server with one template, and an agent that goes on with any of its earlier conversations."""

    name: str
    random: random.Random
    how: Bridging = "keep"
    counts: Counter[str] = field(default_factory=Counter[str])

    def __post_init__(self) -> None:
        self.family, self.tokenizer = FAMILIES[self.name], tokenizer_of(self.name)
        self.tools = TOOLS if self.family.most_calls and self.random.random() < 0.8 else []
        self.kwargs = {"enable_thinking": self.random.random() < 0.7} if self.family.thinks else {}
        self.conversations, self.calls, self.nonces = Conversations(), 0, 0

    def text_of(self, request: Json) -> str:
        messages = [self._for_template(message) for message in request["messages"]]
        tokenizer: Any = self.tokenizer
        return tokenizer.apply_chat_template(
            messages,
            tools=request.get("tools"),
            add_generation_prompt=request["add_generation_prompt"],
            tokenize=False,
            **request.get("chat_template_kwargs", {}),
        )

    def tokens(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _for_template(self, message: Json) -> Json:
        if not message.get("tool_calls") or self.family.spelled:
            return message
        calls = [
            {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
        return {**message, "tool_calls": calls}

    def text(self) -> str:
        return "".join(self.random.choice(WORDS) for _ in range(self.random.randrange(4)))

    def answer(self) -> tuple[Json, list[int], str, str]:
        """Return an answer as the client gets it, its sampled tokens, its thinking, and its end token."""
        thinking = self.text() + "hm" if self.family.thinks and self.kwargs.get("enable_thinking") and self.random.random() < 0.8 else ""
        calls: list[Json] = [
            {
                "id": f"c{self.random.randrange(10**9)}",
                "type": "function",
                "function": {"name": "look", "arguments": json.dumps({"at": self.text()})},
            }
            for _ in range(self.random.randint(0, self.family.most_calls) if self.tools else 0)
        ]
        content = self.text() or ("" if calls else "ok")
        spelled = "".join(  # with spaces and an order that no template has
            f'<tool_call> {{"arguments":{call["function"]["arguments"]},  "name": "look"}}</tool_call>' for call in calls
        )
        end = self.family.ends[bool(calls)]
        sampled = self._sampled((f"<think>\n{thinking}</think>\n" if thinking else "") + content + spelled) + self.tokens(end)
        message: Json = {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}
        return message, sampled, thinking, end

    def _sampled(self, text: str) -> list[int]:
        """Tokenise in pieces, as a model may that does not know the tokeniser's merges."""
        ids, at = list[int](), 0
        while at < len(text):
            step = self.random.randint(1, 9)
            ids += self.tokens(text[at : at + step])
            at += step
        return ids

    def new_messages(self, calls: list[Json]) -> list[Json]:
        self.nonces += 1
        mark = f"⟪{self.nonces}⟫"
        if calls:
            new: list[Json] = [{"role": "tool", "tool_call_id": call["id"], "content": mark + self.text()} for call in calls]
            return new if self.random.random() < 0.8 else [*new, {"role": "user", "content": "and " + self.text()}]
        new = [{"role": "user", "content": mark + self.text()}]
        return [{"role": "system", "content": mark + "be kind"}, *new] if self.family.systems and self.random.random() < 0.1 else new

    def ask(self, node: Node | None) -> Node | None:
        """Make a call that goes on with an answer, or begins; compare its prompt with what the template's text says."""
        last = node.messages[-1] if node is not None else {}
        opening: list[Json] = [{"role": "system", "content": "be brief"}] if self.random.random() < 0.5 else []
        new = [*([] if node is not None else opening), *self.new_messages(last.get("tool_calls", []))]
        messages = [*(node.messages if node is not None else []), *new]
        body: Json = {"model": "m", "messages": messages, **({"tools": self.tools} if self.tools else {}), "temperature": 1.0}
        body |= {"chat_template_kwargs": self.kwargs} if self.kwargs else {}
        bridge = Bridge(("http://m", "m"), frame_of(body))
        earlier = self.conversations.find(body, bridge)
        whole = self.text_of({**body, "add_generation_prompt": True})
        prompt = template = self.tokens(whole)
        if node is not None:
            assert earlier is not None, bridge.refused
            assert earlier.ids() == node.ids
            asked = renderings(body, model="m", first=earlier.before is None)
            bridged(bridge, earlier, {name: self.tokens(self.text_of(each)) for name, each in asked.items()}, self.how)
            self.counts[bridge.refused or "bridged"] += 1
            if self.name == "glm4moe" and new[0]["role"] == "system":  # the model had opened the user's turn
                assert bridge.refused == "no_seam"
            else:
                assert not bridge.refused
            if not bridge.refused:
                prompt = bridge.prompt
                tail = self.tokens(self.new_part(whole, node.end))
                assert prompt == node.ids + tail, "the sampled tokens, and what the template's text has after the answer"
                if template[: len(node.ids)] == node.ids:
                    self.counts["appended"] += 1
                    assert prompt == template
        message, sampled, thinking, end = self.answer()
        choice = Choice(sampled, [-1.0] * len(sampled), [message["content"]], [thinking] if thinking else [], finish_reason="stop")
        for place, call in enumerate(message.get("tool_calls", [])):
            choice.tool_calls[place] = ToolCall(call["id"], ["look"], [call["function"]["arguments"]])
        self.calls += 1
        bridge.settle(prompt)
        self.conversations.remember(self.calls, body, Reply(prompt_token_ids=prompt, choices={0: choice}), bridge)
        return Node([*messages, message], prompt + sampled, end, (node.depth if node is not None else 0) + 1)

    def new_part(self, whole: str, end: str) -> str:
        """Return the template's text after the end of the last answer: from there to the first new message's mark no other ends."""
        mark = re.search(f"⟪{self.nonces}⟫", whole)
        assert mark is not None
        return whole[whole.rindex(end, 0, mark.start()) + len(end) :]


@pytest.mark.parametrize("name", FAMILIES)
def test_random_trees_continue_by_what_was_sampled_and_what_the_template_adds(name: str) -> None:
    counts: Counter[str] = Counter()
    for seed in range(max(1, TREES // len(FAMILIES))):
        source = random.Random(f"{name} {seed}")
        world = World(name, source, counts=counts)
        nodes = [world.ask(None)]
        for _ in range(source.randint(1, 8)):
            begun = world.ask(source.choice(nodes) if source.random() < 0.9 else None)
            nodes.append(begun)
    assert counts["no_seam"] == 0 or name == "glm4moe"
    assert counts["bridged"] > TREES // len(FAMILIES)
