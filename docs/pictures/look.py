"""Take the screenshots of `make pictures`. Run by make.py in Playwright's environment."""

from __future__ import annotations

import json
import sys

from playwright.sync_api import expect, sync_playwright

given: dict[str, str] = json.loads(sys.argv[1])

with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=given["chromium"], args=["--no-sandbox", "--disable-gpu"])
    for theme in ("light", "dark"):
        context = browser.new_context(viewport={"width": 1100, "height": 650}, color_scheme=theme, device_scale_factor=1.5)
        page = context.new_page()
        answer = page.request.get(f"{given['url']}/v1/agl/rollouts?limit=1&sort_by=start_time&sort_order=desc").json()
        page.goto(f"{given['url']}/rollouts/{answer['items'][0]['rollout_id']}?view=conversation")
        page.get_by_role("button", name="Token ids and log-probs").first.click(timeout=30_000)
        expect(page.locator(".ids .lp").first).to_be_visible(timeout=30_000)
        page.screenshot(path=f"{given['folder']}/conversation-{theme}.png")
        context.close()
    browser.close()
