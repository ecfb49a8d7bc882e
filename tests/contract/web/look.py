"""Check every page in dark and light mode. Run by test_dashboard.py in Playwright's environment."""

from __future__ import annotations

import json
import sys
from typing import Any

from playwright.sync_api import expect, sync_playwright  # pyright: ignore[reportMissingImports]  # installed beside this environment

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync",
]  # fmt: skip
given: dict[str, str] = json.loads(sys.argv[1])
rollout = f"/rollouts/{given['rollout']}"
COLOUR = "element => { const style = getComputedStyle(element); return style.backgroundColor + style.color }"
PAGES = {
    "runs": ("/runs", "0.75"),
    "run": (f"/runs/view?run={given['run']}", "0.75"),
    "rollouts": (f"/rollouts?run={given['run']}", "0.75"),
    "waterfall": (rollout, "invoke_agent"),
    "tree": (f"{rollout}?view=tree", "invoke_agent"),
    "conversation": (f"{rollout}?view=conversation", "assistant"),
    "json": (f"{rollout}?view=json", '"step": 1'),
    "traces": (f"/traces?rollout={given['rollout']}", "invoke_agent"),
    "review": ("/review", "rubric"),
    "resources": ("/resources", given["resources"]),
    "versions": (f"/resources/{given['resources']}", "before"),
    "runners": ("/runners", "w-page"),
    "sql": ("/sql", "read-only"),
    "settings": ("/settings", "AGL_TOKEN"),
}


def harmless(page: Any) -> None:
    """Assert that no agent output became markup, a link or a control character."""
    assert page.evaluate("window.hacked") is None
    found = page.evaluate("""() => ({
      links: [...document.querySelectorAll('a,[src],[href]')].map(e => e.getAttribute('href') || e.getAttribute('src')),
      inline: document.querySelectorAll('script:not([src])').length, text: document.body.innerText})""")
    assert found["inline"] == 0
    assert not [link for link in found["links"] if link and not link.startswith(("/", "#", given["url"]))], found["links"]
    assert "\x1b" not in found["text"] and "\u202e" not in found["text"]


def told_of(message: Any) -> str:
    """Return a message of the browser's console, and of which address it is."""
    return f"{message.text} {message.location['url']}"


def visit(page: Any, theme: str) -> None:
    """Open every page in one colour scheme."""
    for name, (path, text) in PAGES.items():
        page.goto(given["url"] + path)
        expect(page.locator("main")).to_contain_text(text, timeout=30_000)
        assert page.evaluate("document.documentElement.dataset.theme") == theme
        harmless(page)
        page.screenshot(path=f"{given['shots']}/{name}-{theme}.png")


def narrow(page: Any, main: Any) -> None:
    """Filter the list of rollouts to one."""
    page.get_by_label("Output has").fill("<script>window")
    expect(main.get_by_role("row")).to_have_count(2, timeout=30_000)
    page.get_by_label("Output has").fill("nobody said so")
    expect(main).to_contain_text("No rollouts match", timeout=30_000)
    page.get_by_label("Output has").fill("")
    page.get_by_role("button", name="2+ attempts").click()
    expect(main).to_contain_text("No rollouts match")
    page.get_by_role("button", name="2+ attempts").click()
    page.get_by_label("Input has").fill("nobody asked so")
    expect(main).to_contain_text("No rollouts match")
    page.get_by_label("Input has").fill("")
    expect(main.get_by_role("row")).to_have_count(2, timeout=30_000)


def fit(page: Any) -> None:
    """Look at every page in a window as narrow as a phone: nothing is wider than the window."""
    for name, (path, text) in PAGES.items():
        page.goto(given["url"] + path)
        expect(page.locator("main")).to_contain_text(text, timeout=30_000)
        for place in ("html", "main", ".frame"):
            for width, room in page.locator(place).evaluate_all("found => found.map(each => [each.scrollWidth, each.clientWidth])"):
                assert width <= room, f"{place} of {name} is {width} pixels wide, in {room}"
        page.screenshot(path=f"{given['shots']}/{name}-narrow.png")


