from __future__ import annotations

import pytest
from multidict import CIMultiDict

from agl_otel.proxy.callers import Conversation, conversation_of
from agl_otel_hook import conventions

TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE}-b7ad6b7169203331-01"
HEADER = conventions.HEADER_CONVERSATION_ID


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        ({"baggage": "x=1, gen_ai.conversation.id=chat%2F7;p=1", HEADER: "other", "traceparent": TRACEPARENT}, ("chat/7", True)),
        ({"baggage": "gen_ai.conversation.id=chat+7%2B"}, ("chat 7+", True)),
        ({"baggage": "x=1", HEADER: " chat 7 ", "traceparent": TRACEPARENT}, ("chat 7", True)),
        ({"baggage": "gen_ai.conversation.id=", "traceparent": TRACEPARENT}, (TRACE, False)),
        ({"baggage": "gen_ai.conversation.id=a%0Ab", HEADER: "b"}, ("b", True)),
        ({HEADER: "x" * 257, "traceparent": TRACEPARENT}, (TRACE, False)),
        ({HEADER: "\udc80", "traceparent": TRACEPARENT}, (TRACE, False)),
        ({HEADER: "x" * 256}, ("x" * 256, True)),
    ],
)
def test_a_conversation_is_found_in_the_order_of_what_says_more(headers: dict[str, str], found: tuple[str, bool]) -> None:
    assert conversation_of(CIMultiDict(headers)) == Conversation(*found)


def test_a_call_that_names_nothing_is_a_conversation_of_its_own() -> None:
    first, second = (conversation_of(CIMultiDict({"traceparent": "junk"})) for _ in range(2))
    assert first != second and not first.named
