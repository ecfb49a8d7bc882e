"""Check an agent's environment for what blocks telemetry: variables, versions, frameworks with their own telemetry, ports.

The checks are tables of variables and frameworks. `inspect_environment` does the I/O; `check_environment` is pure. Runners correct many
of these settings for their agents; they are reported all the same, because an agent run without a runner would send nothing.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Final

from agl_otel.cli.findings import Finding, advice, good, wrong
from agl_otel.runner.injection import HOOK, PYTHONS, install_line, versions_in
from agl_otel.service.ports import is_free
from agl_otel.service.private import exposure_problem
from agl_otel.settings import PORTS, Settings
from agl_otel.stack.supervisor import LOCK_FILE, read_stack_file
from agl_otel.text import without_secrets
from agl_otel_hook.inject.agl_otel_inject import is_fitting, to_bring, version_of

LIST_SECONDS: Final = 60.0
_LIST: Final = (
    "import json, platform, importlib.metadata as m; found = {d.metadata['Name'].lower().replace('_', '-'): d.version "
    "for d in m.distributions()}; print(json.dumps({**found, 'python': platform.python_version()}))"
)
LOCAL: Final = ("127.0.0.1", "localhost", "*")  # entries of NO_PROXY that cover the stack
INSTRUMENTATION_MINOR: Final = 21  # opentelemetry-sdk 1.N goes with opentelemetry-instrumentation 0.(N + 21)b


@dataclass(frozen=True)
class Environment:
    """The state that the checks read."""

    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    packages: Mapping[str, str] | None = None
    """{name: version} in the agent's interpreter, with its own as `python`; None if the command is not a Python program."""
    own: Mapping[str, str] = field(default_factory=dict[str, str])
    """{name: version} in this interpreter."""
    taken: tuple[tuple[str, int], ...] = ()
    """(setting, port) of the stack's ports that another process listens on."""
    store: str = ""
    """Address of the running stack to use; empty: a stack is started."""
    other_stack: str = ""
    """The data directory of a stack of ours that has the ports of the settings; empty: none is known."""
    inject: bool = False
    """Whether OpenTelemetry is brought into an interpreter without it."""
    open_folder: str = ""
    """Message about a data directory that other users may read (private.py); empty if they may not."""
    scopes: frozenset[str] = frozenset()
    """The instrumentation scopes of the spans that have arrived from the agent."""


@dataclass(frozen=True)
class Variable:
    """A variable that switches telemetry off, or sends it elsewhere."""

    pattern: str
    """A regular expression for its whole name."""
    bad: Callable[[str], bool]
    what: str
    """The effect of a bad value."""
    remedy: str
    """`{value}` stands for the value."""
    blocks: bool = False
    """Whether it has this effect under a runner, too."""
    unless: str = ""
    """A variable that, where it is set, makes up for it."""


def _set(value: str) -> bool:
    return bool(value)


def _true(value: str) -> bool:
    return value.strip().lower() in ("true", "1", "yes")


def _off(value: str) -> bool:
    return value.strip().lower() in ("false", "0", "no", "none", "no_content")


def _names(*names: str) -> Callable[[str], bool]:
    return lambda value: any(part.strip().lower() in names for part in value.split(","))


