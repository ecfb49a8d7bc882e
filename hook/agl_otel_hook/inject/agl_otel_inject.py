"""Bring the hook into an interpreter in which it need not be installed, without a trace until a library is imported that it acts on.

A runner puts this folder on the PYTHONPATH of an agent's command (agl_otel/runner/injection.py), so that sitecustomize.py calls `begin` in
every Python process below it, whatever starts it. Until the first import of a library that the hook or an instrumentation of this
environment acts on, there is one more finder on sys.meta_path, and nothing is read but the names of installed instrumentations. Then
`start` does as `opentelemetry-instrument`: hook and instrumentations are loaded, where OpenTelemetry's packages fit, and else nothing.

Of what it needs, an interpreter may lack opentelemetry-instrumentation and wrapt, and with AGL_HOOK=inject all of OpenTelemetry. These are
found in AGL_HOOK_PACKAGES, where the runner has them: they are pure Python, but for wrapt's extension, without which it works as well.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # as in typing, whose import would take as long as the start of Python
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any, Final

Version = tuple[int, ...]
INSTRUMENT: Final = ("opentelemetry-instrument", "opentelemetry.instrumentation.auto_instrumentation")
"""Programs that start another with OpenTelemetry's own folder at the head of PYTHONPATH."""
INSTRUMENTATIONS: Final = os.path.join("opentelemetry", "instrumentation")
AUTO_FOLDER: Final = os.path.join(INSTRUMENTATIONS, "auto_instrumentation")
LIBRARIES: Final = frozenset(
    (
        *("agents", "agl_otel_hook", "anthropic", "crewai", "httpx", "langchain", "langchain_core", "langgraph"),
        *("llama_index", "openai", "opentelemetry"),
    )
)
"""Packages whose import starts the hook, besides those that installed instrumentations are named after."""
BRINGABLE: Final = ("agl_otel_hook", "opentelemetry")
"""Those of them that `start` may make importable."""
FITTING: Final = {
    "opentelemetry-api": ((1, 28), (2, 0)),
    "opentelemetry-instrumentation": ((0, 49), (1, 0)),
    "opentelemetry-sdk": ((1, 28), (2, 0)),
    "wrapt": ((1, 14), (3, 0)),
}
"""{package: (oldest version, first that is too new)} that the hook works with, as in its pyproject.toml."""
OLDEST_SDK: Final = (1, 33)
"""That the runner's opentelemetry-instrumentation works with, which is newer."""
BROUGHT: Final = {
    "importlib_metadata": (6, 0),
    "packaging": (18, 0),
    "typing_extensions": (4, 5),
    "wrapt": FITTING["wrapt"][0],
    "zipp": (0,),
}
"""{package that OpenTelemetry's need: oldest version}: an interpreter's own come first."""
IMPORTED: Final = ("deprecated", "opentelemetry", *BROUGHT)
"""Modules that `start` imports, perhaps before the agent does, if they are those of the distributions of the same names."""
DISTRIBUTIONS: Final = tuple(f"opentelemetry-{name}" for name in ("api", "instrumentation", "sdk", "semantic-conventions", "util"))
"""How the names of distributions begin that are brought with all of OpenTelemetry; exporters are not: the hook has its own."""


def begin(here: str) -> Sequence[str]:
    """Act on the program that this process will run. Return folders whose sitecustomize is not to be run.

    `here`: this folder, as it stands in PYTHONPATH.
    """
    auto = [folder for folder in sys.path if folder.endswith(AUTO_FOLDER)]
    if os.environ.get("AGL_HOOK") == "off":
        return []
    program = program_of(sys.orig_argv)
    if program in INSTRUMENT:
        _stay_first(here)
        return []
    if skips(program, os.environ.get("AGL_HOOK_SKIP", "")):
        _leave(here, auto)
        return auto
    found = instrumentations(sys.path)
    if auto and "auto_instrumentation" in found:
        if _find("agl_otel_hook") is not None:  # then opentelemetry-instrument loads it
            return []
        return auto if start(here) else []
    sys.meta_path.insert(0, _First(here, found))
    return auto  # that of another environment, which could only fail here


