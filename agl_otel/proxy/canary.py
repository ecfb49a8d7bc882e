"""Which conversations a canary answers: an LLM that has a share of those of its set of resources. Pure.

The choice is a hash of the canary's resource name and the conversation, so it needs no memory: a conversation stays where it is while the
shares stay, and a share that grows keeps the conversations that it has. A canary under another name gets other conversations.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b


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
