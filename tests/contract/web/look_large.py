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
    """Check the paged waterfall and tree, and the conversation's note on spans left out."""
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


with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=given["chromium"], args=FLAGS)
    page = browser.new_page(locale="en-US")
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    look(page)
    assert errors == [], errors
    browser.close()
