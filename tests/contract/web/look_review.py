"""Review attempts by keyboard alone. Run by test_review_page.py in Playwright's environment."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import expect, sync_playwright  # pyright: ignore[reportMissingImports]  # installed beside this environment

FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
REVIEWS = 20
given: dict[str, Any] = json.loads(sys.argv[1])
address = f"{given['url']}/review?run={given['run']}&rubric={given['rubric']}"
FOCUSED = "document.activeElement.getAttribute('aria-label') ?? document.activeElement.innerText.trim()"
ALL = "main :is(button:not(:disabled), a, input, select, textarea, summary, [tabindex='0'])"


def tab_to(page: Any, name: str) -> None:
    """Press Tab until an element of the page has the focus."""
    for _ in range(60):
        if page.evaluate(FOCUSED) == name:
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"Tab does not reach {name!r}")


def shown(page: Any) -> str:
    """Return the rollout that is shown."""
    return page.locator("aside .tail").get_attribute("title", timeout=30_000)


def ready(page: Any) -> None:
    """Wait until the attempt's conversation is shown, so that it can be answered."""
    expect(page.locator(".review-talk .said.reply")).to_have_count(1, timeout=30_000)
    expect(page.locator(".labels button").first).to_be_enabled(timeout=30_000)


def answer(page: Any, key: str) -> str:
    """Press a label's key, and return the rollout that it was for as soon as the page has gone on."""
    ready(page)
    rollout = shown(page)
    page.keyboard.press(key)
    expect(page.get_by_role("status")).to_contain_text("Stored", timeout=30_000)
    expect(page.locator("aside .tail")).not_to_have_attribute("title", rollout)
    return rollout


def write(page: Any, key: str, text: str) -> None:
    """Write into the field that a key leads to, and go back to the keys."""
    page.keyboard.press(key)
    page.keyboard.type(text)
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Conversation"


def begin(page: Any) -> None:
    """Open the page, and write a name."""
    page.goto(address)
    expect(page.locator("main")).to_contain_text("Write your name", timeout=30_000)
    tab_to(page, "Your name")
    page.keyboard.type("ann")
    page.keyboard.press("Escape")
    expect(page.locator("aside .count")).to_contain_text("1 of 1,000 · 0 reviewed", timeout=30_000)


def play(page: Any) -> dict[str, dict[str, str]]:
    """Answer twenty attempts, some with a comment or a correction, and return {rollout: what was pressed last}."""
    choose = random.Random(25)
    pressed: dict[str, dict[str, str]] = {}
    for place in range(REVIEWS):
        ready(page)
        said = {"label": choose.choice(given["labels"]), "text": "", "correction": ""}
        assert given["answers"][shown(page)] in page.locator(".review-talk").inner_text(), "the conversation is that of the attempt"
        if place % 5 == 1:
            said["text"] = f"comment {place}: 1 j k"
            write(page, "c", said["text"])
        if place % 5 == 2:
            said["correction"] = f"better {place}"
            write(page, "e", said["correction"])
        if place % 7 == 3:  # look at the next one, and come back
            here = shown(page)
            page.keyboard.press("j")
            expect(page.locator("aside .tail")).not_to_have_attribute("title", here)
            page.keyboard.press("k")
            expect(page.locator("aside .tail")).to_have_attribute("title", here)
        pressed[answer(page, str(given["labels"].index(said["label"]) + 1))] = said
        if place % 6 == 4:
            last = list(pressed)[-1]
            page.keyboard.press("u")
            expect(page.locator("aside .tail")).to_have_attribute("title", last)
            expect(page.locator(".labels .on")).to_contain_text(said["label"])
            said["label"] = given["labels"][(given["labels"].index(said["label"]) + 1) % len(given["labels"])]
            assert answer(page, str(given["labels"].index(said["label"]) + 1)) == last
    expect(page.locator("aside .count")).to_contain_text(f"{REVIEWS + 1} of 1,000 · {REVIEWS} reviewed")
    return pressed