def deeply(page: Any, main: Any) -> None:
    """Look at a rollout with deep spans and long answers."""
    page.goto(f"{given['url']}/rollouts/{given['deep']}")
    rows = main.get_by_role("row")
    expect(rows.filter(has_text="look_up level 0")).to_have_count(1, timeout=30_000)
    begun = rows.filter(has_text="look_up level 0").locator(".lane i")
    assert begun.evaluate("element => element.style.left") == "0%", "the waterfall begins where something happened"
    expect(rows.filter(has_text="agentlightning.seal")).to_have_count(0)
    expect(main.get_by_role("columnheader").filter(has_text="model")).to_have_count(1)  # the legend
    page.get_by_role("button", name="seals").click()
    page.locator(".frame").focus()
    page.keyboard.press("End")
    expect(rows.filter(has_text="agentlightning.seal")).to_have_count(1)
    deepest = rows.filter(has_text="look_up level 23").locator(".spanname > span").first
    width, room = deepest.evaluate("element => [element.scrollWidth, element.clientWidth]")
    assert width <= room, "the deepest name is readable"
    deepest.click()
    expect(page.get_by_label("Span", exact=True)).to_contain_text("look_up level 23")
    width, room = deepest.evaluate("element => [element.scrollWidth, element.clientWidth]")
    assert width <= room, "also beside a span's panel"
    page.goto(f"{given['url']}/rollouts/{given['deep']}?view=conversation")
    expect(main.locator(".call")).to_have_count(12, timeout=30_000)
    for held, room in main.locator(".call, .call .text").evaluate_all("found => found.map(each => [each.scrollHeight, each.clientHeight])"):
        assert held <= room, "an answer is not clipped"
    page.goto(f"{given['url']}/runs/view?run={given['run']}")
    expect(main.locator(".chart").first).to_contain_text("1,500", timeout=30_000)
    page.goto(f"{given['url']}/rollouts?run={given['run']}")
    expect(main.get_by_role("row").filter(has_text="how deep?")).to_have_count(1, timeout=30_000)
    for width, room in main.locator(".tr > div:has(> .badge)").evaluate_all(
        "found => found.map(each => [each.scrollWidth, each.clientWidth])"
    ):
        assert width <= room, "a status is not cut"
    assert "question" not in main.get_by_role("row").filter(has_text="how deep?").inner_text()


def lacking(page: Any, main: Any) -> None:
    """Look at an incomplete rollout, one of whose spans has bytes that are not text."""
    of_it = f"/rollouts/{given['incomplete']}"
    page.goto(given["url"] + of_it)
    expect(main).to_contain_text(f"Verdict incomplete: {given['reasons']}", timeout=30_000)
    expect(main).to_contain_text(given["notes"])
    for path in (
        f"/rollouts/{given['incomplete']}",
        f"/rollouts/{given['incomplete']}?view=tree",
        f"/traces?rollout={given['incomplete']}",
    ):
        page.goto(given["url"] + path)
        main.get_by_role("row").filter(has_text="work").click(timeout=30_000)
        panel = page.get_by_label("Span", exact=True)
        expect(panel.get_by_text("//4=")).to_have_count(6)  # two of the span, its event and its resource each
        harmless(page)


def told(page: Any, main: Any) -> None:
    """Look at what a rollout's page says of its conversation, its evaluations and its bridges."""
    page.goto(given["url"] + rollout)
    expect(main).to_contain_text("conversation thread-1", timeout=30_000)
    expect(main).to_contain_text("evaluations without a score, whose labels are no number: 1 ×")
    said = main.locator(".feedback")
    expect(said).to_contain_text('by ann (tone@2): "too short <b>"; should have been "Try again."')
    said.get_by_role("button").click()
    expect(page.get_by_label("Span", exact=True)).to_contain_text("chat x")
    harmless(page)
    page.goto(f"{given['url']}{rollout}?view=tree")
    expect(main.get_by_role("row").filter(has_text="chat x")).to_contain_text("not bridged: cut", timeout=30_000)


