"""Instrumentations wait for their library, and no span is lost by that: real libraries, each in its own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path

import pytest

from tests.environments import ROOT, AbsentError, over_ours

pytestmark = pytest.mark.full
PATCHED = """
import sys
from types import ModuleType
from wrapt import FunctionWrapper
from agl_otel_hook import waiting

def patched(*packages):
    "{module, class and name: the modules of the wrappers around it} within these packages"
    found = {}
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or module.__name__.partition('.')[0] not in packages:
            continue
        classes = [held for held in list(vars(module).values()) if issubclass(type(held), type) and held.__module__ == module.__name__]
        for owner in (module, *classes):
            for name, held in list(vars(owner).items()):
                around = []
                while type(held) is FunctionWrapper:
                    around.append(held._self_wrapper.__module__)
                    held = held.__wrapped__
                if around:
                    found[f"{module.__name__}:{getattr(owner, '__qualname__', '')}.{name}"] = around
    return found

def calls():
    "how many wrappers are around the call of a chat model"
    return len(patched('openai').get('openai.resources.chat.completions.completions:Completions.create', ()))
"""
OPENAI = "opentelemetry.instrumentation.openai"


def run(code: str, *, python: str = sys.executable, instrument: bool = True, **environment: str) -> tuple[str, str]:
    """Run a program with opentelemetry-instrument, or without; return its stdout and stderr. Raises AssertionError if it fails."""
    start = [str(Path(sys.executable).with_name("opentelemetry-instrument"))] if instrument else []
    done = subprocess.run(
        [*start, python, "-W", "ignore", "-c", PATCHED + textwrap.dedent(code)],
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "AGL_", "PYTHON"))},
            "OTEL_TRACES_EXPORTER": "none",
            **environment,
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


def test_instrumentations_of_libraries_not_imported_are_not_loaded() -> None:
    stdout, stderr = run("""
        import threading
        print([name for name in ("openai", "httpx2", waiting.__name__) if name in sys.modules], len(patched("threading", "httpx2")) > 1)
    """)
    assert stdout == "['httpx2', 'agl_otel_hook.waiting'] True"
    assert stderr == ""


IMPORTS = {
    "a submodule first": "from openai.resources.chat import completions",
    "looked for before": "import importlib.util; assert 'openai' not in sys.modules and importlib.util.find_spec('openai'); import openai",
    "its instrumentation first": f"import {OPENAI}; import openai",
    "by name, and loaded anew": "import importlib; importlib.import_module('openai.types'); importlib.reload(sys.modules['openai'])",
    "in a fork": """
        import os
        if pid := os.fork():
            _, status = os.waitpid(pid, 0)
            assert 'openai' not in sys.modules
            sys.exit(os.waitstatus_to_exitcode(status))
        import openai
    """,
    "lazily": """
        import importlib.util
        spec = importlib.util.find_spec('openai')
        spec.loader = importlib.util.LazyLoader(spec.loader)
        sys.modules['openai'] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        import openai
    """,
    "by another finder's loader": """
        import wrapt
        told = []
        wrapt.register_post_import_hook(told.append, 'openai')
        import openai
        assert told == [openai], told
    """,
}


@pytest.mark.parametrize("how", IMPORTS)
def test_an_instrumentation_is_active_once_its_library_is_imported(how: str) -> None:
    program = textwrap.dedent(IMPORTS[how])
    stdout, stderr = run(
        f"{program}\nimport openai; openai.OpenAI(api_key='x').chat.completions; print(calls(), openai.__spec__.loader.name)"
    )
    assert stdout == "1 openai"
    assert stderr == ""


@pytest.mark.parametrize("second", ["import openai", "from openai.resources.chat import completions"])
def test_two_threads_that_import_at_once_both_find_the_library_instrumented(second: str) -> None:
    stdout, stderr = run(f"""
        import threading
        together, found = threading.Barrier(2), []
        def go(program):
            together.wait()
            exec(program)
            from openai.resources.chat import completions
            found.append(calls())
        threads = [threading.Thread(target=go, args=(program,)) for program in ("import openai", {second!r})]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print(calls(), found)
    """)
    assert stdout.startswith("1 "), stderr
    assert len(json.loads(stdout[2:])) == 2, stderr
    assert "Traceback" not in stderr


WHILE_IMPORTED = """
import importlib, os, threading
from importlib.machinery import PathFinder, SourceFileLoader
errors = []
def in_a_thread():
    try:
        importlib.import_module({submodule!r})
    except BaseException as error:
        errors.append(error)
second = threading.Thread(target=in_a_thread)
class Loader(SourceFileLoader):
    def create_module(self, spec):
        second.start()
        while sys._current_frames()[second.ident].f_code.co_name != "acquire":  # until it waits for the lock of the library
            os.sched_yield()
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {library!r} and second.ident is None:
            spec = PathFinder.find_spec(name, path)
            spec.loader = Loader(spec.loader.name, spec.loader.path)
            return spec
