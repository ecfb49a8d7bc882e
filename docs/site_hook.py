"""Called by mkdocs. Pages link to files of the repository, which the site does not have: there the link becomes the file's name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)]+)\)")


def on_config(config: Any) -> Any:
    """Pages that mkdocs.yml does not name come last, so that none is left out."""
    named = str(config["nav"])
    others = sorted(path.name for path in Path(config["docs_dir"]).glob("*.md") if f"'{path.name}'" not in named)
    if others:
        config["nav"].append({"More": others})
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page without links that leave docs/."""
    return _OUTSIDE.sub(lambda link: link[1] if link[1] == link[2] else f"{link[1]} (`{link[2]}`)", markdown)
