from __future__ import annotations

import ast
import os
import re
import runpy
import shlex
import textwrap
from pathlib import Path

import click
import pytest

from agl_otel.adapters.gates import REFUSALS
from agl_otel.cli import cli
from agl_otel.jobs.job import OPTIONS_OF, options_model, page_of

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted(EXAMPLES.rglob("README.md")),
    *sorted((ROOT / "skills").rglob("*.md")),
]


MOST_OF_A_PICTURE = 300_000  # bytes
WRITTEN = sorted(path.name for path in (ROOT / "docs").glob("*.md") if "`make docs`; do not edit" in path.read_text())


@pytest.mark.parametrize("page", ["architecture.md", "recipes.md", "llms.txt", *WRITTEN])
def test_a_page_written_from_the_code_is_up_to_date(page: str) -> None:
    generate = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    assert (ROOT / "docs" / page).read_text() == generate["PAGES"][page](), "run `make docs`"
    assert {"architecture.md", "recipes.md", "llms.txt", *WRITTEN} == {*generate["PAGES"]}


@pytest.mark.parametrize("page", ["job-options.md", "grpo-options.md", "sft-options.md"])
def test_every_option_has_a_meaning_and_numbers_have_bounds(page: str) -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \| (.*?) ?\| (.*?) ?\|$", (ROOT / "docs" / page).read_text(), flags=re.MULTILINE)
    assert len(rows) > 20 and [name for name, _, _, meaning in rows if not meaning] == []
    assert [name for name, default, rule, _ in rows if re.fullmatch(r"[\d.]+", default) and not rule] == []


@pytest.mark.parametrize("algorithm", OPTIONS_OF)
def test_the_page_that_errors_name_has_every_key_of_the_algorithm(algorithm: str) -> None:
    page = (ROOT / page_of(algorithm)).read_text()
    assert [
        name for name in options_model(algorithm).model_fields if not re.search(rf"`(\[algorithm\.)?{name}\]?`", page) and name != "name"
    ] == []


def test_each_reason_against_weights_has_a_row() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "improving.md").read_text(), re.MULTILINE)
    assert [name for name in rows if name in REFUSALS] == [*REFUSALS], "in the order of REFUSALS"


def test_the_loop_in_the_readme_is_the_step_of_grpo() -> None:
    source = (ROOT / "algorithms" / "grpo" / "algorithm.py").read_text()
    (step,) = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.AsyncFunctionDef) and node.name == "step"]
    after_docstring = source.splitlines(keepends=True)[step.body[1].lineno - 1 : step.end_lineno]
    assert f"```python\n{textwrap.dedent(''.join(after_docstring))}```" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pictures_are_there_light_and_dark_and_small(page: Path) -> None:
    text = page.read_text()
    shown = [*re.findall(r'<img[^>]*?\bsrc="([^"]+)"', text), *re.findall(r'srcset="([^"]+)"', text)]
    for picture in shown:
        other = picture.replace("-light.", "-dark.") if "-light." in picture else picture.replace("-dark.", "-light.")
        assert other in shown and (page.parent / picture).stat().st_size <= MOST_OF_A_PICTURE, f"{page.name}: {picture}"
    assert len(re.findall(r"<img", text)) == len(re.findall(r'<img[^>]*?\balt="[^"]+"', text))


