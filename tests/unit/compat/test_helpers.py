"""`lightning_cli` and `setup_logging`, as programs of 0.3 call them."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from agl_otel import lightning_cli, setup_logging, setup_module_logging

OURS = "agl_otel"


class MyAgent:
    def __init__(self, prompt: str, tries: int = 2, names: list[str] | None = None, limit: float | None = 1.5, loud: bool = False) -> None:
        self.given = (prompt, tries, names, limit, loud)


class Run:
    def __init__(self, *, n_runners: int = 1) -> None:
        self.n_runners = n_runners


def test_every_parameter_is_an_option() -> None:
    line = "--my-agent.prompt hi --my-agent.tries 5 --my-agent.names a b --my-agent.limit nil --my-agent.loud yes --run.n-runners 4"
    agent, run = lightning_cli(MyAgent, Run, arguments=line.split())
    assert agent.given == ("hi", 5, ["a", "b"], None, True) and run.n_runners == 4
    assert lightning_cli(MyAgent, arguments=["--my-agent.prompt", "hi"]).given == ("hi", 2, None, 1.5, False)
    assert lightning_cli(MyAgent, arguments=["--my-agent.prompt", "x", "--my-agent.limit", "None"]).given[3] is None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "--my-agent.prompt"),
        ("--my-agent.prompt x --my-agent.tries many", "many"),
        ("--my-agent.prompt x --my-agent.loud perhaps", "perhaps"),
        ("--my-agent.prompt x --my-agent.colour red", "colour"),
    ],
)
def test_an_invalid_command_line_exits_with_a_message(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        lightning_cli(MyAgent, arguments=line.split())
    assert ended.value.code == 2 and words in capsys.readouterr().err


@pytest.fixture
def restored() -> Iterator[None]:
    """Restore the loggers after the test."""
    loggers = [logging.getLogger(name) for name in (OURS, f"{OURS}.part", "user.program")]
    before = [(logger, logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield
    logging.captureWarnings(False)
    for logger, handlers, level, propagate in before:
        for handler in [handler for handler in logger.handlers if handler not in handlers]:
            logger.removeHandler(handler)
            handler.close()
        logger.setLevel(level)
        logger.propagate = propagate


@pytest.mark.usefixtures("restored")
def test_records_go_to_the_terminal_files_and_further_handlers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = logging.FileHandler(tmp_path / "more.log")
    setup_logging(
        "WARNING", apply_to=["user.program"], submodule_levels={f"{OURS}.part": "DEBUG"}, files=tmp_path / "logs" / "all.log",
        extra_handlers=[more], color=False,
    )  # fmt: skip
    logging.getLogger(OURS).info("too quiet")
    logging.getLogger(f"{OURS}.part").debug("of the part")
    logging.getLogger("user.program").error("of the user")
    for text in (capsys.readouterr().err, (tmp_path / "logs" / "all.log").read_text(), (tmp_path / "more.log").read_text()):
        assert "too quiet" not in text
        assert text.count("of the part") == text.count("of the user") == 1


@pytest.mark.usefixtures("restored")
def test_a_second_call_replaces_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("INFO", formatter=logging.Formatter("first %(message)s"))
    setup_logging("INFO", formatter=logging.Formatter("second %(message)s"))
    logging.getLogger(OURS).info("once")
    assert capsys.readouterr().err.splitlines() == ["second once"]
    setup_logging("INFO", console=False)
    logging.getLogger(OURS).info("nowhere")
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("restored")
def test_color_is_used_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    setup_module_logging("INFO", name="user.program", color=True).info("bright")
    assert "\x1b[32m" in capsys.readouterr().err
    setup_module_logging("INFO", name="user.program").info("plain")  # stderr is not a terminal here
    assert "\x1b[" not in capsys.readouterr().err


@pytest.mark.usefixtures("restored")
def test_warnings_go_to_the_log_and_files_by_logger(tmp_path: Path) -> None:
    setup_logging(console=False, capture_warnings=True, files={"py.warnings": tmp_path / "warnings.log"})
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("mind the step", stacklevel=1)
    assert "mind the step" in (tmp_path / "warnings.log").read_text()
    for handler in logging.getLogger("py.warnings").handlers[:]:
        logging.getLogger("py.warnings").removeHandler(handler)
        handler.close()


@pytest.mark.usefixtures("restored")
def test_the_deprecated_name_works_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match="setup_logging"):
        assert import_module("agl_otel.logging").configure_logger(logging.DEBUG).level == logging.DEBUG


async def test_a_metrics_backend_of_0_3_counts_nothing_and_names_the_metrics(caplog: pytest.LogCaptureFixture) -> None:
    metrics = import_module("agl_otel.utils.metrics")
    console = metrics.ConsoleMetricsBackend(window_seconds=60.0)
    both = metrics.MultiMetricsBackend([console, metrics.PrometheusMetricsBackend()])
    both.register_counter("calls", ["model"])
    await both.inc_counter("calls", labels={"model": "m"})
    assert not both.has_prometheus() and "ConsoleMetricsBackend counts nothing" in caplog.text and "/metrics" in caplog.text
