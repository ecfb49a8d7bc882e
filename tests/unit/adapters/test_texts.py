from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agl_otel.adapters.texts import conversation_at, messages_at
from agl_otel.adapters.trajectories import CALL_REFUSALS, to_trajectories
from agl_otel.types.bridges import UNBRIDGED
from agl_otel.types.columns import CallTexts


def text(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": content}]}


def texts(*asked_and_answered: tuple[list[dict[str, Any]], str]) -> CallTexts:
    count = len(asked_and_answered)
    return CallTexts(
        instructions=[""] * count,
        asked=[json.dumps(asked) if asked else "" for asked, _ in asked_and_answered],
        answered=[json.dumps([text("assistant", answer)]) for _, answer in asked_and_answered],
        tools=[""] * count,
        versions=[""] * count,
        experts=[""] * count,
        bridges=[""] * count,
    )


def test_break_of_a_conversation_is_explained_by_its_messages(traces: Any, row: Any) -> None:
    built = traces.build(row(call=1, prompt=[1, 2], response=[3]), row(call=2, prompt=[1, 2, 9, 4], response=[5]))
    asked = [text("user", "hello")]
    drift = texts((asked, "hi"), ([*asked, text("assistant", "hi"), text("user", "more")], "yes"))
    edited = texts((asked, "hi"), ([*asked, text("assistant", "HI!"), text("user", "more")], "yes"))
    spaced = texts((asked, "hi"), ([*asked, text("assistant", "hi "), text("user", "more")], "yes"))
    other = texts((asked, "hi"), ([text("user", "another matter")], "yes"))
    found = [dict(to_trajectories(replace(built, texts=each)).breaks) for each in (drift, edited, spaced, other, None)]
    assert found == [{"template_drift": 1}, {"history_edited": 1}, {"history_edited": 1}, {"sub_agent": 1}, {"response_changed": 1}]


def test_break_names_why_no_bridge_was_made(traces: Any, row: Any) -> None:
    built = traces.build(row(call=1, prompt=[1, 2], response=[3]), row(call=2, prompt=[1, 2, 9, 4], response=[5]))
    asked = [text("user", "hello")]
    drift = texts((asked, "hi"), ([*asked, text("assistant", "hi"), text("user", "more")], "yes"))
    edited = texts((asked, "hi"), ([*asked, text("assistant", "HI!"), text("user", "more")], "yes"))
    unknown = texts(([], ""), ([], ""))

    def reasons(read: CallTexts, recorded: str) -> dict[str, int]:
        return dict(to_trajectories(replace(built, texts=replace(read, bridges=["", recorded]))).breaks)

    for why in UNBRIDGED:
        refused = json.dumps({"refused": why})
        assert reasons(drift, refused) == reasons(unknown, refused) == {f"unbridged_{why}": 1}
        assert reasons(edited, refused) == {"history_edited": 1}, "the messages tell more"
    for other in ("", "{", "[]", '{"refused": "of another program"}', '{"refused": 1}', '{"call": 1, "choice": 0}'):
        assert (reasons(drift, other), reasons(unknown, other)) == ({"template_drift": 1}, {"response_changed": 1})


def test_a_conversation_that_begins_with_the_summary_of_an_earlier_one_is_compacted(traces: Any, row: Any) -> None:
    built = traces.build(row(call=1, prompt=(1, 2), response=(3,)), row(call=2, prompt=(1, 4), response=(5,)))
    facts = "The file A1.txt says that 1940 people live there."
    rules = text("system", "You write code.")
    asked = [rules, text("user", "How many live in A1?")]
    summary = f"<analysis>\nSo far:\n</analysis>\n<summary>\n{facts}\n</summary>"
    going_on = text("user", f"This session is continued from an earlier one. Summary:\n{facts}\nGo on.")
    stamped = [text("system", f"Version 1.{number}.\nYou write code.\nYou use tools.") for number in range(2)]
    for openings, expected in (
        ([rules, going_on], "compacted"),
        ([*asked, going_on], "compacted"),
        ([text("system", "You edit texts."), going_on], "sub_agent"),
        ([rules, text("user", "How many live in B1?")], "sub_agent"),
        ([*asked, text("assistant", facts), text("user", "Sure?")], "history_edited"),
    ):
        found = to_trajectories(replace(built, texts=texts((asked, summary), (openings, "1940"))))
        assert dict(found.breaks) == {expected: 1}
    found = to_trajectories(replace(built, texts=texts(([stamped[0], *asked[1:]], summary), ([stamped[1], going_on], "1940"))))
    assert dict(found.breaks) == {"compacted": 1}


def test_images_of_the_last_call_are_kept(traces: Any, row: Any) -> None:
    built = traces.build(row(rollout="ro-1"), row(rollout="ro-2"))
    parts = [
        {"type": "image_url", "image_url": {"url": "https://a/1.png"}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": "QQ=="}},
        {"type": "input_image", "image_url": "https://a/2.png"},
    ]
    with_images = texts(([], ""), ([{"role": "user", "parts": parts}], "a cat"))
    calls = replace(built.calls, has_media=np.array([False, True]))
    batch = to_trajectories(replace(built, calls=calls, texts=with_images))
    assert batch.images == [[], ["https://a/1.png", "data:image/jpeg;base64,QQ==", "https://a/2.png"]]


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"type": "input_image", "file_id": "file-1"}, "no_image"),
        ({"type": "file", "file": {"file_id": "file-1"}}, "no_image"),
        ({"type": "image", "source": {"type": "file", "file_id": "file-1"}}, "no_image"),
        ({"type": "blob", "mime_type": "image/png", "content": ""}, "no_image"),
        ({"type": "input_audio", "input_audio": {"data": "QQ==", "format": "wav"}}, "other_media"),
        ({"type": "blob", "modality": "audio", "content": "QQ=="}, "other_media"),
        ({"type": "blob", "mime_type": "audio/wav", "content": "QQ=="}, "other_media"),
        ({"type": "uri", "modality": "video", "uri": "https://a/1.mp4"}, "other_media"),
        ({"type": "video_url", "video_url": {"url": "https://a/1.mp4"}}, "other_media"),
        ({"type": "uri", "modality": "image", "uri": "https://a/1.png"}, ""),
    ],
)
def test_calls_whose_prompt_holds_media_that_nobody_has_are_not_trained_on(traces: Any, row: Any, part: dict[str, Any], why: str) -> None:
    """Nor are those that go on from it: what they store of the prompt has no media."""
    built = traces.build(
        row(rollout="ro-1"), row(rollout="ro-2", call=1), row(rollout="ro-2", call=2, prefix=(1, 0), prompt=[7]), row(rollout="ro-3")
    )
    asked = [{"role": "user", "parts": [{"type": "text", "content": "?"}, part]}]
    plain = [text("user", "hello")]
    with_media = texts((plain, "hi"), (asked, "a cat"), ([*asked, text("assistant", "a cat"), text("user", "sure?")], "yes"), (plain, "hi"))
    calls = replace(built.calls, has_media=np.array([False, True, False, False]))
    for by_call in (False, True):
        batch = to_trajectories(replace(built, calls=calls, texts=with_media), by_call=by_call)
        assert batch.refused == ({why: 2} if why else {}) and (not why or why in CALL_REFUSALS)
        assert set(batch.rollout_id) == ({"ro-1", "ro-3"} if why else {"ro-1", "ro-2", "ro-3"})
        if not why:
            assert [images for images in batch.images if images] == [["https://a/1.png"]] * (2 if by_call else 1)


def test_a_prompt_with_media_whose_messages_are_not_known_is_not_trained_on(traces: Any, row: Any) -> None:
    built = traces.build(row(rollout="ro-1"))
    calls = replace(built.calls, has_media=np.array([True]))
    assert to_trajectories(replace(built, calls=calls, texts=texts(([], "")))).refused == {"no_image": 1}


def test_unknown_messages_are_empty() -> None:
    shortened = texts(([text("system", "3 messages of 99 characters are left out"), text("user", "x")], "y"))
    assert messages_at(shortened, 0) == ((), "")
    broken = CallTexts([""], ["[{"], [""], [""], [""], [""], [""])
    assert conversation_at(broken, 0).prompt == []
    assert conversation_at(None, 0).prompt == []