def fail(page: Any) -> dict[str, dict[str, str]]:
    """Answer while nothing is stored, then while it is stored and the answer is lost; send both again."""
    pressed: dict[str, dict[str, str]] = {}
    fate = "stored"

    def meet(route: Any) -> None:
        if fate == "stored":
            return route.continue_()
        if fate == "lost":
            route.fetch()
        return route.abort()

    page.route("**/v1/agl/feedback", meet)
    for label, fate in (("good", "refused"), ("bad", "lost")):
        ready(page)
        rollout = shown(page)
        write(page, "c", "kept")
        page.keyboard.press(str(given["labels"].index(label) + 1))
        expect(page.get_by_role("alert")).to_contain_text("Not stored", timeout=30_000)
        assert shown(page) == rollout, "the page does not go on"
        fate = "stored"
        if label == "good":
            page.reload()
            ready(page)
            expect(page.get_by_role("alert")).to_contain_text("Not stored", timeout=30_000)
            assert shown(page) == rollout and page.locator(".labels .on").inner_text().endswith(label)
        assert answer(page, "r") == rollout
        expect(page.get_by_role("alert")).to_have_count(0)
        pressed[rollout] = {"label": label, "text": "kept", "correction": ""}
    page.unroute("**/v1/agl/feedback")
    return pressed


def reach(page: Any) -> None:
    """Tab through the page: everything that can be used gets the focus, and shows it."""
    ready(page)
    for summary in page.locator("aside summary").all():
        summary.press("Enter")
    expect(page.locator("aside")).to_contain_text("It takes two reviewers", timeout=30_000)
    page.evaluate("document.activeElement.blur()")
    count = page.locator(ALL).count()
    page.evaluate(f"document.querySelectorAll(`{ALL}`).forEach(each => each.dataset.unseen = 'yes')")
    for _ in range(count + 30):
        page.keyboard.press("Tab")
        page.evaluate("""() => {
          const focused = document.activeElement, style = getComputedStyle(focused);
          if (style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) > 0) delete focused.dataset.unseen;
        }""")
    left = page.locator("[data-unseen]").evaluate_all("found => found.map(each => each.outerHTML.slice(0, 120))")
    assert count > 12 and not left, left
    page.keyboard.press("Escape")


def help_and_tokens(page: Any) -> None:
    """Open and close the keys; show the tokens of the calls, and of the next attempt's, too."""
    ready(page)
    here = shown(page)
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("store “good”, and go on")
    page.keyboard.press("1")
    page.keyboard.press("j")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert shown(page) == here, "the keys mean nothing while they are shown"
    page.keyboard.press("t")
    expect(page.locator(".review-talk .ids .lp").first).to_be_visible(timeout=30_000)
    page.keyboard.press("j")
    expect(page.locator("aside .tail")).not_to_have_attribute("title", here)
    expect(page.locator(".review-talk .ids .lp").first).to_be_visible(timeout=30_000)


def agree(page: Any) -> None:
    """Look at the agreement with another reviewer, whose answers the test has stored."""
    page.goto(f"{given['url']}/review?rubric={given['agreed']}")
    expect(page.locator("aside .count")).to_contain_text("reviewed", timeout=30_000)
    page.locator("aside summary").first.press("Enter")
    expect(page.locator("aside .pair").first).to_contain_text("Cohen’s kappa 0.5, n = 4", timeout=30_000)
    expect(page.locator("aside .pair").last).to_contain_text("cannot tell: no attempt has been reviewed by both")


