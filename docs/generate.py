"""Write the pages of reference from the code itself: `make docs`. A test holds the files against this output."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import re
import sys
import tomllib
from collections.abc import Collection, Iterator
from pathlib import Path
from types import ModuleType

import click

from agl_otel.algorithms import options
from agl_otel.algorithms.fast import Baseline
from agl_otel.algorithms.grpo import options as grpo
from agl_otel.algorithms.prompts import APO, GEPA, PromptSearch, RandomSearch
from agl_otel.algorithms.sft import options as sft
from agl_otel.cli import cli
from agl_otel.jobs import improve_options, job
from agl_otel.settings import CONFIG_FILE, PRIVATE, SECRETS, Settings
from agl_otel.web.feedback import FEEDBACK
from agl_otel.web.rest import ROUTES
from agl_otel.web.reviews import REVIEWS
from agl_otel.web.routes import PREFIX
from agl_otel.web.views import VIEWS
from tests.matrix.frameworks import BY_NAME, Framework

HERE = Path(__file__).parent
ROOM = HERE.parent / "agl_otel"
NOTE = "<!-- Written by `make docs`; do not edit. -->"


def contexts(context: click.Context) -> Iterator[click.Context]:
    """The context of every command below that of `context`, itself first, as `agl-otel` would make them."""
    yield context
    if isinstance(context.command, click.Group):
        for name in context.command.list_commands(context):
            child = context.command.get_command(context, name)
            if child:
                yield from contexts(click.Context(child, parent=context, info_name=name, **child.context_settings))


def cli_page() -> str:
    """The help of every command."""
    parts = [
        NOTE,
        "# The command line",
        "",
        "Exit codes: 0 success; 1 the command failed; 2 wrong usage; 3 `doctor` found what prevents training (✗); 130 interrupted.",
        "`run` exits with 0 if the agent's command ended well, and with 1 if it failed; a ✗ of its closing check does not change that.",
        "SIGTERM, which a service manager sends, ends `up` and `store` with 0.",
        "",
    ]
    for context in contexts(click.Context(cli, info_name="agl-otel", terminal_width=100, **cli.context_settings)):
        path, text = context.command_path, context.command.get_help(context)
        parts += [f"## {path}", "", "```text", text.rstrip(), "```", ""]
    return "\n".join(parts)


def settings_page() -> str:
    """Every setting with its variable, default and meaning."""
    named = ", ".join(f"`{name}`" for name in PRIVATE)
    parts = [
        NOTE,
        "# Settings",
        "",
        f"Flags override environment variables, these override `{CONFIG_FILE}` in the current folder, and this overrides the defaults.",
        "In commands that use a store, except `train`, `--data-dir` without `--store` overrides `AGL_STORE`.",
        "",
        "A private stack (`InMemoryLightningStore()`, `Store.embedded(folder)`, the store that a `Trainer` makes, `agl-otel demo`,",
        "`agl-otel store --backend memory`, and those that `run` and `doctor` start if no stack is running) uses its own folder and free",
        f"ports, and ignores these settings: {named}.",
        "So it sends no spans or metrics to a collector named in the environment; the `settings` of `EmbeddedStack` may name one.",
        "",
        "`agl-otel train` does not start a private stack: it uses the running stack, or starts one, with runners, on free ports and on the",
        "stores named by `queue_url` and `clickhouse_url`. Leave out both to train on the data directory.",
        "",
        "| setting | variable | default | meaning |",
        "|---|---|---|---|",
    ]
    for name, field in Settings.model_fields.items():
        default = "" if name in SECRETS else str(field.default)
        meaning = " ".join((field.description or "").split()).replace("|", "\\|")
        parts.append(
            f"| `{name}` | `AGL_{name.upper()}` | `{default}` | {meaning} |"
            if default
            else f"| `{name}` | `AGL_{name.upper()}` | | {meaning} |"
        )
    return "\n".join(parts) + "\n"


def semconv_page() -> str:
    """Every name that crosses a boundary, by section of conventions.py."""
    source = (HERE.parent / "hook" / "agl_otel_hook" / "conventions.py").read_text()
    heads = [(source[: mark.start()].count("\n") + 1, mark[1].strip()) for mark in re.finditer(r"^# --- (.+?)-*$", source, re.MULTILINE)]
    parts = [
        NOTE,
        "# Names on the wire",
        "",
        "Attributes, span names, headers and variables; in the code they are in `agl_otel_hook.conventions`.",
    ]
    nodes = ast.parse(source).body
    section = ""
    for node, after in zip(nodes, [*nodes[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.value, ast.Constant) or not isinstance(node.value.value, str):
            continue
        own = next((title for line, title in reversed(heads) if line < node.lineno), "")
        if own != section:
            section = own
            parts += ["", f"## {section[0].upper()}{section[1:]}", "", "| name | in Python | meaning |", "|---|---|---|"]
        about = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
        parts.append(f"| `{node.value.value}` | `{ast.unparse(node.target)}` | {_cell(str(about))} |")
    return "\n".join(parts) + "\n"


def tables_page() -> str:
    """The tables and views of ClickHouse, and the queue's tables, as they are made."""
    parts = [
        NOTE,
        "# Tables",
        "",
        "What was observed is in ClickHouse, database `otel`; what is intended is in the queue (SQLite or PostgreSQL).",
    ]
    parts += ["", "## ClickHouse", "", "```sql", (ROOM / "traces" / "sql" / "schema.sql").read_text().strip(), "```", ""]
    for engine in ("SQLite", "Postgres"):
        schema = ROOM / "queue" / "sql" / f"schema_{engine.lower()}.sql"
        parts += [f"## The queue in {engine}", "", "```sql", schema.read_text().strip(), "```", ""]
    return "\n".join(parts)


