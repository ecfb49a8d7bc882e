"""Chains of checks: one cause is one cross."""

from __future__ import annotations

from agl_otel.cli.findings import Check, Finding, advice, good, walk, wrong


def states(found: list[Finding]) -> list[str]:
    return [finding.state for finding in found]


def chain(*findings: Finding) -> list[Check[None]]:
    return [Check(name, lambda _, finding=finding: finding) for name, finding in zip("abc", findings, strict=False)]


def test_what_a_wrong_one_spoils_is_skipped_with_what_that_spoils() -> None:
    found = walk(chain(wrong("first", "no", "mend", spoils="b"), wrong("second", "none", "x", spoils="c"), wrong("third", "0", "y")), None)
    assert states(found) == ["wrong", "skipped", "skipped"]
    assert [(each.detail, each.remedy) for each in found[1:]] == [("none (first: first)", ""), ("0 (first: first)", "")]


def test_what_is_good_or_advice_all_the_same_stays() -> None:
    found = walk(chain(wrong("first", "no", "mend", spoils="bc"), good("second"), advice("third", "few", "more")), None)
    assert states(found) == ["wrong", "good", "advice"]


def test_independent_causes_are_crosses_each() -> None:
    assert states(walk(chain(wrong("first", "no", "mend", spoils="c"), wrong("second", "no", "mend"), good("third")), None)) == [
        "wrong",
        "wrong",
        "good",
    ]


def test_a_finding_of_before_spoils_too() -> None:
    assert states(walk(chain(wrong("first", "no", "mend"), good("second")), None, [wrong("env", "no", "mend", spoils="a")])) == [
        "skipped",
        "good",
    ]
    assert states(walk(chain(wrong("first", "no", "mend")), None, [advice("env", "no", "mend")])) == ["wrong"]