def program_of(argv: Sequence[str]) -> str:
    """Return the name of the script or module that a command line of Python runs; empty for `-c` and standard input."""
    words = iter(argv[1:])
    for word in words:
        if not word.startswith("-"):
            return os.path.basename(word)
        if word == "-":
            return ""
        if word == "--check-hash-based-pycs":
            next(words, "")
        place = 0 if word.startswith("--") else next((at for at, letter in enumerate(word) if letter in "cmWX"), 0)
        value = (word[place + 1 :] or next(words, "")) if place else ""
        if place and word[place] in "cm":
            return value if word[place] == "m" else ""
    return ""


def skips(program: str, patterns: str) -> bool:
    """Return whether a name matches one of the patterns, separated by commas; one may end in `*`."""
    names = [pattern.strip() for pattern in patterns.split(",")]
    return bool(program) and any(program.startswith(name[:-1]) if name.endswith("*") else program == name for name in names)


def instrumentations(path: Iterable[str]) -> set[str]:
    """Return the names of the instrumentations that are installed in these folders."""
    found = set[str]()
    for folder in path:
        for kind in (INSTRUMENTATIONS, os.path.join("openinference", "instrumentation")):
            try:
                found.update(name for name in os.listdir(os.path.join(folder, kind)) if "." not in name)
            except OSError:
                continue
    return found


def start(here: str) -> bool:
    """Load the hook, the SDK and the instrumentations, as `opentelemetry-instrument` does. Return False where they do not fit."""
    with NoWarnings(), _Guard() as guard:
        if _is_ending() or not bring(here) or guard.met:
            return False
        import logging

        from opentelemetry.instrumentation.auto_instrumentation import _load

        import agl_otel_hook

        load: Any = _load  # its functions are private, but are in all versions; `initialize`, which calls them, is not
        logging.getLogger(load.__name__).addHandler(logging.NullHandler())  # errors of instrumentations: only for those who ask for logs
        distro = load._load_distro()
        distro.configure()
        load._load_configurators()
        agl_otel_hook.pre_instrument()
        try:
            load._load_instrumentors(distro)
        finally:
            agl_otel_hook.post_instrument()
        return True


class NoWarnings:
    """Ignores warnings in its block, in all threads. Filters that are added in the block stay, unlike those of warnings.catch_warnings."""

    def __enter__(self) -> None:
        import warnings

        warnings.filterwarnings("ignore", "(?#agl-otel)")  # matches all, and nobody else has it
        self._filter = warnings.filters[0]

    def __exit__(self, *_: object) -> None:
        import warnings

        filters: Any = warnings.filters  # typed as a sequence
        if self._filter in filters:  # another thread may have removed it
            filters.remove(self._filter)


def bring(here: str, **lent: str) -> bool:
    """Let this process import the hook and what it needs. Return False where they do not fit.

    lent: {package: the folder in which it is} of others to find, unless they are installed.
    """
    packages = os.environ.get("AGL_HOOK_PACKAGES", "")
    found = {name: _version(name) for name in (*FITTING, *BROUGHT)}
    offered = {name: _version(name, packages) for name in FITTING} if packages else {}
    brings = to_bring(found, offered, os.environ.get("AGL_HOOK") == "inject")
    if brings is None or any(map(_is_shadowed, IMPORTED)):
        return False
    lent["agl_otel_hook"] = os.path.dirname(os.path.dirname(here))
    first = [_OpenTelemetry(packages)] if "opentelemetry-sdk" in brings else []
    rest, before = _Rest(lent, packages if brings else ""), {*sys.modules}
    sys.meta_path[:] = [*first, *sys.meta_path, rest]
    from importlib import import_module

    try:
        for each in ("opentelemetry.instrumentation.auto_instrumentation._load", "agl_otel_hook.hook"):
            import_module(each)
    except (Exception, SystemExit):  # noqa: BLE001  # the boundary: somebody else's packages
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder not in (*first, rest)]
        for name in {*sys.modules} - before:
            if name.partition(".")[0] in ("agl_otel_hook", *IMPORTED):
                del sys.modules[name]
        return False
    return True


