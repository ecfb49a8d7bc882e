"""The sums and the simulation of docs/scale.md: by hand where they are simple, against what was measured where they are not."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import fields, replace

import pytest

from bench import scale, scale_costs
from bench.scale_model import Costs, Hand, Load, Machine, Mark, Place, Step, Use, Wait, claim_cost, plan, simulate

COSTS = Costs(**{each.name: 0.0 for each in fields(Costs)})


def circle(*steps: Step) -> object:
    def once(_: random.Random) -> Iterator[Step]:
        yield Mark("rounds")
        yield from steps
        yield Mark("rounds")

    return once


def rate(steps: list[Step], clients: int, places: dict[str, Place]) -> float:
    return simulate(places, [(circle(*steps), 0.0)] * clients, 100.0).rates["rounds"]  # pyright: ignore[reportArgumentType]


def test_one_worker_serves_one_after_the_other() -> None:
    steps: list[Step] = [Use("s", 0.1), Wait(0.9)]
    assert rate(steps, 1, {"s": Place(Machine(4), 1)}) == pytest.approx(1.0, rel=0.02)
    assert rate(steps, 5, {"s": Place(Machine(4), 1)}) == pytest.approx(5.0, rel=0.02)
    assert rate(steps, 40, {"s": Place(Machine(4), 1)}) == pytest.approx(10.0, rel=0.02)  # it is busy all the time
    assert rate(steps, 40, {"s": Place(Machine(4), 2)}) == pytest.approx(20.0, rel=0.02)


def test_what_is_handed_over_is_not_waited_for() -> None:
    machine = Machine(2)
    places = {"loop": Place(machine, 1), "inserts": Place(machine, 1)}
    found = simulate(places, [(circle(Use("loop", 0.0001), Hand("inserts", 0.0009), Wait(0.01)), 0.0)] * 10, 20.0)  # pyright: ignore[reportArgumentType]
    assert found.rates["rounds"] == pytest.approx(1000 * 0.01 / 0.0101, rel=0.05)
    assert found.busy["inserts"] == pytest.approx(0.9 * 0.01 / 0.0101, rel=0.05)


def test_costs_are_found_in_runs_of_different_shapes() -> None:
    runs = [(asked, spans, 1e-3 * asked + 8e-5 * spans) for asked, spans in ((180, 90_000), (1_000, 60_000), (3_400, 20_400))]
    assert scale_costs.fitted(runs) == pytest.approx((1e-3, 8e-5))


def test_services_share_the_cores_of_their_machine() -> None:
    machine = Machine(1)
    both = {"a": Place(machine, 1), "b": Place(machine, 1)}
    assert rate([Use("a", 0.1), Use("b", 0.1)], 8, both) == pytest.approx(5.0, rel=0.02)
    apart = {"a": Place(Machine(1), 1), "b": Place(Machine(1), 1)}
    assert rate([Use("a", 0.1), Use("b", 0.1)], 8, apart) == pytest.approx(10.0, rel=0.02)


def test_what_waits_is_counted_and_what_is_used_is_summed() -> None:
    places = {"s": Place(Machine(1), 1)}
    found = simulate(places, [(circle(Use("s", 0.5)), 0.0)] * 2, 100.0)  # pyright: ignore[reportArgumentType]
    assert found.wait("rounds", 0.5) == pytest.approx(1.0)  # half a second of its own, half of the other's
    assert found.busy["s"] == pytest.approx(1.0, rel=0.02)


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


def test_a_claim_of_many_costs_what_was_measured_of_one_and_of_a_hundred() -> None:
    costs = replace(COSTS, claim_cpu=0.002, claim_batched_cpu=0.0002)
    assert claim_cost(costs, 1) == pytest.approx(0.002)
    assert claim_cost(costs, 100) == pytest.approx(0.0002)


def test_the_simulation_says_what_was_measured() -> None:
    costs, points, conditions = scale.stored()
    assert len(points) >= 4
    off = {point["unit"]: said / point["measured"] - 1 for point, said in scale.check_points(costs, points, conditions["cores"])}
    assert min(off.values()) >= scale.AGREES[0] and max(off.values()) <= scale.AGREES[1], off


def test_the_page_holds_what_the_stored_figures_say() -> None:
    """Its last column, of 100,000 rollouts, is left out: to simulate it takes half a minute."""
    page = scale.PAGE.read_text()
    for name, table in scale.tables(scale.SIZES[:2]).items():
        written = page.partition(f"<!-- {name} -->")[2].partition("<!-- end -->")[0].strip().splitlines()
        columns = table.splitlines()[0].count("|")
        shown = ["|".join(line.split("|")[:columns]) + "|" for line in written]
        assert shown == table.splitlines(), "run `python -m bench.scale page`"


def test_a_stack_that_was_planned_carries_its_load() -> None:
    costs, _, _ = scale.stored()
    planned = plan(costs, Load(1000))
    found = scale.try_plan(costs, planned)
    done = found.rates["rollouts"] + found.rates["retries"]
    assert done == pytest.approx(planned.attempts, rel=0.15)
    assert found.wait("claims", 0.99) < 1.0
