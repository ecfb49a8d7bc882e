"""The hook shares an environment with the newest version of each framework, as `pip install CHECKOUT/hook FRAMEWORK` resolves them."""

from __future__ import annotations

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.environments import ROOT
from tests.one_certificate import downloading

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
FRAMEWORKS = {
    "atomic-agents": "opentelemetry-instrumentation-openai",
    "autogen-agentchat": "opentelemetry-instrumentation-openai",
    "crewai": "opentelemetry-instrumentation-crewai",
    "google-adk": "",  # it makes spans itself
    "langroid": "opentelemetry-instrumentation-openai",
    "llama-index": "opentelemetry-instrumentation-llamaindex",
    "openai-agents": "opentelemetry-instrumentation-openai-agents",
}
"""{framework: its instrumentation}."""
BROUGHT = {
    "agl-otel-hook",
    "opentelemetry-api",
    "opentelemetry-instrumentation",
    "opentelemetry-sdk",
    "opentelemetry-semantic-conventions",
    "packaging",
    "typing-extensions",
    "wrapt",
}


def resolved(*requirements: str, options: tuple[str, ...] = (), python: str = "3.12") -> dict[str, str]:
    """{package: version} of what an installer would install, but for our own."""
    uv = shutil.which("uv") or str(ROOT / ".tools" / "bin" / "uv")
    command = [uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--python-version", python, *options, "-"]
    done = subprocess.run(command, input="\n".join(requirements), capture_output=True, text=True, check=False, env=downloading(), cwd=ROOT)
    if "error sending request" in done.stderr or "dns error" in done.stderr:
        pytest.skip("the package index cannot be reached")
    assert done.returncode == 0, done.stderr
    return dict(re.findall(r"^([\w.-]+)==(\S+)", done.stdout, re.MULTILINE))


@pytest.mark.long  # two minutes, in which it waits for the index
def test_the_newest_versions_of_frameworks_are_installed_beside_the_hook() -> None:
    with ThreadPoolExecutor(len(FRAMEWORKS)) as pool:  # each waits for the index
        newest = pool.map(lambda name: resolved(name, options=("--no-deps",))[name], FRAMEWORKS)
        beside = pool.map(lambda name: resolved("./hook", name, *filter(None, [FRAMEWORKS[name]])), FRAMEWORKS)
        found = dict(zip(FRAMEWORKS, beside, strict=True))
        assert {name: packages[name] for name, packages in found.items()} == dict(zip(FRAMEWORKS, newest, strict=True))
    assert all("opentelemetry-sdk" in packages for packages in found.values())


def test_it_brings_opentelemetry_and_nothing_else() -> None:
    assert {*resolved("./hook"), "agl-otel-hook"} == BROUGHT


def test_the_oldest_versions_that_it_allows_exist_for_the_oldest_python() -> None:
    lowest = resolved("./hook", options=("--resolution", "lowest-direct"), python="3.10")
    assert (lowest["opentelemetry-sdk"], lowest["opentelemetry-instrumentation"]) == ("1.28.0", "0.49b0")