_WITHOUT_RUNNER: Final = "runners of this stack undo it; for an agent that runs without a runner, unset it"
VARIABLES: Final = (
    Variable("OTEL_SDK_DISABLED", _true, "switches OpenTelemetry off", _WITHOUT_RUNNER),
    Variable("OTEL_(TRACES|LOGS)_EXPORTER", _names("none", "console"), "sends to no collector", _WITHOUT_RUNNER),
    Variable("OTEL_TRACES_SAMPLER", lambda v: bool(v) and "always_on" not in v, "drops some or all traces", _WITHOUT_RUNNER),
    Variable(
        "OTEL_CONFIG_FILE",
        _set,
        "configures telemetry from the file instead of all other OTEL_ variables: none of it goes to a stack",
        "in attempts of Python agents, the hook sends every span to the stack as well (without the package "
        "opentelemetry-configuration the file is ignored); for agents in other languages, unset it",
    ),
    Variable(
        "OTEL_EXPERIMENTAL_CONFIG_FILE",
        _set,
        "configures telemetry from the file in SDKs of other languages: none of it goes to a stack",
        "attempts do not get it",
    ),
    Variable(
        "OTEL_EXPORTER_OTLP_((TRACES|LOGS)_)?ENDPOINT",
        _set,
        "no longer gets the agent's telemetry: attempts send it to this stack instead",
        "to keep the copy, start the stack (`agl-otel up`) with AGL_FORWARD_OTLP={value}",
        unless="AGL_FORWARD_OTLP",
    ),
    Variable(
        "PHOENIX_COLLECTOR_ENDPOINT",
        _set,
        "no longer gets spans of the global provider: in attempts that is this stack's",
        "to keep the copy, start the stack (`agl-otel up`) with AGL_FORWARD_OTLP={value}",
        unless="AGL_FORWARD_OTLP",
    ),
    Variable(
        "OTEL_EXPORTER_OTLP_((TRACES|LOGS)_)?HEADERS",
        _set,
        "holds headers (a key) for another place",
        "attempts do not get them; put them into AGL_FORWARD_HEADERS for the copy",
        unless="AGL_FORWARD_HEADERS",
    ),
    Variable(
        "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS",
        _names("*"),
        "switches every instrumentation off",
        "unset it, or name only those that are to be off",
        blocks=True,
    ),
    Variable(
        "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS",
        _names("openai", "openai_v2", "anthropic", "langchain", "httpx", "threading"),
        "switches instrumentations off that record model calls, or propagate ids",
        "remove them from it: openai, anthropic, langchain record calls; httpx and threading propagate the ids of a rollout",
    ),
    Variable(
        "OTEL_(SPAN_)?ATTRIBUTE_VALUE_LENGTH_LIMIT|OTEL_(SPAN_)?ATTRIBUTE_COUNT_LIMIT",
        _set,
        "truncates messages, or drops attributes",
        "unset it: training on truncated conversations is worse than on none",
        blocks=True,
    ),
    Variable(
        "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT|TRACELOOP_TRACE_CONTENT",
        _off,
        "keeps messages out of the agent's spans",
        "set it to true (OTEL_…: to span_only, which older instrumentations call true) if adapters should read messages from them; "
        "calls through the proxy have them anyway",
    ),
    Variable(
        "OPENINFERENCE_HIDE_(INPUTS|OUTPUTS|INPUT_MESSAGES|OUTPUT_MESSAGES)",
        _true,
        "keeps messages out of the agent's spans",
        "unset it if adapters should read messages from them; calls through the proxy have them anyway",
    ),
    Variable("OPENAI_AGENTS_DISABLE_TRACING", _true, "switches the tracing of openai-agents off", "unset it", blocks=True),
)


@dataclass(frozen=True)
class Framework:
    """A framework that sends no telemetry to the stack by default."""

    packages: tuple[str, ...]
    does: str
    remedy: str
    """`{where}` stands for the environment to install into."""
    good_with: tuple[str, ...] = ()
    """Packages any of which records its spans."""
    good_if: tuple[str, ...] = ()
    """Variables any of which switches its spans on."""
    scope: str = ""
    """The instrumentation scope of the spans that it makes by itself, where it is configured to."""