PAGES_OF_CONVERSATIONS = """\
A page of a conversation has what was said once: `messages` of each call but the page's first are those that follow the `repeated` first
messages of the call before it and its reply. It ends after `limit` calls, or before 4 MiB of messages; `offset` asks for the calls after
it, until there are `total`."""


def rest_page() -> str:
    """Every route below /v1/agl."""
    parts = [
        NOTE,
        "# REST",
        "",
        f"Below `{PREFIX}` of the web service (4748, or the port of `agl-otel store`). The OpenAPI document, with every",
    ]
    parts += [f"field, is at `{PREFIX}/openapi.json`. Errors are JSON with a `detail`. With `AGL_TOKEN`: `Authorization: Bearer TOKEN`."]
    for title, routes in (
        ("As in Agent Lightning 0.3", ROUTES),
        ("What the dashboard asks", VIEWS),
        ("Reviews", REVIEWS),
        ("Feedback", FEEDBACK),
    ):
        parts += ["", f"## {title}", "", "| method | path | what |", "|---|---|---|"]
        parts += [f"| {route.method} | `{PREFIX}{route.path}` | {_cell(route.summary)} |" for route in routes]
        parts += ["", PAGES_OF_CONVERSATIONS] if routes is VIEWS else []
    parts += ["", "Its fields, and keys that may send it and nothing else: [late-rewards.md](late-rewards.md)."]
    return "\n".join(parts) + "\n"


def grpc_page() -> str:
    """The queue's service, as its .proto says."""
    proto = (ROOM / "queue" / "proto" / "queue.proto").read_text().strip()
    parts = [
        NOTE,
        "# gRPC",
        "",
        "The queue's wire (4747). Metadata `authorization: Bearer TOKEN` where `AGL_TOKEN` is set. Jaeger's remote storage v2",
    ]
    return "\n".join(
        [*parts, "([jaeger.md](jaeger.md)) and OTLP (4317) are defined by their own projects.", "", "```protobuf", proto, "```", ""]
    )


def grpo_options_page() -> str:
    """GRPO's options by group, with their defaults, bounds and docstrings."""
    parts = [
        NOTE,
        "# GRPO's options",
        "",
        "In Python in their groups (`GRPO(updates=Updates(learning_rate=1e-4))`), in a job file without them. `metrics` has no group",
        "([training.md](training.md#metrics)).",
    ]
    for name, group in classes_of(grpo).items():
        if vars(grpo)[name] in grpo.OPTION_GROUPS.values():
            parts += ["", f"## {name}", "", _cell(ast.get_docstring(group) or ""), "", *option_rows(grpo, group)]
    return "\n".join(parts) + "\n"


