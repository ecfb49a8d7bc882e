"""Turn a fork of the warm parent into the agent: repeat what the interpreter and opentelemetry-instrument do at startup.

Order matters: first the environment, then the hook (which builds SDK and exporters from it), then the user's program as `__main__`.
The fork ends like an interpreter: threads are joined, exit handlers run, and the exit status is that of `python agent.py`.
"""

from __future__ import annotations

import atexit
import io
import os
import random
import runpy
import signal
import sys
import threading
import types
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, NoReturn

from agl_otel.runner.zygote import learned, protocol, warming
from agl_otel.runner.zygote.program import Program
from agl_otel.service.forked import start_session
from agl_otel_hook import records


def take_over(stdout: int, stderr: int) -> None:
    """Start a new session with the given output streams, no input and default signal handlers."""
    start_session(stdout, stderr)
    os.close(stdout)
    os.close(stderr)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def reseed() -> None:
    """Reseed the generators whose state the fork has copied. (uuid4 and secrets use the kernel's generator.)"""
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(int.from_bytes(os.urandom(4), "little"))
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(int.from_bytes(os.urandom(8), "little") >> 1)


def run(program: Program, environment: dict[str, str], cwd: str, learn: int | None) -> NoReturn:
    """Run the program in this process and exit. `learn` is the descriptor of a memory file for the Learner's result (learned.py)."""
    status = 1
    learner = None if learn is None else learned.Learner()
    try:
        _place(program, environment, cwd)
        reseed()
        learned.use_prepared_contexts(learner)
        warming.instrument_child()
        status = _execute(program)
    except BaseException as error:  # noqa: BLE001 - outermost frame of the fork: it must not return into the warm parent's loop
        status = _status_of(error)
    _end(status, learn, learner)


def _place(program: Program, environment: dict[str, str], cwd: str) -> None:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    if program.unbuffered and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(write_through=True)
    folder = str(Path(program.target).resolve().parent) if program.kind == "script" else (cwd if program.kind == "module" else "")
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path and path != warming.AUTO_FOLDER]
    hook = [path for path in paths[:1] if Path(path).parts[-2:] == ("agl_otel_hook", "inject")]  # injection.py; stays in front
    behind = paths[len(hook) :]
    paths = [*hook, warming.AUTO_FOLDER, *(behind if cwd in behind else [cwd, *behind])]  # like opentelemetry-instrument
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    sys.path[:] = [folder, *paths, *(path for path in sys.path if path and path not in paths)]
    names: dict[str, str] = {"code": "-c", "script": program.target, "module": "-m"}
    sys.argv[:] = [names[program.kind], *program.arguments]
    records.set_command(" ".join([sys.executable, *program.command]))


def _execute(program: Program) -> int:
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = main
    try:
        if program.kind == "module":
            runpy._run_module_as_main(program.target)  # pyright: ignore[reportAttributeAccessIssue]  # private; called by `python -m`
        elif program.kind == "code":
            exec(compile(program.target, "<string>", "exec", dont_inherit=True), main.__dict__)
        else:
            loader = SourceFileLoader("__main__", program.target)
            try:
                source = loader.get_data(program.target)
            except OSError as error:
                print(f"{sys.executable}: can't open file {program.target!r}: {error}", file=sys.stderr)  # noqa: T201 - like the interpreter
                return 2
            main.__dict__.update(__file__=program.target, __loader__=loader, __cached__=None)
            exec(compile(source, program.target, "exec", dont_inherit=True), main.__dict__)
    except BaseException as error:  # noqa: BLE001 - any exception of the program determines its exit status
        return _status_of(error)
    return 0


def _status_of(error: BaseException) -> int:
    """Return the interpreter's exit status for an uncaught exception, and print what the interpreter prints."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)  # noqa: T201 - like the interpreter
        return 1
    traceback = _user_traceback(error)
    sys.excepthook(type(error), error.with_traceback(traceback), traceback)
    return 1


def _user_traceback(error: BaseException) -> types.TracebackType | None:
    """Return the traceback without the leading frames of this module and of runpy."""
    traceback: Any = error.__traceback__
    ours = {__file__, runpy.__file__, "<frozen runpy>"}
    while traceback is not None and traceback.tb_frame.f_code.co_filename in ours:
        traceback = traceback.tb_next
    return traceback


def _end(status: int, learn: int | None, learner: learned.Learner | None) -> NoReturn:
    try:
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]  # private; joins threads when the interpreter exits
        if learn is not None and learner is not None:
            protocol.write_memory_file(learn, learner.result())
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]  # called when the interpreter exits
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except BaseException as error:  # noqa: BLE001 - outermost frame of the fork
        sys.excepthook(type(error), error, error.__traceback__)
        status = status or 120
    os._exit(status)  # patched by the hook, which seals spans that exit handlers have ended
