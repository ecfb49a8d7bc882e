"""Which conversations a canary answers, an LLM that has a share of those of its set of resources, and which prompts they get.

The choice is a hash of the canary's resource name and the conversation, so it needs no memory: a conversation stays where it is while the
shares stay, and a share that grows keeps the conversations that it has. A canary under another name gets other conversations. What needs
memory is a limit to the number of conversations (Taken).

A prompt of the canary `next` is the resource `next.NAME`: its conversations get that as NAME.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Final

from agl_otel.types import LLM, NamedResources, PromptTemplate, ResourcesUpdate, Served
from agl_otel.types.resources import OWNER, shares_in

MAX_CONVERSATION: Final = 256  # characters of a conversation's id


def conversation_id(given: str) -> str | None:
    """Return the id of a conversation without spaces around it; None if it is too long, or has characters that do not print."""
    found = given.strip()
    return found if found and len(found) <= MAX_CONVERSATION and found.isprintable() else None


def drawn(name: str, conversation: str) -> float:
    """Return a conversation's number in [0, 1) for the canary `name`: it answers those whose number is below its share."""
    digest = blake2b(f"{name}\0{conversation}".encode(errors="surrogateescape"), digest_size=8).digest()
    return (int.from_bytes(digest) >> 11) / (1 << 53)


def canary_for(shares: Mapping[str, float], conversation: str) -> str | None:
    """Return which canary of {resource name: share} answers a conversation, if one does.

    Of several each draws from what those before it left, so that each gets its share of all conversations.
    """
    left = 1.0
    for name, share in shares.items():
        if drawn(name, conversation) * left < share:
            return name
        left -= share
    return None


class Taken:
    """The conversations that the canaries of one set have taken, where they may take so many (LLM.most_conversations)."""

    def __init__(self) -> None:
        self._taken: dict[str, set[str]] = {}
        self._left: dict[str, int] = {}

    def begin(self, resources: NamedResources) -> None:
        """Count anew for another version of the set; a canary that it still has keeps the conversations that it has taken."""
        limits = {name: each.most_conversations for name, each in resources.items() if isinstance(each, LLM)}
        self._left = {name: most for name, most in limits.items() if most is not None}
        self._taken = {name: self._taken.get(name, set()) for name in self._left}

    def takes(self, canary: str, conversation: str) -> bool:
        """Whether a canary takes a conversation, which it does for good."""
        taken = self._taken.get(canary)
        if taken is None or conversation in taken:
            return True
        if self._left[canary] == 0:
            return False
        self._left[canary] -= 1
        taken.add(conversation)
        return True


def served_to(update: ResourcesUpdate, conversation: str) -> Served:
    """Return the prompts of a set that a conversation gets, and who answers its calls."""
    shares = shares_in(update.resources)
    first = next((name for name, each in update.resources.items() if isinstance(each, LLM) and name not in shares), "")
    arm = canary_for(shares, conversation) or first
    return Served(resources_id=update.resources_id, version=update.version, arm=arm, prompts=_prompts_of(arm, update.resources, shares))


def prompts_for(arm: str, prompts: Mapping[str, PromptTemplate]) -> dict[str, PromptTemplate]:
    """Return prompts by the resource names that they have as those of a canary."""
    return {f"{arm}.{name}": prompt for name, prompt in prompts.items()}


def _prompts_of(arm: str, resources: NamedResources, shares: Mapping[str, float]) -> dict[str, PromptTemplate]:
    prompts = {name: each for name, each in resources.items() if isinstance(each, PromptTemplate) and name != OWNER}
    of_canary = {name: prompt for name, prompt in prompts.items() if any(name.startswith(f"{canary}.") for canary in shares)}
    own = {name.removeprefix(f"{arm}."): prompt for name, prompt in of_canary.items() if arm in shares and name.startswith(f"{arm}.")}
    return {name: prompt for name, prompt in prompts.items() if name not in of_canary} | own
