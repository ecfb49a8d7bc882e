"""Measure paints and interactions. Run by bench.dashboard in Playwright's environment; prints JSON lines {"metric", "kind", "ms"}."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]  # installed beside this environment

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync",
]  # fmt: skip
given: dict[str, Any] = json.loads(sys.argv[1])
# Measured by the page's clock, from the click to the second frame after the condition holds.
WAIT = """([act, done]) => new Promise((resolve, reject) => {
  const act_ = (0, eval)(act), done_ = (0, eval)(done), start = performance.now();
  act_();
  const look = () => { if (done_()) requestAnimationFrame(() => resolve(performance.now() - start));
    else if (performance.now() - start > 60000) reject(new Error('waited for ' + done)); else requestAnimationFrame(look); };
  requestAnimationFrame(look);
})"""
PAINTS = {
    "first paint of /rollouts": ("/rollouts", "main .table"),
    "first paint of /runs": ("/runs", "main .table"),
    "first paint of one run": (f"/runs/view?run={given['run']}", "main .card"),
    "first paint of /traces": ("/traces", "main .filters"),
}
SOME = "document.querySelector('.tr')"
FIND = "[...document.querySelectorAll('button')].find(b => b.textContent === '{}').click()"
HEAD = "[...document.querySelectorAll('.thead button')].find(b => b.textContent.startsWith('{}')).click()"
CLICK = "document.querySelectorAll('.tr')[{}].click()"
MIDDLE = "+document.querySelector('.tr').getAttribute('aria-rowindex') > 1000"
TYPE = """{ const i = document.querySelector('input[type=search]');
  Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, 'value').set.call(i, 'a92');
  i.dispatchEvent(new Event('input', {bubbles: true})); }"""


def every(condition: str) -> str:
    """Return a JavaScript expression: whether `condition` holds for every rendered row `r`."""
    return f"[...document.querySelectorAll('.tr')].every(r => {condition})"


def painted(browser: Any) -> dict[str, float]:
    """Return the first contentful paint of each page, in milliseconds."""
    found: dict[str, float] = {}
    for name, (path, there) in PAINTS.items():
        page = browser.new_context(viewport={"width": 1440, "height": 860}).new_page()
        page.goto(given["url"] + path)
        page.wait_for_selector(there)
        found[name] = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        page.context.close()
    return found


def interactions(page: Any) -> dict[str, float]:
    """Use /rollouts, one rollout and /runs; return the milliseconds of each interaction."""
    found: dict[str, float] = {}
    rows = "document.querySelectorAll('.tr').length > 5 && !document.querySelector('.ghost')"

    def wait(name: str, act: str, done: str) -> None:
        found[name] = page.evaluate(WAIT, [f"() => {act}", f"() => {done}"])

    def fresh(path: str) -> None:
        page.goto(given["url"] + path)
        page.wait_for_function(f"() => {rows if path == '/rollouts' else SOME}")

    fresh("/rollouts")
    wait("filter by status", FIND.format("failed"), f"{rows} && {every('!r.innerText.includes(`succeeded`)')}")
    wait("filter by mode, too", FIND.format("val"), f"{rows} && {every('r.children[3].textContent === `val`')}")
    fresh("/rollouts")
    wait("scroll to the middle", "{ const f = document.querySelector('.frame'); f.scrollTop = f.scrollHeight / 2; }", f"{rows} && {MIDDLE}")
    wait("sort by status", HEAD.format("Status"), f"{rows} && document.querySelector('[aria-sort]')")
    fresh("/rollouts")
    wait("search by a part of an id", TYPE, f"{rows} && {every('r.children[1].textContent.includes(`a92`)')}")
    wait("open a rollout", CLICK.format(2), "document.querySelectorAll('.lane').length > 5")
    wait("open a span", CLICK.format(4), "document.querySelectorAll('.panel dl').length > 1")
    wait("show the conversation", FIND.format("Conversation"), "document.querySelectorAll('.call').length")
    fresh("/runs")
    wait(
        "open a run, with its curve",
        f"document.querySelector(`a[href*='run={given['run']}']`).click()",
        "document.querySelector('.chart path')",
    )
    return found


def collect(rounds: int, turn: Callable[[], dict[str, float]]) -> dict[str, list[float]]:
    """Collect the figures of all rounds but the first, which warms the service."""
    found: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for name, ms in turn().items():
            if number:
                found.setdefault(name, []).append(ms)
    return found


def main() -> None:
    """Measure paints, then interactions."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=given["chromium"], headless=True, args=FLAGS)
        for name, ms in collect(given["rounds"], lambda: painted(browser)).items():
            print(json.dumps({"metric": name, "kind": "paint", "ms": ms}), flush=True)

        def turn() -> dict[str, float]:
            context = browser.new_context(viewport={"width": 1440, "height": 860}, bypass_csp=True)  # lets the page run WAIT
            try:
                return interactions(context.new_page())
            finally:
                context.close()

        for name, ms in collect(given["rounds"], turn).items():
            print(json.dumps({"metric": name, "kind": "interaction", "ms": ms}), flush=True)
        browser.close()


if __name__ == "__main__":
    main()
