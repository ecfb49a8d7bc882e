"""The parts of `doctor` that tell of the stack."""

from __future__ import annotations

from agl_otel.cli.doctor import core_is_compiled, tables_are_whole


def test_damaged_tables_are_named() -> None:
    assert tables_are_whole([{"store_problems": []}, {"error": "HTTP 401"}]).state == "good"
    finding = tables_are_whole([{"store_problems": ["part a is damaged"]}, {"store_problems": ["part a is damaged", "part b is damaged"]}])
    assert finding.state == "wrong" and finding.reasons == ["part a is damaged", "part b is damaged"] and "make room" in finding.remedy


def test_advice_tells_how_to_get_the_compiled_core() -> None:
    assert core_is_compiled([{"core": "compiled"}, {"error": "an OpenTelemetry Collector"}], here=False).remedy == ""
    advice = core_is_compiled([{"core": "compiled"}, {"core": "python"}], here=False)
    assert advice.state == "advice" and advice.detail == "not in 1 of 2" and "make core" in advice.remedy
    newer = core_is_compiled([{"core": "python"}], here=True)
    assert newer.state == "advice" and "start the stack again" in newer.remedy and "make core" not in newer.remedy
    chosen = core_is_compiled([{"core": "compiled"}, {"core": "python", "core_installed": True}], here=True)
    assert chosen.state == "advice" and "unset AGL_CORE" in chosen.remedy and "make core" not in chosen.remedy