def choose_selection(page: Any) -> None:
    """Name a selection by keyboard: its attempts are shown, in its order, and why; and an unknown one is an error that names it."""
    page.goto(f"{given['url']}/review?rubric={given['agreed']}")
    tab_to(page, "Selection")
    page.keyboard.type("nobody")
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_contain_text("there is no selection", timeout=30_000)
    page.get_by_label("Selection").fill(given["selection"])
    page.get_by_label("Selection").press("Enter")
    expect(page.get_by_label("Rule")).to_have_value("selected")
    for place, (rollout, why) in enumerate(given["selected"], 1):
        expect(page.locator("aside .tail")).to_have_attribute("title", rollout, timeout=30_000)
        expect(page.locator("aside .count")).to_contain_text(f"{place} of {len(given['selected'])}")
        expect(page.locator("aside")).to_contain_text(why)
        assert given["answers"][rollout] in page.locator(".review-talk .said.reply").inner_text(timeout=30_000)
        page.locator(".review-talk").focus()
        page.keyboard.press("j")
    expect(page.locator(".review-talk")).to_contain_text("That was the last one", timeout=30_000)


def change_rubric(page: Any) -> None:
    """Store the next version of a rubric, by keyboard: everything is to be reviewed anew."""
    page.goto(address)
    ready(page)
    page.get_by_text("Change the rubric").press("Enter")
    page.get_by_label("Question and labels").focus()
    page.keyboard.press("Control+End")
    page.keyboard.type("\nwrong = x")
    page.get_by_role("button", name="Store the rubric").press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("'wrong = x', is no label", timeout=30_000)
    page.get_by_label("Question and labels").focus()
    page.keyboard.press("Control+End")
    page.keyboard.press("Backspace")
    page.keyboard.type("-1")
    page.get_by_role("button", name="Store the rubric").press("Enter")
    expect(page.locator("aside h2").first).to_have_text(f"{given['rubric']}@2", timeout=30_000)
    expect(page.locator("aside .count")).to_contain_text("1 of 1,000 · 0 reviewed", timeout=30_000)
    expect(page.locator(".labels")).to_contain_text("wrong")
    page.get_by_text("or write another").press("Enter")
    page.get_by_label("Name", exact=True).fill(f"{given['rubric']}-other")
    page.get_by_role("button", name="Store the rubric").press("Enter")
    expect(page.locator("aside h2").first).to_have_text(f"{given['rubric']}-other@1", timeout=30_000)


def narrow(page: Any, name: str) -> None:
    """Look at the page in a window as narrow as a phone: nothing is wider, and the labels are in sight."""
    page.set_viewport_size({"width": 390, "height": 844})
    ready(page)
    for place in ("html", "main", ".review", ".judge", "aside"):
        for width, room in page.locator(place).evaluate_all("found => found.map(each => [each.scrollWidth, each.clientWidth])"):
            assert width <= room, f"{place} is {width} pixels wide, in {room}"
    covered = page.locator(".labels button").evaluate_all("""found => found.filter(each => {
      const box = each.getBoundingClientRect();
      return document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2)?.closest('button') !== each;
    }).map(each => each.innerText)""")
    assert not covered, f"labels out of sight: {covered}"
    page.screenshot(path=f"{given['shots']}/{name}.png")


def main() -> None:
    """Review in light mode, look in dark mode and as narrow as a phone. An error of the page fails the test."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=given["chromium"], args=FLAGS)
        context = browser.new_context(viewport={"width": 1440, "height": 860}, locale="en-US", color_scheme="light")
        page = context.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        begin(page)
        pressed = play(page)
        pressed |= fail(page)
        reach(page)
        help_and_tokens(page)
        (Path(given["shots"]) / "pressed.json").write_text(json.dumps(pressed))
        for theme in ("light", "dark"):
            page.set_viewport_size({"width": 1440, "height": 860})
            page.emulate_media(color_scheme=theme)
            page.goto(address)
            ready(page)
            page.screenshot(path=f"{given['shots']}/review-{theme}.png")
            narrow(page, f"review-{theme}-narrow")
        page.set_viewport_size({"width": 1440, "height": 860})
        agree(page)
        page.screenshot(path=f"{given['shots']}/review-agreement.png")
        choose_selection(page)
        change_rubric(page)
        page.keyboard.press("Escape")
        page.keyboard.press("?")
        page.screenshot(path=f"{given['shots']}/review-help.png")
        assert errors == [], errors
        browser.close()


if __name__ == "__main__":
    main()
