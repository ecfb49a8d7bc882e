"""The review page in headless Chromium, by keyboard alone, over a queue of a thousand attempts: what was pressed is what is stored."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, Final

import pytest

from agl_otel.store import Store
from agl_otel.types.selections import Selected
from agl_otel_hook import conventions
from tests.contract.web.browser import built, look
from tests.contract.web.conftest import Web
from tests.contract.web.reviewed import RUBRIC, Made, make, review

RUN: Final = "review-page"
LABELS: Final = ("good", "not sure", "bad")
STORED: Final = f"""SELECT RolloutId, LogAttributes['{conventions.EVALUATION_LABEL}'], LogAttributes['{conventions.EVALUATION_SCORE}'],
  LogAttributes['{conventions.EVALUATION_TEXT}'], LogAttributes['{conventions.FEEDBACK_CORRECTION}']
FROM otel_logs WHERE LogAttributes['{conventions.FEEDBACK_SOURCE}'] = 'ann' AND LogAttributes['{conventions.FEEDBACK_RUBRIC}'] = '{{}}'
ORDER BY Timestamp"""


@pytest.fixture(scope="module")
def made(web: Web) -> list[Made]:
    """Store a rubric for each test and a thousand attempts, some with long answers, and four reviews by two others under another rubric."""
    built()
    for name in ("page", "page-agreed", "page-tabs"):
        assert web.rest("POST", "/reviews/rubrics", {"name": name, "text": RUBRIC}).status == 201
    asked = [(f"What is {n} + 1?", f"It is {n + 1}. " + "And so on. " * (n % 40), [-0.1, -n / 500]) for n in range(1000)]
    made = make(web, RUN, asked)
    for place, (ann, bob) in enumerate([("good", "good"), ("good", "bad"), ("bad", "bad"), ("bad", "bad")]):
        review(web, made[place], "bea", "page-agreed@1", ann)
        review(web, made[place], "bob", "page-agreed@1", bob)
    review(web, made[9], "cat", "page-agreed@1", "good")
    return made


async def select(web: Web, name: str, rows: list[Selected]) -> None:
    async with Store(web.url) as store:
        await store.put_selection(name, rows, {})


@pytest.mark.full
def test_what_is_pressed_is_stored_before_the_page_goes_on(web: Web, made: list[Made], tmp_path: Path) -> None:
    answers = {each.rollout_id: f"It is {place + 1}." for place, each in enumerate(made)}
    given: dict[str, Any] = {"url": web.url, "run": RUN, "rubric": "page", "agreed": "page-agreed", "labels": LABELS, "answers": answers}
    chosen = [(made[each], f"KeyError: {each}") for each in (700, 20, 21)]
    given |= {"selection": "page-hard", "selected": [(each.rollout_id, why) for each, why in chosen]}
    asyncio.run(
        select(web, "page-hard", [Selected(rollout_id=each.rollout_id, attempt_id=each.attempt_id, cluster=why) for each, why in chosen])
    )
    look("look_review.py", {**given, "shots": str(tmp_path)}, seconds=400)
    pressed: dict[str, dict[str, str]] = json.loads((tmp_path / "pressed.json").read_text())
    rows = web.rest("POST", "/sql", {"query": STORED.format("page@1")}).json["rows"]
    assert len(pressed) == 22 and len(rows) == 22 + 3, "each answer once, and three that were answered again"
    last = {rollout_id: tuple(rest) for rollout_id, *rest in rows}
    values = {"good": "1", "not sure": "", "bad": "0"}
    assert last == {each: (said["label"], values[said["label"]], said["text"], said["correction"]) for each, said in pressed.items()}
    left = web.rest("GET", "/reviews/queue", {"reviewer": "ann", "rubric": "page@1", "run": RUN}).json
    assert (left["total"], left["reviewed"]) == (978, 22) and not {each["rollout_id"] for each in left["items"]} & set(pressed)
    assert {path.stem for path in tmp_path.glob("*.png")} >= {"review-light", "review-dark", "review-light-narrow", "review-dark-narrow"}


@pytest.mark.full
def test_two_tabs_of_a_reviewer_go_on_from_one_draft(web: Web, made: list[Made], tmp_path: Path) -> None:
    look("look_tabs.py", {"url": web.url, "run": RUN, "rubric": "page-tabs", "sent": str(tmp_path / "sent")}, seconds=200)
    rows = web.rest("POST", "/sql", {"query": STORED.replace("'ann'", "'tabs'").format("page-tabs@1")}).json["rows"]
    assert rows == [[(tmp_path / "sent").read_text(), "good", "1", "from the first, and more", "from the second"]]
