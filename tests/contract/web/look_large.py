"""Check the pages of a rollout with very many spans. Run by test_large_rollout.py in Playwright's environment."""

from __future__ import annotations

import json
import sys
from typing import Any

from playwright.sync_api import expect, sync_playwright  # pyright: ignore[reportMissingImports]  # installed beside this environment

FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
ROWS = 200
"""Rows in the DOM: a table renders only its visible rows."""
given: dict[str, str] = json.loads(sys.argv[1])
address = f"{given['url']}/rollouts/{given['rollout']}"


def look(page: Any) -> None:
    """Check the paged waterfall and tree, the conversation's note on spans left out, and the pages of a long one."""
    main = page.locator("main")
    for view in ("waterfall", "tree"):
        page.goto(f"{address}?view={view}")
        expect(main).to_contain_text(given["first"], timeout=60_000)
        assert 0 < page.get_by_role("row").count() < ROWS
        page.get_by_role("button", name="later").click()
        expect(main).to_contain_text(given["next"], timeout=60_000)
        page.get_by_role("button", name="earlier").click()
        expect(main).to_contain_text(given["first"], timeout=60_000)
    page.goto(f"{address}?view=conversation")
    expect(main).to_contain_text(f"latest {given['left_out']} spans are not read", timeout=60_000)
    expect(main).to_contain_text("answer 1")
    expect(main).to_contain_text("question 25")
    page.goto(f"{given['url']}/rollouts/{given['talk']}?view=conversation")
    expect(main.locator(".call")).to_have_count(50, timeout=60_000)
    main.get_by_role("button", name="Show more of 60 calls").click()
    expect(main.locator(".call")).to_have_count(60)
    for place in (50, 60):  # in the middle of a page, and of the next one
        call = main.get_by_label(f"Call {place}", exact=True)
        expect(call.locator(".said")).to_have_count(1)
        call.get_by_role("button", name=f"show {place - 1} messages").press("Enter")
        expect(call.locator(".said")).to_have_count(place)
        expect(call.locator(".said").first).to_contain_text("question 1.")


with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=given["chromium"], args=FLAGS)
    page = browser.new_page(locale="en-US")
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    look(page)
    assert errors == [], errors
    browser.close()
