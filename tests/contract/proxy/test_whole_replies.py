"""Replies that failed or lost tokens on the way from the model server: each is passed on, and recorded with what it lacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from agl_otel.proxy.answer import ANSWER_BYTES
from agl_otel.proxy.recorder import DEFECT_TEXTS
from agl_otel.proxy.reply import UNFINISHED
from agl_otel_hook import conventions
from tests.contract.proxy.test_hostile_servers import STREAM_HEAD, Server, asked, before
from tests.otlp_receiver import OtlpReceiver

Json = dict[str, Any]
DONE: Final = "[DONE]"
ERROR: Final[Json] = {"error": {"message": "EngineDeadError", "type": "InternalServerError", "param": None, "code": 500}}
LOST: Final = '{"choices":[{"index":0,"token_ids":[6]'


def logprobs(ids: list[int], *, value: float = -0.5) -> Json:
    return {"content": [{"token": f"token_id:{each}", "logprob": value, "bytes": None, "top_logprobs": []} for each in ids]}


def part(ids: list[int] | None, finish: str | None = None, text: str = "x", index: int = 0, **other: Any) -> Json:
    """A choice of a stream, with `prompt_token_ids` beside it as a first event has them."""
    tokens = {} if ids is None else {"token_ids": ids, "logprobs": logprobs(ids)}
    choice = {"index": index, "delta": {"content": text}, "finish_reason": finish, **tokens, **other}
    return {"id": "s", "model": "m", "prompt_token_ids": [1, 2, 3], "choices": [choice]}


def usage(tokens: int) -> Json:
    return {"id": "s", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": tokens, "total_tokens": 3 + tokens}}


def stream(*events: Any) -> bytes:
    data = (event if isinstance(event, str) else json.dumps(event) for event in events)
    return STREAM_HEAD + b"".join(f"data: {each}\n\n".encode() for each in data)


def whole(finish: Any = "stop", status: bytes = b"200 OK", **other: Any) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": finish, "token_ids": [5, 6, 7]}
    choice = {**choice, "logprobs": logprobs([5, 6, 7])} | other.pop("choice", {})
    body = json.dumps({"id": "w", "model": "m", "prompt_token_ids": [1, 2], "choices": [choice], **other}).encode()
    return b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body


async def recorded(answer: bytes, receiver: OtlpReceiver) -> tuple[Any, Any]:
    """Return the first span of a call that is answered so, and the proxy's counts."""
    async with before(Server([answer]), receiver, ANSWER_BYTES) as stand:
        await asked(stand, stream=answer.startswith(STREAM_HEAD))
        span, *_ = await stand.calls()
        return span, (await stand.health())["counts"]


FAILED: Final = {
    "an error event": (stream(part([5]), part([6]), ERROR, DONE), "upstream_failed"),
    "an error event without an end": (stream(part([5]), part([6]), ERROR), "upstream_failed"),
    "an error event after the finish": (stream(part([5]), part([6], "stop"), ERROR, DONE), "upstream_failed"),
    "an error beside choices": (whole(**ERROR), "upstream_failed"),
    "an end without a finish": (stream(part([5]), part([6]), DONE), "upstream_ended_early"),
    "an end without a finish of one choice": (stream(part([5], "stop"), part([6], index=1), DONE), "upstream_ended_early"),
    "no finish in a whole answer": (whole(None), "upstream_ended_early"),
    "no choices": (whole(choices=[]), "upstream_ended_early"),
    "aborted": (whole("abort"), "upstream_aborted"),
    "aborted in a stream": (stream(part([5]), part([6], "abort"), DONE), "upstream_aborted"),
    "finished by an error": (whole("error"), "upstream_failed"),
    "filtered": (whole("content_filter"), "upstream_filtered"),
    "not found": (whole(status=b"404 Not Found"), "upstream_status"),
    "broken JSON": (stream(part([5]), LOST, part([7], "stop"), DONE), "upstream_unreadable"),
    "broken JSON though the count is right": (stream(part([5]), LOST, part([7], "stop"), usage(2), DONE), "upstream_unreadable"),
    "cut in its last event": (stream(part([5]), part([6], "stop")) + b'data: {"choices": [], "us', "upstream_unreadable"),
}


@pytest.mark.parametrize("kind", FAILED)
async def test_a_reply_that_failed_or_was_cut_is_marked_incomplete(kind: str, receiver: OtlpReceiver) -> None:
    answer, why = FAILED[kind]
    span, counts = await recorded(answer, receiver)
    assert span.error and span.attributes.get(conventions.LLM_INCOMPLETE) == why
    assert counts["failed"] == 1


