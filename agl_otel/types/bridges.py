"""Why a call of a conversation was not continued by its sampled tokens (docs/bridging.md): the proxy records it, readers show it."""

from __future__ import annotations

import json
from typing import Any, Final, cast

UNBRIDGED: Final = {
    "unknown": "no call of the attempt, or none that this proxy process remembers, asked what comes before the last answer",
    "edited": "the last answer is not what the model server said: the agent changed it",
    "request": "tools, or another field that a template may read, differ from those of the earlier call",
    "server": "another model server, or model, gave the earlier answer",
    "no_ids": "the earlier answer has no token ids",
    "cut": "the earlier answer was cut off: by its limit, a stop string or an abort, so that it has no end token",
    "media": "the messages hold something else than text",
    "prefill": "the request begins the answer itself, or asks for no generation prompt",
    "own_ids": "the request names token ids itself",
    "thinking": "the template drops the earlier answer's thinking, and the resource says `drop`",
    "render": "the model server has no /tokenize that renders messages",
    "other_template": "/tokenize renders the earlier prompt otherwise than the model server did",
    "no_seam": "the template does not show where the earlier answer ends, or ends it with another token than the model did",
    "moved": "the template writes the new messages, or the tools, at another place than after the earlier answer",
    "not_taken": "the model server took the messages, and not the token ids that were sent with them",
}
"""{why a call that has an earlier answer among its messages was not bridged: in words}."""


def unbridged(recorded: str) -> str:
    """Return the key of UNBRIDGED in the value of `agentlightning.llm.bridge`; empty if there is none."""
    if not recorded:
        return ""
    try:
        read: Any = json.loads(recorded)
    except (ValueError, RecursionError):  # another program's
        return ""
    why = cast("dict[str, Any]", read).get("refused") if isinstance(read, dict) else None
    return why if isinstance(why, str) and why in UNBRIDGED else ""