def test_every_picture_that_make_pictures_makes_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    assert {path.name for path in (ROOT / "docs" / "pictures").iterdir() if path.suffix in (".svg", ".png")} == {
        *re.findall(r"docs/pictures/([\w.-]+)", readme)
    }
    for path in (ROOT / "docs" / "pictures").glob("*.svg"):
        assert "url(http" not in path.read_text(), "a picture loads nothing from elsewhere"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_make_verbs_and_commands_named_in_docs_exist(page: Path) -> None:
    from agl_otel.cli import COMMANDS

    makefiles = (ROOT / "Makefile", ROOT / "collector" / "otelcol" / "otelcol.mk", ROOT / "deploy" / "deploy.mk")
    verbs = {verb for path in makefiles for verb in re.findall(r"^([a-z-]+):", path.read_text(), flags=re.MULTILINE)}
    text = page.read_text()
    assert set(re.findall(r"(?:`|\$ )make ([a-z-]+)", text)) <= verbs
    assert set(re.findall(r"(?:`|\$ )agl-otel ([a-z]+)", text)) <= set(COMMANDS)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_in_docs_have_the_options_that_they_are_shown_with(page: Path) -> None:
    """What they do is tested elsewhere; here, that a reader who types them is told of no unknown command or option."""
    if page.name == "cli.md":
        return
    for typed in commands_in(page.read_text()):
        try:
            words = shlex.split(typed, comments=True)
            command, name = cli, "agl-otel"
            parent = None
            while isinstance(command, click.Group) and len(words) > 1 and not words[1].startswith("-"):
                parent = click.Context(command, info_name=name, parent=parent)
                name = words.pop(1)
                command = command.get_command(parent, name)
                assert command is not None, f"{typed}: there is no command {name!r}"
            if not {"--help", "-h"} & {*words}:
                command.make_parser(click.Context(command, parent=parent, info_name=name)).parse_args(words[1:])
        except (click.ClickException, ValueError) as error:
            raise AssertionError(f"{page.name}: {typed}: {error}") from error


def with_run(page: str, run: str) -> str:
    """A page of the docs, whose walk is of the run `support`, with another one: those of several pages may be played on one store."""
    return page.replace("--run support", f"--run {run}")


def commands_in(text: str) -> list[str]:
    """The `agl-otel …` lines of blocks, as a shell reads them: what a backslash or a quote goes on with is one of them."""
    found: list[str] = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        if language not in ("console", "bash", "sh", ""):
            continue
        lines = iter(block.splitlines())
        for line in lines:
            if line.removeprefix("$ ").startswith("agl-otel "):
                whole = line.removeprefix("$ ")
                while whole.endswith("\\") or whole.count('"') % 2:
                    whole = whole.removesuffix("\\") + "\n" + next(lines)
                found.append(whole)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_in_docs_is_python_and_names_what_there_is(page: Path) -> None:
    """It is compiled, and its imports are done; the examples and tutorials that it is cut from are run by tests of their own."""
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL):
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST
        tree = compile(block, page.name, "exec", flags=flags, dont_inherit=True)
        imports: list[ast.stmt] = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        names: dict[str, object] = {}
        exec(compile(ast.Module(imports, []), page.name, "exec"), names)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "agl" and "agl" in names:
                assert hasattr(names["agl"], node.attr), f"{page.name}: agl has no {node.attr}"


def test_the_index_names_every_page() -> None:
    named = set(re.findall(r"\(([\w-]+\.md)\)", (ROOT / "docs" / "index.md").read_text()))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - named == {"index.md"}


def test_what_the_navigation_of_the_site_names_is_there() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    named = re.findall(r"[\w-]+\.md", navigation)
    assert len(named) == len(set(named)) and set(named) <= {path.name for path in (ROOT / "docs").glob("*.md")}


def test_the_skill_has_a_front_matter_and_its_links_lead_somewhere() -> None:
    folder = ROOT / "skills" / "agl-otel"
    head = (folder / "SKILL.md").read_text().split("---\n")[1]
    assert re.findall(r"^(\w+): \S", head, flags=re.MULTILINE) == ["name", "description"] and "name: agl-otel" in head
    assert {path.name for path in folder.iterdir()} == {"SKILL.md", "concepts.md", "patterns.md"}


def test_every_example_is_in_the_table_of_examples() -> None:
    rows = [line for line in (EXAMPLES / "README.md").read_text().splitlines() if line.startswith("| [")]
    catalogue = (ROOT / "docs" / "examples.md").read_text().replace("](../examples/", "](").splitlines()
    assert rows == [line for line in catalogue if line.startswith("| [")], "docs/examples.md has the same table"
    listed = set(re.findall(r"^\| \[(\w+)\]", "\n".join(rows), flags=re.MULTILINE))
    assert listed == {path.name for path in EXAMPLES.iterdir() if path.is_dir() and not path.name.startswith(("_", "."))}


def test_every_dependency_has_its_line() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    page = (ROOT / "docs" / "dependencies.md").read_text()
    groups = [
        project["project"]["dependencies"],
        *project["project"]["optional-dependencies"].values(),
        *project["dependency-groups"].values(),
    ]
    for requirement in (entry for group in groups for entry in group if isinstance(entry, str)):
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