DEFECTS: Final = {
    "fewer ids than the usage says": (whole(usage={"completion_tokens": 9}), "token_count"),
    "more ids than the usage says": (whole(usage={"completion_tokens": 2}), "token_count"),
    "fewer ids in a stream": (stream(part([5]), part([7], "stop"), usage(3), DONE), "token_count"),
    "a count of one choice of two": (stream(part([5], "stop"), part([6], "stop", index=1), usage(1), DONE), "token_count"),
    "text without ids": (stream(part([5]), part(None, text="LOST"), part([7], "stop"), DONE), "ids_missing"),
    "text with no ids": (stream(part([5]), part([], text="LOST"), part([7], "stop"), DONE), "ids_missing"),
    "reasoning without ids": (stream(part([5]), part(None, delta={"reasoning": "hm"}), part([7], "stop"), DONE), "ids_missing"),
    "a tool call without ids": (
        stream(part([5]), part(None, delta={"tool_calls": [{"function": {"name": "f"}}]}), part([7], "stop"), DONE),
        "ids_missing",
    ),
    "text without ids, counted": (stream(part([5]), part(None, text="LOST"), part([7], "stop"), usage(3), DONE), "token_count"),
    "log-probs of other tokens": (whole(choice={"logprobs": logprobs([7, 8, 9])}), "logprobs_other_tokens"),
    "log-probs of other tokens in a stream": (stream(part([5], logprobs=logprobs([8])), part([6], "stop")), "logprobs_other_tokens"),
    "log-probs of other tokens in completions": (
        whole(choice={"logprobs": {"tokens": ["token_id:7", "token_id:6", "token_id:5"], "token_logprobs": [-1.0, -1.0, -1.0]}}),
        "logprobs_other_tokens",
    ),
    "log-probs above 0": (whole(choice={"logprobs": logprobs([5, 6, 7], value=0.7)}), "logprobs_above_zero"),
}


@pytest.mark.parametrize("kind", DEFECTS)
async def test_a_reply_that_lost_tokens_is_recorded_without_what_cannot_be_trusted(kind: str, receiver: OtlpReceiver) -> None:
    answer, defect = DEFECTS[kind]
    span, counts = await recorded(answer, receiver)
    assert span.attributes.get(conventions.LLM_DEFECT) == defect and counts[defect] == 1
    assert conventions.LLM_RESPONSE_LOGPROBS not in span.attributes and not span.error
    assert "gen_ai.output.messages" in span.attributes


APART: Final = " " * (1 << 20)
"""Data longer than what is read at once, so that the events around it do not arrive together."""
TEXT_FIRST: Final = part(None, text="echo")
HEALTHY: Final = {
    "with the usage": stream(part([5]), part([6, 7], "stop"), usage(3), DONE),
    "with the usage so far in each event": stream(
        part([5]) | usage(1) | {"choices": part([5])["choices"]}, part([6, 7], "stop"), usage(3), DONE
    ),
    "with a role, a comment, and an event without data": stream(part(None, text=""), part([5]), part([6, 7], "stop"), DONE).replace(
        b"data: [DONE]", b": ping\n\nevent: ping\n\ndata:\n\ndata: [DONE]"
    ),
    "with ids without text": stream(part([5], text=""), part([6], text="é"), part([7], "stop", text=""), DONE),
    "with text before all ids, as echo sends it": stream(TEXT_FIRST, part([5]), part([6, 7], "stop"), DONE),
    "with text held back until after all ids": stream(part([5]), part([6, 7]), part([], "stop", text="rest"), DONE),
    "with text without ids, all counted": stream(part([5]), part(None, text="é"), part([6, 7], "stop"), usage(3), DONE),
    "with the end in its text": stream(part([5], text="[DONE] message_stop"), APART, part([6, 7], "stop"), DONE),
    "without an end": stream(part([5]), part([6, 7], "stop")),
    "with events after the end": stream(part([5]), part([6, 7], "stop"), DONE, part([8], index=1)),
    "cut at its length": whole("length", usage={"completion_tokens": 3}),
    "with a finish reason of the server's own": whole("eos_token"),
    "with log-probs rounded above 0": whole(choice={"logprobs": logprobs([5, 6, 7], value=6e-5)}),
    "with log-probs named by text": whole(choice={"logprobs": {"tokens": ["a", "b", "c"], "token_logprobs": [-1.0, -1.0, -1.0]}}),
    "created": whole(status=b"201 Created"),
}


@pytest.mark.parametrize("kind", HEALTHY)
async def test_a_whole_reply_is_recorded_with_all_its_tokens(kind: str, receiver: OtlpReceiver) -> None:
    span, counts = await recorded(HEALTHY[kind], receiver)
    assert not span.error and not {conventions.LLM_INCOMPLETE, conventions.LLM_DEFECT} & span.attributes.keys()
    assert span.attributes[conventions.LLM_RESPONSE_TOKEN_IDS] == [5, 6, 7]
    assert len(span.attributes[conventions.LLM_RESPONSE_LOGPROBS]) == 3 and "failed" not in counts


async def test_the_usage_counts_the_tokens_of_all_choices(receiver: OtlpReceiver) -> None:
    span, counts = await recorded(stream(part([5], "stop"), part([6, 7], "length", index=1), usage(3), DONE), receiver)
    assert span.attributes[conventions.LLM_RESPONSE_TOKEN_IDS] == [5] and "token_count" not in counts


def test_all_reasons_are_documented() -> None:
    text = (Path(__file__).parents[3] / "docs" / "training-files.md").read_text()
    assert [name for name in (*DEFECT_TEXTS, *UNFINISHED.values()) if f"`{name}`" not in text] == []
