"""Read the history of a run of `improve` by keyboard alone. Run by test_improve_page.py in Playwright's environment."""

from __future__ import annotations

import json
import sys
from typing import Any

from playwright.sync_api import expect, sync_playwright  # pyright: ignore[reportMissingImports]  # installed beside this environment

FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
given: dict[str, Any] = json.loads(sys.argv[1])
address = f"{given['url']}/runs/view?run={given['run']}"
FOCUSED = "document.activeElement.getAttribute('aria-label') ?? document.activeElement.innerText.trim()"
COLOUR = "element => getComputedStyle(element).backgroundColor"


def press(page: Any, name: str, place: str = "body") -> None:
    """Press Tab until an element below a place has the focus, and Enter on it."""
    for _ in range(200):
        if page.evaluate(FOCUSED) == name and page.evaluate(f"!!document.activeElement.closest({json.dumps(place)})"):
            page.keyboard.press("Enter")
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"Tab does not reach {name!r}")


def row(page: Any, cycle: int) -> Any:
    """Return the row of a cycle."""
    return page.get_by_role("row").filter(has=page.get_by_role("button", name=f"Cycle {cycle}", exact=True))


def opened(page: Any, path: str, text: str) -> Any:
    """Open a page, and wait for a text."""
    page.goto(given["url"] + path)
    expect(page.locator("main")).to_contain_text(text, timeout=30_000)
    return page.locator("main")


def listed(page: Any) -> None:
    """Find the run, which has no rollouts of its own, among the others."""
    main = opened(page, "/runs", given["run"])
    found = main.get_by_role("row").filter(has_text=given["run"])
    expect(found).to_contain_text("1 of 3 promoted")
    press(page, given["run"])
    page.wait_for_url(f"**/runs/view?run={given['run']}")


def told(page: Any) -> None:
    """Read verdicts, reasons and evidence; the alarm stands out, and no text of the store is markup."""
    main = opened(page, f"/runs/view?run={given['run']}", "rolled back")
    expect(main.get_by_role("alert")).to_have_count(0)
    expect(main.locator(".stats")).to_contain_text("Promoted1")
    first, second, third, last = (row(page, cycle) for cycle in (1, 2, 3, 4))
    expect(first).to_contain_text("0.25 → 0.5[+0.125, +0.375]")
    expect(first).to_contain_text("+0.08better")
    expect(first).to_contain_text("0.625 against 0.534 of 40 rated, 10 %")
    expect(second).to_contain_text(given["reasons"]["trusted_falls"])
    expect(second).to_contain_text("onerror='window.hacked=1'>\\u202egnp")
    expect(third).to_contain_text(given["reasons"]["canary_worse"])
    expect(last).to_contain_text("canary under way")
    expect(last).to_contain_text("0.625 against 0.534 of 40 rated, 10 %")
    expect(main.locator(".stats")).to_contain_text("Cycles3")
    expect(main.locator(".problem")).to_contain_text("Alarm of an exploited reward: cycle 2")
    alarm, quiet = (each.locator("td").first.evaluate(COLOUR) for each in (second, third))
    assert alarm != quiet, "an alarm stands out"
    assert page.evaluate("window.hacked") is None
    assert main.locator(".chart circle").count() >= 10, "both charts have their points"


def down(page: Any) -> None:
    """Go from a cycle to its attempts and reviews, its selection, and its training run."""
    opened(page, f"/runs/view?run={given['run']}", "rolled back")
    press(page, "Cycle 1")
    attempts = page.get_by_role("table", name="Attempts of cycle 1")
    expect(attempts.get_by_role("row")).to_have_count(50, timeout=30_000)
    assert "cycle=1" in page.url, "the address leads here again"
    press(page, "show more")
    expect(attempts.get_by_role("row")).to_have_count(given["window"] - 1, timeout=30_000)
    expect(attempts.get_by_role("row").filter(has_text=given["first"]).locator(".right")).to_have_text("1", timeout=30_000)
    press(page, given["first"], ".window")
    page.wait_for_url(f"**/rollouts/{given['first']}")
    expect(page.locator("main .feedback")).to_contain_text("well said", timeout=30_000)
    page.go_back()
    expect(attempts.get_by_role("row").first).to_be_visible(timeout=30_000)
    press(page, f"{given['run']}@1")
    page.wait_for_url(f"**/resources/selection-{given['run']}?version=1")
    expect(page.locator("main")).to_contain_text(given["first"], timeout=30_000)
    page.go_back()
    expect(attempts.get_by_role("row").first).to_be_visible(timeout=30_000)
    press(page, f"{given['trained']}-1")
    page.wait_for_url(f"**/runs/view?run={given['trained']}-1")
    expect(page.locator("main h1")).to_contain_text(f"{given['trained']}-1", timeout=30_000)
    expect(page.locator("main .chart").first).to_be_visible(timeout=30_000)
    expect(page.locator("main").get_by_role("alert")).to_have_count(0)


def up(page: Any) -> None:
    """Go from a version of the set to the cycle that published it."""
    before, after = given["versions"][0]
    for version, text in ((after, "Published by cycle 1 of"), (str(int(before) + 1), "with canary-0001, which was promoted")):
        opened(page, f"/resources/{given['set']}?version={version}", text)
        press(page, f"cycle 1 of {given['run']}")
        expect(page.get_by_role("table", name="Attempts of cycle 1").get_by_role("row")).to_have_count(50, timeout=30_000)
    main = opened(page, f"/resources/{given['set']}?version={before}", "Changes")
    expect(main).not_to_contain_text("Published by")


def shoot(page: Any, theme: str) -> None:
    """Take pictures in one colour scheme, and in a window as narrow as a phone: nothing is wider than that."""
    page.set_viewport_size({"width": 1440, "height": 1100})
    opened(page, f"/runs/view?run={given['run']}&cycle=2", "Learnt from")
    expect(page.get_by_role("table", name="Attempts of cycle 2").get_by_role("row").first).to_be_visible(timeout=30_000)
    page.screenshot(path=f"{given['shots']}/improve-{theme}.png")
    opened(page, f"/resources/{given['set']}?version={given['versions'][0][1]}", "Published by")
    page.screenshot(path=f"{given['shots']}/version-{theme}.png")
    page.set_viewport_size({"width": 390, "height": 844})
    opened(page, f"/runs/view?run={given['run']}&cycle=2", "Learnt from")
    expect(page.get_by_role("table", name="Attempts of cycle 2").get_by_role("row").first).to_be_visible(timeout=30_000)
    for place in ("html", "main", "main .card"):
        for width, room in page.locator(place).evaluate_all("found => found.map(each => [each.scrollWidth, each.clientWidth])"):
            assert width <= room, f"{place} is {width} pixels wide, in {room}"
    page.screenshot(path=f"{given['shots']}/improve-narrow.png")


def main() -> None:
    """Read the history in light mode, and look at it in dark mode. An error of the page fails the test."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=given["chromium"], args=FLAGS)
        context = browser.new_context(viewport={"width": 1440, "height": 1100}, locale="en-US", color_scheme="light")
        page = context.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        listed(page)
        told(page)
        down(page)
        up(page)
        for theme in ("light", "dark"):
            page.emulate_media(color_scheme=theme)
            shoot(page, theme)
        assert errors == [], errors
        browser.close()


if __name__ == "__main__":
    main()