def version_of(text: str) -> Version:
    """Return the first two numbers of a version."""
    return tuple(int(part) for part in text.replace("b", ".").split(".")[:2] if part.isdigit())


def is_fitting(name: str, version: Version, brings: bool) -> bool:
    """Return whether the hook works with this version of a package of FITTING, and with one of BROUGHT what it `brings`, if anything."""
    oldest, too_new = FITTING.get(name) or (BROUGHT[name] if brings else (), None)
    return oldest <= version and (too_new is None or version < too_new)


def to_bring(found: dict[str, Version | None], offered: dict[str, Version | None], all_of_it: bool) -> set[str] | None:
    """Return the packages of FITTING to bring from the runner's environment; None where nothing is to be loaded.

    found: their versions in this interpreter, and those of BROUGHT. offered: in the runner's environment. all_of_it: whether OpenTelemetry
    may be brought.
    """
    lacking = {name for name in FITTING if found[name] is None}
    if any(version is not None and not is_fitting(name, version, bool(lacking)) for name, version in found.items()) or any(
        offered.get(name) is None for name in lacking
    ):
        return None
    api, sdk = found["opentelemetry-api"], found["opentelemetry-sdk"]
    if sdk is not None:
        return lacking if "opentelemetry-instrumentation" not in lacking or sdk >= OLDEST_SDK else None
    newer = api is not None and api > (offered["opentelemetry-sdk"] or ())  # an SDK for an older API
    return lacking if all_of_it and not newer else None