def use(page: Any) -> None:
    """Use the pages' controls."""
    main = page.locator("main")
    told(page, main)
    lacking(page, main)
    deeply(page, main)
    page.goto(given["url"] + "/")
    page.wait_for_url("**/rollouts")
    page.get_by_label("Search by id").fill(given["rollout"])
    expect(main.get_by_role("row")).to_have_count(2, timeout=30_000)  # the header and one rollout
    expect(main.get_by_role("row").last).to_contain_text("**<script>", timeout=30_000)  # its output
    narrow(page, main)
    page.get_by_role("button", name="Attempts", exact=True).click()
    expect(main).to_contain_text("#1")
    page.get_by_role("button", name="val", exact=True).click()
    expect(main).to_contain_text("No rollouts match")
    assert "mode=val" in page.url
    page.goto(given["url"] + f"/rollouts?run={given['run']}")
    expect(page.locator(".count")).to_have_text("3", timeout=30_000)
    new = {"rollouts": [{"input": "later", "metadata": {"run": given["run"], "step": 3}}]}
    assert page.request.post(given["url"] + "/v1/agl/queues/rollouts/enqueue", data=new).ok
    expect(page.locator(".count")).to_have_text("4", timeout=60_000)  # without a click: the page polls
    expect(main).to_contain_text("later")
    page.goto(given["url"] + rollout)
    expect(main.get_by_role("row").filter(has_text="agentlightning.llm")).to_have_count(0)
    main.get_by_role("row").filter(has_text="chat x").filter(has_text="+ proxy").click()
    panel = page.get_by_label("Span", exact=True)
    panel.get_by_role("button", name="Token ids and log-probs").click()
    expect(panel).to_contain_text("agentlightning.llm")
    expect(panel.locator(".ids .lp").first).to_have_text("4711")
    expect(panel.locator(".ids .lp").last).to_have_attribute("title", "#1  log-prob -3.0000  p 0.0498")
    likely, unlikely = (panel.locator(".ids .lp").nth(place).evaluate(COLOUR) for place in (0, 1))
    assert likely != unlikely, "a token is coloured by its log-prob"
    harmless(page)
    main.get_by_role("row").filter(has_text="window.hacked").last.click()
    expect(panel).to_contain_text("␛[31mred\\u202egnp")
    harmless(page)
    page.get_by_role("tab", name="Conversation").click()
    expect(main.locator(".said.reply")).to_contain_text("<script>window.hacked=1</script>")
    page.goto(given["url"] + f"/resources/{given['resources']}")
    expect(main.locator(".diff .del")).to_contain_text("before")
    expect(main.locator(".diff .add")).to_contain_text("after <script>")
    assert "sk-secret" not in page.content()
    page.goto(given["url"] + "/sql")
    page.get_by_label("Query").fill("SELECT 41 + 1 AS answer")
    page.keyboard.press("Control+Enter")
    expect(main.get_by_role("row").last).to_contain_text("42")
    page.get_by_label("Query").fill("DROP TABLE otel_traces")
    page.get_by_role("button", name="Run", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("only reading is allowed")
    page.goto(given["url"] + "/settings")
    page.get_by_label("written").fill("250000")
    page.goto(given["url"] + f"/runs/view?run={given['run']}")
    expect(main.locator(".stats")).to_contain_text("Cost0.5", timeout=30_000)  # two tokens
    page.goto(given["url"] + "/runs")
    table = page.locator(".frame")
    table.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_url("**/runs/view**")


def main() -> None:
    """Visit in dark and light mode, then use the controls. An error in the browser's console fails the test."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=given["chromium"], headless=True, args=FLAGS)
        for theme in ("dark", "light"):
            context = browser.new_context(viewport={"width": 1440, "height": 860}, color_scheme=theme)
            page = context.new_page()
            said: list[str] = []
            page.on("pageerror", lambda error, said=said: said.append(str(error)))
            page.on("console", lambda message, said=said: said.append(told_of(message)) if message.type == "error" else None)
            visit(page, theme)
            assert not said, said
            if theme == "light":
                use(page)
                page.set_viewport_size({"width": 390, "height": 844})
                fit(page)
                assert not [each for each in said if not each.endswith("/v1/agl/sql")], said  # a query that is refused is one
            context.close()
        browser.close()


if __name__ == "__main__":
    main()