def classes_of(module: ModuleType) -> dict[str, ast.ClassDef]:
    """The source of a module's classes, which has the docstrings of their fields."""
    return {node.name: node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.ClassDef)}


def option_rows(module: ModuleType, group: ast.ClassDef, *, hidden: Collection[str] = (), required: bool = False) -> list[str]:
    """A table of the fields of a class: name, default, bounds and docstring. With `required` those without a default, too."""
    rows = ["| option | default | must be | meaning |", "|---|---|---|---|"]
    for node, after in itertools.pairwise([*group.body, ast.Pass()]):
        if not isinstance(node, ast.AnnAssign) or ast.unparse(node.target) in hidden or (node.value is None and not required):
            continue
        about = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
        default = "required" if node.value is None else f"`{_default(module, node.value)}`"
        rule, _ = options.rule_of(eval(ast.unparse(node.annotation), vars(module)))
        rows.append(f"| `{ast.unparse(node.target)}` | {default} | {rule} | {_cell(str(about))} |")
    return rows


def _default(module: ModuleType, value: ast.expr) -> str:
    """A default as its source, of a name its value; of a pydantic field with a factory what that makes, which is empty."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "Field":
        return "[]" if "list" in ast.unparse(value) else "{}"
    return repr(vars(module)[value.id]) if isinstance(value, ast.Name) else ast.unparse(value)


ALGORITHMS_OF_JOBS = {
    "apo": (PromptSearch, APO),
    "gepa": (PromptSearch, GEPA),
    "random_search": (PromptSearch, RandomSearch),
    "baseline": (Baseline,),
}
JOB_TABLES = (
    (job, "AgentSpec", "agent"),
    (job, "DataSpec", "data"),
    (job, "PolicySpec", "policy"),
    (job, "EditorSpec", "editor"),
    (improve_options, "ImproveSpec", "improve"),
)


def job_page() -> str:
    """The keys of a job file but for those of [algorithm], with their defaults, bounds and docstrings."""
    parts = [
        NOTE,
        "# The keys of a job file",
        "",
        "Of `[algorithm]` they are the options of the algorithm: [grpo-options.md](grpo-options.md), [sft-options.md](sft-options.md),",
        "[verl.md](verl.md); those of the searches for prompts and of the baseline are below. `[resources]` has the initial prompts of a",
        "search ([first-algorithm.md](first-algorithm.md)), by name.",
    ]
    for module, name, table in JOB_TABLES:
        kind = classes_of(module)[name]
        about = " ".join((ast.get_docstring(kind) or "").split()).removeprefix(f"[{table}]: ")
        fields = option_rows(module, kind, hidden=("model_config",), required=True)
        parts += ["", f"## `[{table}]`", "", about[:1].upper() + about[1:], "", *fields]
    for algorithm, kinds in ALGORITHMS_OF_JOBS.items():
        parts += ["", f'## `[algorithm]` with `name = "{algorithm}"`', "", *argument_rows(algorithm, kinds)]
    return "\n".join(parts) + "\n"


def argument_rows(algorithm: str, kinds: tuple[type, ...]) -> list[str]:
    """A table of an algorithm's options in a job file, with their meanings from `Args:` of its classes' docstrings."""
    meanings: dict[str, str] = {}
    for kind in kinds:
        arguments = inspect.getdoc(kind).partition("Args:\n")[2].partition("\n\n")[0]
        for names, meaning in re.findall(r"^    (\w[\w, ]*): (.*(?:\n     .*)*)", arguments, re.MULTILINE):
            meanings |= dict.fromkeys(names.split(", "), meaning)
    rows = ["| option | default | must be | meaning |", "|---|---|---|---|"]
    for name, field in job.options_model(algorithm).model_fields.items():
        if name != "name":
            default = "required" if field.is_required() else f"`{_shown_default(field.default)}`"
            rows.append(
                f"| `{name}` | {default} | {options.rule_of(field)[0]} | {_cell(meanings[name][:1].upper() + meanings[name][1:])} |"
            )
    return rows


def _shown_default(value: object) -> str:
    """A default; of files in this package their names."""
    if isinstance(value, Path):
        return repr(value.name)
    return f"[{', '.join(map(_shown_default, value))}]" if isinstance(value, tuple) else repr(value)


def sft_options_page() -> str:
    """SFT's options, with their defaults, bounds and docstrings."""
    parts = [
        NOTE,
        "# SFT's options",
        "",
        "In Python of `SFT(…)`, in a job file of `[algorithm]`, which has no `on_step`, `validator`, `rollout_config` and `run_dir`: a job",
        "sets them.",
        "",
        "SFT trains all weights, in float32: it has no `dtype`, no LoRA and no `gradient_checkpointing`. Those are GRPO's",
        "([grpo-options.md](grpo-options.md)), or your trainer's on exported rows ([training-files.md](training-files.md)).",
        "",
        *option_rows(sft, classes_of(sft)["SFTOptions"]),
    ]
    return "\n".join(parts) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


