"""A fork of the warm parent becomes the agent: what the interpreter and opentelemetry-instrument do at a start, and nothing shared.

Order matters: the environment first, then the hook (which builds SDK and exporters from it), then the user's program as `__main__`.
The end is the interpreter's: threads are joined, exit handlers run, the status is that of `python agent.py`.
"""

from __future__ import annotations

import atexit
import ctypes
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
from typing import Any, Final, NoReturn

from agl_otel.runner.zygote import learned, protocol, warming
from agl_otel.runner.zygote.program import Program
from agl_otel_hook import records

_PR_SET_PDEATHSIG: Final = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int) -> None:
    """Have the kernel send SIGTERM when the process that forked this one is gone."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def take_over(stdout: int, stderr: int) -> None:
    """A session of its own, these streams, no input, the signals' defaults."""
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (stdout, 1), (stderr, 2)):
        os.dup2(source, target)
        os.close(source)


def reseed() -> None:
    """Randomness of its own: generators whose state a fork copies. (`random` does it itself; uuid4 and secrets ask the kernel.)"""
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(int.from_bytes(os.urandom(4), "little"))
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(int.from_bytes(os.urandom(8), "little") >> 1)


def run(program: Program, environment: dict[str, str], cwd: str, learn: int | None) -> NoReturn:
    """Run the program to its end, in this process. `learn` is a memory file for what it loaded and built (learned.py)."""
    status = 1
    learner = None if learn is None else learned.Learner()
    try:
        _place(program, environment, cwd)
        reseed()
        learned.hand_out_contexts(learner)
        warming.instrument_child()
        status = _execute(program)
    except BaseException as error:  # noqa: BLE001 - the process's last frame: nothing may come back into the warm parent's loop
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
    paths = [warming.AUTO_FOLDER, *(paths if cwd in paths else [cwd, *paths])]  # as opentelemetry-instrument sets it
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
            runpy._run_module_as_main(program.target)  # pyright: ignore[reportAttributeAccessIssue]  # what `python -m` itself calls
        elif program.kind == "code":
            exec(compile(program.target, "<string>", "exec", dont_inherit=True), main.__dict__)
        else:
            loader = SourceFileLoader("__main__", program.target)
            try:
                source = loader.get_data(program.target)
            except OSError as error:
                print(f"{sys.executable}: can't open file {program.target!r}: {error}", file=sys.stderr)  # noqa: T201 - as the interpreter
                return 2
            main.__dict__.update(__file__=program.target, __loader__=loader, __cached__=None)
            exec(compile(source, program.target, "exec", dont_inherit=True), main.__dict__)
    except BaseException as error:  # noqa: BLE001 - what a program raises is how it ends
        return _status_of(error)
    return 0


def _status_of(error: BaseException) -> int:
    """The exit status that the interpreter gives for what a program raised, and what it prints about it."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)  # noqa: T201 - as the interpreter does
        return 1
    traceback = _users(error)
    sys.excepthook(type(error), error.with_traceback(traceback), traceback)
    return 1


def _users(error: BaseException) -> types.TracebackType | None:
    """The traceback without our frames, and those of runpy, at its top."""
    traceback: Any = error.__traceback__
    ours = {__file__, runpy.__file__, "<frozen runpy>"}
    while traceback is not None and traceback.tb_frame.f_code.co_filename in ours:
        traceback = traceback.tb_next
    return traceback


def _end(status: int, learn: int | None, learner: learned.Learner | None) -> NoReturn:
    try:
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]  # what the interpreter's end calls: join threads
        if learn is not None and learner is not None:
            protocol.write_memory_file(learn, learner.result())
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]  # what the interpreter's end calls
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except BaseException as error:  # noqa: BLE001 - the process's last frame
        sys.excepthook(type(error), error, error.__traceback__)
        status = status or 120
    os._exit(status)  # the hook's: it seals what an exit handler has still ended