FRAMEWORKS: Final = (
    Framework(
        ("crewai",),
        "sets up its own telemetry and sends it to its vendor",
        "set CREWAI_DISABLE_TELEMETRY=true and pip install opentelemetry-instrumentation-crewai (or openinference-instrumentation-crewai) "
        "{where}",
        good_if=("CREWAI_DISABLE_TELEMETRY", "CREWAI_DISABLE_TRACKING"),
    ),
    Framework(
        ("langsmith",),
        "sends traces to LangSmith, not by OpenTelemetry",
        "set LANGSMITH_OTEL_ENABLED=true and LANGSMITH_TRACING=true, or use opentelemetry-instrumentation-langchain",
        ("opentelemetry-instrumentation-langchain", "openinference-instrumentation-langchain"),
        ("LANGSMITH_OTEL_ENABLED",),
    ),
    Framework(
        ("openai-agents",),
        "sends its tracing to OpenAI",
        "pip install opentelemetry-instrumentation-openai-agents (or openinference-instrumentation-openai-agents) {where}",
        ("opentelemetry-instrumentation-openai-agents", "openinference-instrumentation-openai-agents"),
    ),
    Framework(
        ("traceloop-sdk",),
        "Traceloop.init() sets up an exporter of its own, to TRACELOOP_BASE_URL",
        "leave Traceloop.init() out: its instrumentations are loaded without it",
    ),
    Framework(("agentops",), "agentops.init() sets up an exporter of its own", "leave agentops.init() out: it is not needed here"),
    Framework(
        ("logfire",),
        "logfire.configure() sets up a provider of its own",
        "call logfire.configure(send_to_logfire=False), or Agent.instrument_all() of pydantic-ai without it",
    ),
    Framework(
        ("agent-framework", "agent-framework-core"),
        "makes spans only when configured to",
        "set ENABLE_INSTRUMENTATION=true (older: ENABLE_OTEL=true) and ENABLE_SENSITIVE_DATA=true for messages",
        good_if=("ENABLE_INSTRUMENTATION", "ENABLE_OTEL"),
    ),
    Framework(
        ("smolagents",),
        "makes no spans by itself",
        "pip install openinference-instrumentation-smolagents {where}",
        ("openinference-instrumentation-smolagents",),
    ),
    Framework(
        ("agno",),
        "makes no spans of agents and tools by itself",
        "pip install openinference-instrumentation-agno {where}: it adds its agents and tools",
        ("openinference-instrumentation-agno", "opentelemetry-instrumentation-agno"),
    ),
    Framework(
        ("haystack-ai",),
        "makes no spans of agents and tools by itself",
        "pip install openinference-instrumentation-haystack {where}: it adds its pipelines and tools",
        ("openinference-instrumentation-haystack", "opentelemetry-instrumentation-haystack"),
    ),
    Framework(
        ("dspy",),
        "makes no spans of agents and tools by itself, and keeps replies in a cache: a repeated task calls nothing",
        "pip install openinference-instrumentation-dspy {where}: it adds its modules and tools; "
        "dspy.configure_cache(enable_disk_cache=False, enable_memory_cache=False) in training",
        ("openinference-instrumentation-dspy",),
    ),
    Framework(
        ("llama-index-core",),
        "makes no spans by itself",
        "pip install openinference-instrumentation-llama-index (or opentelemetry-instrumentation-llamaindex) {where}",
        ("openinference-instrumentation-llama-index", "opentelemetry-instrumentation-llamaindex"),
    ),
    Framework(
        ("pydantic-ai", "pydantic-ai-slim"),
        "makes spans only when configured to",
        "call Agent.instrument_all() in the program",
        scope="pydantic-ai",
    ),
    Framework(
        ("langfuse", "weave", "arize-phoenix-otel"),
        "sets up an exporter of its own when it is started",
        "start it after OpenTelemetry is set up, with the global provider, or leave it out; AGL_FORWARD_OTLP sends it a copy",
    ),
)


def inspect_environment(
    command: Sequence[str], environment: Mapping[str, str], settings: Settings, *, with_packages: bool = True, inject: bool = False
) -> Environment:
    """Read the packages of the agent's interpreter, the ports in use and the settings. Blocks for up to LIST_SECONDS."""
    taken = () if settings.store or (settings.data_dir / "stack.json").exists() else _taken(settings)
    own = {each.name.lower().replace("_", "-"): each.version for each in metadata.distributions()}
    packages = packages_of(command, environment) if with_packages else None
    other = _folder_of_stack(settings) if any(name == "queue_port" for name, _ in taken) else ""
    return Environment(environment, packages, own, taken, settings.store, other, inject, exposure_problem(settings.data_dir))


def _folder_of_stack(settings: Settings) -> str:
    """Return the data directory of this user's stack whose queue has the port of the settings; empty if there is none, or no /proc.

    Nothing is sent to the port, which may be another's: a stack holds its lock open.
    """
    for folder in {Path(path).parent for path in _open_files() if path.endswith(f"/{LOCK_FILE}")}:
        with contextlib.suppress(OSError, ValueError):
            if read_stack_file(folder).get("queue", {}).get("address", "").endswith(f":{settings.queue_port}"):
                return str(folder)
    return ""