ROOMS_MARK = "<!-- rooms: written by make docs -->\n"
ROOMS_END = "<!-- end of rooms -->"


def architecture_page() -> str:
    """docs/architecture.md with its table of rooms written anew: the layers of import-linter, top down."""
    text = (HERE / "architecture.md").read_text()
    contract = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    layers = [[name.strip() for name in layer.split("|")] for layer in contract["layers"]]
    rows = ["| row | room | what it does |", "|---|---|---|"]
    for number, names in enumerate(layers):
        for name in names:
            if (source := next(path for path in (ROOM / name / "__init__.py", ROOM / f"{name}.py") if path.exists())).parent.is_symlink():
                shown = f"`{name}/` (`agl_otel.{name}`)"
            else:
                shown = f"`agl_otel/{name}/`" if source.name == "__init__.py" else f"`agl_otel/{name}.py`"
            rows.append(f"| {len(layers) - number} | {shown} | {first_line(source)} |")
    rows.append(f"| 0 | `hook/` (`agl_otel_hook`) | {first_line(HERE.parent / 'hook' / 'agl_otel_hook' / '__init__.py')} |")
    before, rest = text.split(ROOMS_MARK)
    return before + ROOMS_MARK + "\n".join(rows) + "\n" + ROOMS_END + rest.split(ROOMS_END)[1]


FRAMEWORKS_MARK = "<!-- frameworks: written by make docs -->\n"
FRAMEWORKS_END = "<!-- end of frameworks -->"
RECIPES = {
    "langgraph": ("invoke", ("SYSTEM", "agent", "asked", "invoke")),
    "openai_agents": ("chat", ("SYSTEM", "chat_model", "agent", "chat")),
    "crewai": ("run", ("run",)),
    "autogen": ("run", ("main",)),
    "pydantic_ai": ("sync", ("Agent.instrument_all()", "agent", "sync")),
}
"""{framework of the matrix: (the mode of its recipe, the names of its agent that are shown)}."""