sys.meta_path.insert(1, Finder())
importlib.import_module({library!r})
second.join()
import {submodule}
print(len(patched({library!r}).get({function!r}, ())), errors)
"""


def test_a_thread_holding_a_submodules_import_lock_finds_the_library_instrumented() -> None:
    """An import of the submodule in the first thread would deadlock; Python then raises an error in one of the two."""
    function = "openai.resources.chat.completions.completions:Completions.create"
    stdout, stderr = run(WHILE_IMPORTED.format(library="openai", submodule="openai.resources.chat.completions", function=function))
    assert (stdout, stderr) == ("1 []", "")


def test_an_import_does_not_import_modules_only_to_patch_them() -> None:
    stdout, stderr = run("import openai; print('openai.resources.chat' in sys.modules, 'openai.resources.images' in sys.modules)")
    assert (stdout, stderr) == ("False False", "")


def test_a_failing_import_raises_as_usual_and_the_next_is_instrumented() -> None:
    stdout, stderr = run("""
        sys.modules["sniffio"] = None
        for _ in range(2):
            try:
                import openai
            except ImportError as error:
                print("sniffio" in str(error), "openai" in sys.modules)
        del sys.modules["sniffio"]
        for name in [name for name in sys.modules if name.startswith("openai.")]: del sys.modules[name]
        from openai.resources.chat import completions
        print(calls())
    """)
    assert stdout.split("\n") == ["True False", "True False", "1"]
    assert stderr == ""


def test_an_unsupported_version_is_logged_and_not_instrumented(tmp_path: Path) -> None:
    old = tmp_path / "openai-0.9.0.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: openai\nVersion: 0.9.0\n")
    stdout, stderr = run("import openai; from openai.resources.chat import completions; print(calls())", PYTHONPATH=str(tmp_path))
    assert stdout == "0"
    assert 'currently installed version ("openai 0.9.0") falls outside of that range' in stderr


def test_a_disabled_instrumentation_does_not_wait() -> None:
    stdout, _ = run(
        "import openai; from openai.resources.chat import completions; print(calls())", OTEL_PYTHON_DISABLED_INSTRUMENTATIONS="openai"
    )
    assert stdout == "0"


def test_a_failing_instrumentation_is_logged_and_the_program_continues() -> None:
    stdout, stderr = run("""
        from opentelemetry.instrumentation.instrumentor import BaseInstrumentor
        def fails(*_, **__): raise RuntimeError("no way")
        BaseInstrumentor.instrument = fails
        import openai
        print(openai.OpenAI.__name__)
    """)
    assert stdout == "OpenAI"
    assert "Instrumenting of openai failed" in stderr
    assert "no way" in stderr


@pytest.mark.parametrize("instrument", [True, False])
def test_an_instrumentation_disabled_while_waiting_stays_off(instrument: bool) -> None:
    stdout, _ = run(
        """
        from agl_otel.telemetry.setup import instrument_all, uninstrument_all
        instrument_all()
        print("openai" in sys.modules)
        uninstrument_all()
        import openai; from openai.resources.chat import completions
        print(calls())
        instrument_all()
        print(calls())
        uninstrument_all()
        print(calls())
        """,
        instrument=instrument,
    )
    assert stdout.split("\n") == ["False", "0", "1", "0"]


def test_a_program_finds_the_library_instrumented_if_imported_before_or_after() -> None:
    for order in ("import openai; instrument_all()", "instrument_all(); import openai"):
        stdout, stderr = run(
            f"from agl_otel.telemetry.setup import instrument_all; {order}; from openai.resources.chat import completions; print(calls())",
            instrument=False,
        )
        assert (stdout, stderr) == ("1", "")


@cache
def with_langchain() -> str:
    try:
        return str(over_ours("langchain", ROOT / "tests" / "langchain.txt"))
    except AbsentError as error:
        pytest.skip(str(error))


def test_langchain_whose_instrumentation_imports_submodules_is_instrumented() -> None:
    initialize = "from opentelemetry.instrumentation.auto_instrumentation import initialize\ninitialize(swallow_exceptions=False)\n"
    function = "langchain_core.callbacks.base:BaseCallbackManager.__init__"
    program = WHILE_IMPORTED.format(library="langchain_core", submodule="langchain_core.callbacks", function=function)
    stdout, stderr = run(initialize + program, python=with_langchain(), instrument=False)
    assert (stdout, stderr) == ("1 []", "")


FAMILY = ("langchain_core", "langchain", "langchain_openai", "langgraph", "langgraph_sdk", "openai")
AT_START = """
from agl_otel_hook import waiting
from opentelemetry.instrumentation.auto_instrumentation import initialize
if {eager}: waiting.LIBRARIES.clear()
initialize(swallow_exceptions=False)
before = [name for name in {family} if name in sys.modules]
import {first}
import langchain.agents, langchain_openai, langgraph.graph, langgraph.prebuilt, langgraph_sdk
import importlib
for name in ("chat.completions", "completions", "embeddings", "images", "responses", "beta.assistants", "beta.realtime.realtime"):
    importlib.import_module(f"openai.resources.{{name}}")  # at the start the instrumentation does
for name in ("runs", "messages"):
    importlib.import_module(f"openai.resources.beta.threads.{{name}}")
import json
print(json.dumps([before, patched(*{family})]))
"""


def after_importing(first: str, *, eager: bool = False) -> tuple[list[str], dict[str, list[str]]]:
    """Return the modules of FAMILY that the start loaded, and what is patched at the end in a program that imports `first` first."""
    stdout, _ = run(AT_START.format(eager=eager, family=FAMILY, first=first), python=with_langchain(), instrument=False)
    return tuple(json.loads(stdout))


@cache
def eagerly() -> dict[str, list[str]]:
    return after_importing("json", eager=True)[1]


@pytest.mark.parametrize("first", ["langchain_openai", "langgraph.graph", "langgraph_sdk"])
def test_any_first_import_of_langchain_patches_as_much_as_an_eager_start(first: str) -> None:
    before, patched = after_importing(first)
    assert before == []
    assert patched == eagerly()
    assert len(patched) > 20
