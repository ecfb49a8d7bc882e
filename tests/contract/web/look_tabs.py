"""Write drafts in two tabs of one reviewer. Run by test_review_page.py in Playwright's environment."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import expect, sync_playwright  # pyright: ignore[reportMissingImports]  # installed beside this environment

given: dict[str, Any] = json.loads(sys.argv[1])
COMMENT, CORRECTION = "Comment", "What it should have answered"


def shown(page: Any, title: str | None = None) -> str:
    """Return the rollout that is shown, once it is this one."""
    expect(page.locator(".labels button").first).to_be_enabled(timeout=30_000)
    if title is not None:
        expect(page.locator("aside .tail")).to_have_attribute("title", title)
    return page.locator("aside .tail").get_attribute("title")


def text_of(page: Any, name: str) -> Any:
    return expect(page.get_by_label(name))


def play(first: Any, second: Any) -> str:
    """Write into both tabs; return the rollout whose review was sent."""
    rollout = shown(first)
    assert shown(second) == rollout, "the order is the same in both"
    first.keyboard.press("c")
    first.keyboard.type("from the first")
    text_of(second, COMMENT).to_have_value("from the first")
    second.keyboard.press("e")
    second.keyboard.type("from the second")
    text_of(first, CORRECTION).to_have_value("from the second")
    second.keyboard.press("Escape")
    second.keyboard.press("j")
    expect(second.locator("aside .tail")).not_to_have_attribute("title", rollout)
    other = shown(second)
    second.keyboard.press("c")
    second.keyboard.type("of another attempt")
    first.keyboard.type(", and more")
    for page in (first, second):
        page.reload()
        assert shown(page) == rollout
        text_of(page, COMMENT).to_have_value("from the first, and more")
        text_of(page, CORRECTION).to_have_value("from the second")
        page.keyboard.press("j")
        shown(page, other)
        text_of(page, COMMENT).to_have_value("of another attempt")
        page.keyboard.press("k")
        shown(page, rollout)
    first.keyboard.press("1")
    expect(first.get_by_role("status")).to_contain_text("Stored", timeout=30_000)
    text_of(second, COMMENT).to_have_value("")
    return rollout


with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=given["chromium"], args=["--no-sandbox", "--disable-gpu"])
    context = browser.new_context()
    pages = [context.new_page() for _ in range(2)]
    for place, page in enumerate(pages):
        page.goto(f"{given['url']}/review?run={given['run']}&rubric={given['rubric']}")
        if place == 0:
            page.get_by_label("Your name").fill("tabs")
            page.get_by_label("Your name").press("Enter")
        shown(page)
    Path(given["sent"]).write_text(play(*pages))
    browser.close()