def recipes_page() -> str:
    """docs/recipes.md with its frameworks written anew: the agents of tests/matrix, and what was recorded of them."""
    results = json.loads((HERE.parent / "tests" / "matrix" / "results.json").read_text())
    rows = [
        "| framework | version | besides, install | spans of the agent | calls with exact tokens | trajectories |",
        "|---|---|---|---|---|---|",
    ]
    sections: list[str] = []
    for name, (mode, shown) in RECIPES.items():
        framework, kept = BY_NAME[name], results[name]
        play = kept["plays"][mode]
        packages = " ".join(f"`{each}`" for each in asked_by(framework))
        attempts = play["rollouts"]
        figures = [play["own_spans"] // attempts, f"{play['exact']} of {play['calls']}", play["trajectories"][0]]
        rows.append(
            f"| [{framework.title}](#{anchor(framework.title)}) | {kept['version']} | {packages} | {' | '.join(map(str, figures))} |"
        )
        path = f"tests/matrix/agents/{name}/{framework.program}"
        where = f"Mode `{mode}` of [{path}](../{path}), which takes the mode before the question:"
        sections += ["", f"### {framework.title}", "", where, "", "```py", excerpt(framework, shown), "```"]
    before, rest = (HERE / "recipes.md").read_text().split(FRAMEWORKS_MARK)
    return before + FRAMEWORKS_MARK + "\n".join(rows + sections) + "\n\n" + FRAMEWORKS_END + rest.split(FRAMEWORKS_END)[1]


def anchor(title: str) -> str:
    """The fragment of a heading, as GitHub and mkdocs make it."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def asked_by(framework: Framework) -> list[str]:
    """The packages of an agent: what its requirements name before their first comment, and instrumentations that the page has not named."""
    lines = (framework.folder / "requirements.txt").read_text().split("#")[0].split()
    named = [line.split("==")[0] for line in lines if "mcp" not in line]
    wanted = [each.removeprefix("itself, ") for each in framework.instrumented_by.split(", ") if each.startswith("opentelemetry-")]
    return [*dict.fromkeys(each for each in (*named, *wanted) if each != "opentelemetry-instrumentation-openai")]


def excerpt(framework: Framework, names: Collection[str]) -> str:
    """What an agent's program defines under these names, after the imports that this uses."""
    source = (framework.folder / framework.program).read_text()
    body = ast.parse(source).body
    chosen = [node for node in body if named_by(node) in names]
    text = "\n\n\n".join(ast.get_source_segment(source, node) or "" for node in chosen)
    used = {node.id for each in chosen for node in ast.walk(each) if isinstance(node, ast.Name)}
    imports = [
        f"from {node.module} import {', '.join(kept)}"
        for node in body
        if isinstance(node, ast.ImportFrom) and (kept := [each.name for each in node.names if each.name in used])
    ]
    function_first = isinstance(chosen[0], ast.FunctionDef | ast.AsyncFunctionDef)
    return "\n".join([*imports, *[""] * (1 + function_first), text])


def named_by(node: ast.stmt) -> str:
    """The name that a statement at the top of a module defines; of one that defines none the statement."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name
    return ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node)


def first_line(source: Path) -> str:
    """The first paragraph of a module's docstring."""
    return " ".join((ast.get_docstring(ast.parse(source.read_text())) or "").split("\n\n")[0].split())


def llms_txt() -> str:
    """The list of all pages for language models, in the form of https://llmstxt.org: each with its title and its first sentence."""
    nav = re.search(r"^nav:\n(.*)", (HERE.parent / "mkdocs.yml").read_text(), re.MULTILINE | re.DOTALL)
    assert nav is not None, "mkdocs.yml has a nav"
    parts = ["# agl-otel", "", "> Train AI agents from the OpenTelemetry they already emit.", ""]
    for room, pages in re.findall(r"^  - (\w+): \[([^\]]*)\]", nav[1], re.MULTILINE):
        parts += [f"## {room}", ""]
        for name in pages.split(", "):
            title, _, text = re.sub(r"^<!--.*?-->\s*", "", (HERE / name).read_text()).removeprefix("# ").partition("\n")
            first = next((part for part in text.split("\n\n") if re.match(r"\s*[A-Z*`\[]", part)), "")
            sentence = re.sub(r"\[([^\]]*)\]\([^)]*\)|\*\*", r"\1", " ".join(first.split())).partition(". ")[0].rstrip(".:")
            parts.append(f"- [{title}]({name}): {sentence}" if sentence else f"- [{title}]({name})")
        parts.append("")
    return "\n".join(parts)


PAGES = {
    "architecture.md": architecture_page,
    "cli.md": cli_page,
    "settings.md": settings_page,
    "semconv.md": semconv_page,
    "tables.md": tables_page,
    "rest.md": rest_page,
    "grpc.md": grpc_page,
    "job-options.md": job_page,
    "grpo-options.md": grpo_options_page,
    "sft-options.md": sft_options_page,
    "recipes.md": recipes_page,
    "llms.txt": llms_txt,
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (HERE / name).write_text(page())
        sys.stdout.write(f"docs/{name}\n")
