"""The sums of docs/scale.md against hand-computed ones, and the page against the stored costs."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from bench import scale, scale_costs
from bench.scale import Costs, Load, OtlpLoad, claim_cost, plan, plan_otlp

COSTS = Costs(**{each.name: 0.0 for each in fields(Costs)})


def test_costs_are_fitted_to_runs_of_different_shapes() -> None:
    runs = [(count, spans, 1e-3 * count + 8e-5 * spans) for count, spans in ((180, 90_000), (1_000, 60_000), (3_400, 20_400))]
    assert scale_costs.fit_costs(runs) == pytest.approx((1e-3, 8e-5))


def test_a_plan_is_the_sum_of_its_costs() -> None:
    costs = replace(
        COSTS, claim_cpu=0.002, claim_batched_cpu=0.002, call_cpu=0.003, span_cpu=1e-5, span_bytes=100.0, token_bytes=2.0, start_cpu=0.1,
        agent_memory=5.0,
    )  # fmt: skip
    load = Load(1000, calls=10, model_seconds=8, tool_seconds=2, new_tokens=1000, spans_a_call=3)
    made = plan(costs, load)
    queue, collector, proxy, runners = made.services
    assert (made.attempts, made.calls, made.spans, made.tokens) == (10.0, 100.0, 340.0, 100_000.0)
    assert (queue.load, collector.load, proxy.load) == pytest.approx((0.02, 0.0034, 0.3))
    assert (proxy.processes, runners.load, runners.memory) == (1, pytest.approx(1.0), pytest.approx(5000.0))
    assert made.disk_a_day == pytest.approx((340 * 100 + 100_000 * 2) * 86_400)


def test_a_plain_otlp_load_pays_for_its_inserts_at_most_four_times_a_second() -> None:
    costs = replace(COSTS, request_cpu=0.001, span_cpu=1e-5)
    assert plan_otlp(costs, OtlpLoad(20, 20)).load == pytest.approx(0.001 + 20 * 1e-5 + scale.INSERT_CPU)
    assert plan_otlp(costs, OtlpLoad(2000, 20)).load == pytest.approx(0.1 + 0.02 + 4 * scale.INSERT_CPU)


def test_every_option_of_a_plan_is_explained(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["bench.scale", "plan", "--help"])
    with pytest.raises(SystemExit):
        scale.main()
    told = " ".join(capsys.readouterr().out.split())
    assert {*scale.OPTIONS} == {each.name for each in (*fields(Load), *fields(OtlpLoad))}
    for name, text in scale.OPTIONS.items():
        assert f"--{name.replace('_', '-')}" in told and text in told


def test_the_cost_of_a_batched_claim_matches_the_measured_batch_sizes() -> None:
    costs = replace(COSTS, claim_cpu=0.002, claim_batched_cpu=0.0002)
    assert claim_cost(costs, 1) == pytest.approx(0.002)
    assert claim_cost(costs, 100) == pytest.approx(0.0002)


def test_the_page_matches_the_stored_costs() -> None:
    page = scale.PAGE.read_text()
    assert scale.filled(page) == page, "run `python -m bench.scale page`"
