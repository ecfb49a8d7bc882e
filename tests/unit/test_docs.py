from __future__ import annotations

import os
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(EXAMPLES.rglob("README.md"))]


@pytest.mark.parametrize("page", ["cli.md", "settings.md"])
def test_a_page_written_from_the_code_is_up_to_date(page: str) -> None:
    generate = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    assert (ROOT / "docs" / page).read_text() == generate["PAGES"][page](), "run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_make_verbs_and_commands_named_in_docs_exist(page: Path) -> None:
    from agl_otel.cli import COMMANDS

    makefiles = (ROOT / "Makefile", ROOT / "collector" / "otelcol" / "otelcol.mk", ROOT / "deploy" / "deploy.mk")
    verbs = {verb for path in makefiles for verb in re.findall(r"^([a-z-]+):", path.read_text(), flags=re.MULTILINE)}
    text = page.read_text()
    assert set(re.findall(r"(?:`|\$ )make ([a-z-]+)", text)) <= verbs
    assert set(re.findall(r"(?:`|\$ )agl-otel ([a-z]+)", text)) <= set(COMMANDS)


def test_every_example_is_in_the_table_of_examples() -> None:
    listed = set(re.findall(r"^\| \[(\w+)\]", (EXAMPLES / "README.md").read_text(), flags=re.MULTILINE))
    assert listed == {path.name for path in EXAMPLES.iterdir() if path.is_dir() and not path.name.startswith(("_", "."))}


def test_every_dependency_has_its_line() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    page = (ROOT / "docs" / "dependencies.md").read_text()
    groups = [
        project["project"]["dependencies"],
        *project["project"]["optional-dependencies"].values(),
        project["dependency-groups"]["dev"],
    ]
    for requirement in (entry for group in groups for entry in group):
        name = re.split(r"[<>=~\[]", requirement)[0]
        short = name.removeprefix("opentelemetry-instrumentation").removeprefix("opentelemetry")
        assert name in page or (short and short in page), f"{name} has no line in docs/dependencies.md"


def test_the_package_speaks_only_of_itself() -> None:
    """No absolute path of somebody's machine in what is shipped."""
    home = re.compile(r"/(?:home|root|Users|work)/[a-z]")
    for folder in ("agl_otel", "adapters", "algorithms", "collector", "docs", "examples", "deploy"):
        for path, folders, files in os.walk(ROOT / folder):
            folders[:] = [name for name in folders if name != "node_modules"]  # others' packages, there once the dashboard was built
            for name in files:
                if name.endswith((".py", ".md", ".sql", ".toml", ".yaml", ".go", ".proto")):
                    text = (Path(path) / name).read_text()
                    assert not home.search(text), f"{path}/{name}: {home.search(text)}"