class _First:
    """A finder that has `start` called before the first import that the hook acts on, and otherwise finds nothing.

    Finders are called with the lock of all imports held: one that imported would wait for ever for a thread that imports, too. So `start`
    is called by the loader of what is found.
    """

    def __init__(self, here: str, instrumentations: Iterable[str]) -> None:
        self._here = here
        self._names: frozenset[str] = LIBRARIES.union(instrumentations) - sys.stdlib_module_names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Find a name that `start` acts on as the other finders do (the import system calls this)."""
        if name.partition(".")[0] not in self._names:
            return None
        spec = _find(name, path, target, without=self)
        if spec is None:
            if name not in BRINGABLE:
                return None
            from importlib.machinery import ModuleSpec

            spec = ModuleSpec(name, None)
        loader: Any = _Starting(self, spec.loader)
        spec.loader = loader
        return spec

    def start(self) -> None:
        """Call `start`, once."""
        if not self._names:  # another thread has, or does now: to wait for it could be for ever, and what it loads is patched later
            return
        self._names = frozenset()  # it stays in sys.meta_path, which the import system may go through at this moment
        try:
            start(self._here)
        except (Exception, SystemExit):  # noqa: BLE001  # the boundary: the import goes on, as it would without us
            return


class _Starting:
    """A loader that has `start` called, and then imports the module as if there were no finder of ours; `start` may have done so."""

    def __init__(self, first: _First, loader: object) -> None:
        self._first, self._loader = first, loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module, which is executed."""
        from importlib import import_module

        self._first.start()
        module = import_module(spec.name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore its spec, which the import system has replaced."""
        module.__spec__ = self._spec


class _Guard:
    """A finder that, in its block, fails for modules of the standard library in whose place the agent has files, which are not run."""

    def __init__(self) -> None:
        self.met = False
        """Whether one was asked for."""
        own = list[str]()
        for folder in sys.path:
            if os.path.abspath(folder) == os.path.dirname(os.__file__):
                break
            try:
                found = [name for name in os.listdir(folder or ".") if name.partition(".")[0] in sys.stdlib_module_names]
            except OSError:
                continue
            own += (
                name for name in found if name.endswith((".py", ".pyc", ".so")) or os.path.exists(os.path.join(folder, name, "__init__.py"))
            )
        self.names: frozenset[str] = frozenset(name.partition(".")[0] for name in own) - sys.modules.keys()

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Raise ImportError for such a name."""
        if name in self.names:
            self.met = True
            raise ImportError(name)

    def __enter__(self) -> _Guard:
        if self.names:
            sys.meta_path.insert(0, self)
        return self

    def __exit__(self, *_: object) -> None:
        self.names = frozenset()  # it stays in sys.meta_path, which the import system may go through at this moment


class _OpenTelemetry:
    """A finder of all of OpenTelemetry, before the parts of it that the interpreter has, so that its parts are of one version."""

    def __init__(self, packages: str) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Find `opentelemetry`, by whose path all below it is found."""
        if name != "opentelemetry":
            return None
        from importlib.machinery import ModuleSpec

        spec = ModuleSpec(name, None, is_package=True)
        folders = (os.path.join(folder, name) for folder in [self._packages, *sys.path])
        spec.submodule_search_locations = [folder for folder in folders if os.path.isdir(folder)]
        return spec

    def find_distributions(self, context: Any) -> Iterable[Any]:
        """Find its distributions: their entry points, unless only certain folders are asked."""
        from importlib.metadata import DistributionFinder, MetadataPathFinder

        if "path" in vars(context):
            return
        for each in MetadataPathFinder.find_distributions(DistributionFinder.Context(name=context.name, path=[self._packages])):
            if each.metadata["Name"].replace("_", "-").startswith(DISTRIBUTIONS):
                yield each


class _Rest:
    """A finder of the hook and of what it needs, after all others: what the interpreter has comes first."""

    def __init__(self, lent: dict[str, str], packages: str) -> None:
        self._folders = lent
        if packages:
            self._folders |= dict.fromkeys(BROUGHT, packages) | {"opentelemetry.instrumentation": os.path.join(packages, "opentelemetry")}

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Find the hook, and packages that the interpreter lacks."""
        from importlib.machinery import PathFinder

        return PathFinder.find_spec(name, [self._folders[name]]) if name in self._folders else None


def _version(name: str, folder: str = "") -> Version | None:
    """Return the version of an installed package; None where it is not installed."""
    from importlib.metadata import distributions

    for each in distributions(name=name, path=[folder]) if folder else distributions(name=name):
        return version_of(each.version)
    return None


def _is_shadowed(name: str) -> bool:
    """Return whether a module that would be imported lies elsewhere than the distribution of its name: beside the agent's program, say."""
    from importlib.metadata import distributions

    spec = _find(name)
    if spec is None or (spec.origin is None and spec.submodule_search_locations is not None):  # none, or a namespace: nothing would be run
        return False
    places = (os.path.abspath(str(each.locate_file(""))) for each in distributions(name=name))
    return not any(os.path.abspath(spec.origin or "").startswith(os.path.join(place, name)) for place in places)


def _is_ending() -> bool:
    """Return whether the interpreter is at its end, where no exit handler is registered and no thread is started any more."""
    import _thread

    threading: Any = sys.modules.get("threading")
    if threading is not None and not threading.main_thread().is_alive():
        return True
    try:
        _thread.start_new_thread(int, ())
    except RuntimeError:
        return True
    return False


def _find(name: str, path: Any = None, target: Any = None, *, without: object = None) -> ModuleSpec | None:
    """Return what the first of the finders finds, but for the one to do `without`; None where none does."""
    for finder in [*sys.meta_path]:
        find = getattr(finder, "find_spec", None) if finder is not without else None
        if find is not None and (spec := find(name, path, target)) is not None:
            return spec
    return None


def _stay_first(here: str) -> None:
    """Let the program that this process becomes run this folder's sitecustomize, which runs the one that has been put before it."""
    execute = os.execv

    def execute_with_ours_first(*args: Any) -> Any:
        os.environ["PYTHONPATH"] = os.pathsep.join([here, *(folder for folder in _python_path() if folder != here)])
        return execute(*args)

    os.execv = execute_with_ours_first


def _leave(here: str, auto: Sequence[str]) -> None:
    """Let the processes that this one starts know nothing of us, nor of OpenTelemetry's folder."""
    if others := [folder for folder in _python_path() if folder not in (here, *auto)]:
        os.environ["PYTHONPATH"] = os.pathsep.join(others)
    else:
        os.environ.pop("PYTHONPATH", None)


def _python_path() -> list[str]:
    return os.environ.get("PYTHONPATH", "").split(os.pathsep)