def _open_files() -> Generator[str]:
    """Yield the paths of the files that processes of this user have open."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    yield str(descriptor.readlink())


def _taken(settings: Settings) -> tuple[tuple[str, int], ...]:
    ports = [(name, int(getattr(settings, name))) for name in PORTS]
    return tuple((name, port) for name, port in ports if port and not is_free(settings.host, port))


def packages_of(command: Sequence[str], environment: Mapping[str, str]) -> dict[str, str] | None:
    """List {name: version} of the interpreter that runs `command`, as `python`, and its packages; None if it is not a Python program."""
    python = _interpreter(command[0], environment)
    if python is None:
        return None
    try:
        done = subprocess.run([*python, "-c", _LIST], capture_output=True, timeout=LIST_SECONDS, check=True, env=dict(environment))
        return json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _interpreter(program: str, environment: Mapping[str, str]) -> list[str] | None:
    """Return the interpreter: `program` itself, or the one that a script names in its first line."""
    path = shutil.which(program, path=environment.get("PATH"))
    if path is None:
        return None
    if Path(path).name.startswith("python"):
        return [path]
    with Path(path).open("rb") as file:
        first = file.readline(300)
    words = first[2:].decode(errors="replace").split() if first.startswith(b"#!") else []
    return words if words and "python" in words[-1] else None


def check_environment(seen: Environment) -> list[Finding]:
    """Run all checks on what was read. Pure: no I/O."""
    return [*_variables(seen), _loopback(seen), *_versions(seen), *_frameworks(seen), *_stack(seen)]


def _variables(seen: Environment) -> list[Finding]:
    found: list[Finding] = []
    for variable in VARIABLES:
        for name, value in seen.environment.items():
            if re.fullmatch(variable.pattern, name) and variable.bad(value) and not seen.environment.get(variable.unless):
                what = f"{name}={'…' if 'HEADERS' in name else without_secrets(value)}"
                remedy = variable.remedy.replace("{value}", _base_of(without_secrets(value)))
                finding = wrong(what, variable.what, remedy, spoils=("spans",)) if variable.blocks else advice(what, variable.what, remedy)
                found.append(finding)
    return found or [good("no variable switches telemetry off", "none of the known ones is set")]


def _base_of(endpoint: str) -> str:
    """Return the endpoint of all signals that belongs to that of one."""
    return re.sub(r"/v1/(traces|logs)/?$", "", endpoint)


def _loopback(seen: Environment) -> Finding:
    proxies = [
        name for name in ("http_proxy", "https_proxy", "all_proxy") if seen.environment.get(name) or seen.environment.get(name.upper())
    ]
    excepted = f"{seen.environment.get('no_proxy', '')},{seen.environment.get('NO_PROXY', '')}".split(",")
    what = "the agent reaches the stack directly"
    if not proxies or any(host.strip() in LOCAL for host in excepted):
        return good(what, "no HTTP proxy is in the way")
    detail = f"{', '.join(proxies)} is set, and NO_PROXY does not name 127.0.0.1"
    return wrong(what, detail, "set NO_PROXY=127.0.0.1,localhost", spoils=("command", "calls", "spans", "stored"))


def _versions(seen: Environment) -> list[Finding]:
    if seen.packages is None:
        return [good("versions", "not known: the command is not Python itself. Pythons below it load the hook, others must send OTLP")]
    packages = seen.packages
    what = "the agent's Python has OpenTelemetry for the hook"
    brought = to_bring(versions_in(packages), versions_in(seen.own), seen.inject)
    if brought is None or (HOOK not in packages and not _is_supported(packages)):
        return [_without_hook(what, packages, seen)]
    if "opentelemetry-sdk" in brought:
        return [good(what, f"brought: opentelemetry-sdk {seen.own.get('opentelemetry-sdk')} and what agl-otel's environment has beside it")]
    sdk, instrumentation = packages["opentelemetry-sdk"], packages.get("opentelemetry-instrumentation")
    detail = f"opentelemetry-sdk {sdk}, opentelemetry-instrumentation {instrumentation or 'brought'}"
    found = [good(what, detail if HOOK in packages else f"{detail}; {HOOK} is brought")]
    if instrumentation is None:
        return found
    if (pair := _minor(sdk) + INSTRUMENTATION_MINOR) != _minor(instrumentation):
        remedy = (
            f"pip install 'opentelemetry-sdk=={sdk}' 'opentelemetry-instrumentation==0.{pair}b0', and other instrumentations of 0.{pair}b0"
        )
        found.append(wrong("their versions go together", detail, remedy, spoils=("command", "hook", "spans", "stored")))
    hook, wanted = packages.get(HOOK), seen.own.get(HOOK)
    if hook and wanted and hook != wanted:
        remedy = f"{install_line()} into the agent's own environment"
        found.append(wrong("the hook has the version of this package", f"{hook}, not {wanted}", remedy, spoils=("hook", "spans", "stored")))
    return found


def _without_hook(what: str, packages: Mapping[str, str], seen: Environment) -> Finding:
    """Tell why the hook is not loaded in this Python."""
    missing = [name for name in ("opentelemetry-sdk", "opentelemetry-instrumentation") if name not in packages]
    found = {name: version for name, version in versions_in(packages).items() if version is not None}
    misfits = [
        f"{name} {packages[name.replace('_', '-')]}" for name, version in found.items() if not is_fitting(name, version, bool(missing))
    ]
    detail = f"missing: {', '.join(missing)}"
    remedy = f"{install_line()} into the agent's own environment, with instrumentations of its libraries"
    if not _is_supported(packages):
        detail = f"the hook is not loaded in Python {packages['python']}"
        pythons = " to ".join(".".join(map(str, each)) for each in PYTHONS)
        remedy = f"use one of {pythons}"
    elif misfits:
        detail, remedy = f"too old or too new: {', '.join(misfits)}", f"{install_line()} into the agent's own environment"
    elif "opentelemetry-sdk" in missing and not seen.inject:
        remedy = f"give --inject, which brings OpenTelemetry, or {remedy}"
    return advice(what, f"{detail}: its model calls are recorded at the proxy, its own spans are not", f"to see them, {remedy}")


def _is_supported(packages: Mapping[str, str]) -> bool:
    return "python" not in packages or PYTHONS[0] <= version_of(packages["python"]) <= PYTHONS[1]


def _minor(version: str) -> int:
    part = version.split(".")[1] if "." in version else ""
    return int(re.match(r"\d*", part)[0] or 0)  # pyright: ignore[reportOptionalSubscript] - the pattern matches any text


def _frameworks(seen: Environment) -> list[Finding]:
    packages = seen.packages or {}
    instrumented, where = packages, "into the agent's own environment"
    if "opentelemetry-sdk" in (to_bring(versions_in(packages), versions_in(seen.own), seen.inject) or ()):
        instrumented, where = {**packages, **seen.own}, f"beside agl-otel ({sys.prefix}), from where OpenTelemetry is brought"
    found: list[Finding] = []
    for each in FRAMEWORKS:
        name = next((package for package in each.packages if package in packages), None)
        if name is None:
            continue
        what, by_variable = f"{name} {packages[name]}", any(_true(seen.environment.get(key, "")) for key in each.good_if)
        arrives = by_variable or each.scope in seen.scopes or any(package in instrumented for package in each.good_with)
        found.append(good(what, "its spans arrive") if arrives else advice(what, each.does, each.remedy.replace("{where}", where)))
    return found


def important(seen: Environment) -> list[Finding]:
    """Return what also `agl-otel run` tells: telemetry that is off or goes elsewhere now, and a stack that is not used."""
    return [finding for finding in (*_variables(seen), *_other_stack(seen)) if finding.state != "good"]


def _other_stack(seen: Environment) -> list[Finding]:
    if not seen.other_stack:
        return []
    detail = f"no: it runs on {seen.other_stack}, and this command starts one of its own on another folder"
    return [advice("the stack that runs is used", detail, f"to use it, give --data-dir {shlex.quote(seen.other_stack)}")]


def _stack(seen: Environment) -> list[Finding]:
    found = _other_stack(seen) or [
        advice(
            f"port {port} is taken",
            f"another process listens there, so `agl-otel up` could not start ({name})",
            f"stop that process, or set AGL_{name.upper()} to another port (0: any)",
        )
        for name, port in seen.taken
    ]
    if seen.open_folder:
        what, _, remedy = seen.open_folder.partition(": ")
        found.append(advice("the data directory is open", what, remedy))
    return found or [good("ports", f"the stack at {seen.store}" if seen.store else "all ports are free")]
