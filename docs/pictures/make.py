"""Make the pictures of README and docs from a real demo: `make pictures`, or `python -m docs.pictures.make FOLDER`. Each is light and dark.

The demo runs in a temporary folder and stays up. Its terminal's output becomes demo-*.svg, the rewards that it stored reward-*.svg, and
headless Chromium (look.py, in an environment of its own) takes conversation-*.png from its dashboard.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import matplotlib as mpl
from PIL import Image
from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI, TerminalTheme
from rich.text import Text

from agl_otel.cli.plot import plot_rewards
from tests.contract.web.browser import PLAYWRIGHT
from tests.environments import installed

HERE: Final = Path(__file__).parent
COLUMNS: Final = 112  # the line of a rollout, with its ids and verdict
SHOWN: Final = r"(?ms)^[^\n]*5\.\S* The unmodified.*(?=^ +reward plot)"
"""What the terminal's picture has of the output: the agent after training, and the figures."""
COLOURS: Final = 128  # of a screenshot: text on few backgrounds
GREYS: Final = {"light": "#57606a", "dark": "#9198a1"}  # readable on both of GitHub's and the site's backgrounds
LIGHT: Final = TerminalTheme(
    (255, 255, 255),
    (36, 41, 47),
    [(36, 41, 47), (207, 34, 46), (17, 99, 41), (149, 88, 0), (5, 80, 174), (130, 80, 223), (27, 124, 131), (110, 119, 129)],
)
THEMES: Final = {"light": LIGHT, "dark": DIMMED_MONOKAI}


def played(folder: Path) -> tuple[str, str, subprocess.Popen[str]]:
    """Run the demo until it stays: its output with colours, its dashboard's address, and its process."""
    env = {**os.environ, "COLUMNS": str(COLUMNS), "TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "0", "TERM": "xterm-256color"}
    command = [str(Path(sys.executable).with_name("agl-otel")), "demo", "--stay"]
    demo = subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True)
    assert demo.stdout is not None
    output = ""
    for line in demo.stdout:
        sys.stdout.write(line)
        output += line
        if address := re.search(r"dashboard +(http://\S+)/runs", line):
            return output, address[1], demo
    raise SystemExit(f"the demo ended with exit code {demo.wait()}: no pictures")


def terminal(output: str, theme: str, into: Path) -> None:
    """Draw the terminal, without the font that rich's template loads from elsewhere."""
    shown = re.search(SHOWN, re.sub(r"\x1b\[\?25[lh]|\r", "", output))
    assert shown is not None, "the demo's output has the part that is drawn"
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text.from_ansi("$ make demo\n…\n" + shown[0].rstrip()), soft_wrap=True)
    svg = console.export_svg(title="make demo", theme=THEMES[theme], unique_id="demo")
    svg = svg.replace("rgba(255,255,255,0.35)", GREYS[theme])  # the frame
    (into / f"demo-{theme}.svg").write_text(re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL))


def curve(rewards: list[float], theme: str, into: Path) -> None:
    """Draw the reward of each step."""
    grey = GREYS[theme]
    colours = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "axes.titlecolor"), grey)
    with mpl.rc_context({**colours, "savefig.transparent": True, "svg.fonttype": "none", "svg.hashsalt": "agl-otel"}):
        plot_rewards(rewards, into / f"reward-{theme}.svg", title="make demo: mean reward by step")


def conversation(address: str, into: Path) -> None:
    """Take the screenshots of a rollout's conversation with its tokens."""
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("chromium is missing: apt-get install chromium")
    python = installed("playwright", PLAYWRIGHT) / "bin" / "python"
    given = {"url": address, "chromium": chromium, "folder": str(into)}
    subprocess.run([str(python), str(HERE / "look.py"), json.dumps(given)], check=True, timeout=300)
    for theme in THEMES:
        path = into / f"conversation-{theme}.png"
        Image.open(path).convert("RGB").quantize(COLOURS).save(path, optimize=True)


def main(into: Path = HERE) -> None:
    """Play the demo, and make all pictures from it."""
    with tempfile.TemporaryDirectory(prefix="agl-pictures-") as made:
        output, address, demo = played(Path(made))
        try:
            (metrics,) = Path(made).glob(".agl/*/run/metrics.jsonl")
            rewards = [json.loads(line)["reward_mean"] for line in metrics.read_text().splitlines()]
            for theme in THEMES:
                terminal(output, theme, into)
                curve(rewards, theme, into)
            conversation(address, into)
        finally:
            demo.terminate()
            demo.wait()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
