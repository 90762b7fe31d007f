"""When engines are killed: by a seed, at sane times, and never all that the end of the run is to show."""

from __future__ import annotations

import itertools

import pytest

from kvshuttle.bench.churn_faults import ROUTER, SHORTEST_STOP_S, Fault, FaultKind, plan_faults
from kvshuttle.bench.churn_plan import ChurnPlan
from kvshuttle.errors import ConfigError


def test_the_same_seed_gives_the_same_faults_and_another_one_others() -> None:
    assert plan_faults(ChurnPlan(seed=3)) == plan_faults(ChurnPlan(seed=3))
    assert plan_faults(ChurnPlan(seed=3)) != plan_faults(ChurnPlan(seed=4))


@pytest.mark.parametrize("seed", range(20))
def test_faults_are_in_order_and_leave_the_end_of_the_run_alone(seed: int) -> None:
    plan = ChurnPlan(seed=seed)
    instants_s = [fault.at_s for fault in plan_faults(plan)]
    assert instants_s == sorted(instants_s)
    assert instants_s[0] > 0
    assert instants_s[-1] < 0.9 * plan.duration_s
    assert len(instants_s) > plan.duration_s / plan.fault_every_s / 2


@pytest.mark.parametrize("seed", range(20))
def test_half_an_hour_has_every_kind_of_fault_for_both_roles(seed: int) -> None:
    faults = plan_faults(ChurnPlan(seed=seed))
    assert {fault.kind for fault in faults} == set(FaultKind)
    kills = [fault for fault in faults if fault.kind is FaultKind.KILL]
    assert {name.partition("-")[0] for fault in kills for name in fault.order[:1]} == {"prefill", "decode"}
    assert any(fault.num_victims == 2 for fault in kills)
    gaps_s = [later.at_s - earlier.at_s for earlier, later in itertools.pairwise(kills)]
    assert any(gap_s < 15 for gap_s in gaps_s), "another one is killed while the first is started again"


@pytest.mark.parametrize("seed", range(20))
def test_stops_are_as_long_as_asked_for(seed: int) -> None:
    plan = ChurnPlan(seed=seed, longest_stop_s=4)
    stops = [fault.for_s for fault in plan_faults(plan) if fault.kind is FaultKind.STOP]
    assert all(SHORTEST_STOP_S <= for_s <= 4 for for_s in stops)


@pytest.mark.parametrize("seed", range(20))
def test_in_the_second_half_one_engine_of_each_role_lives_through_the_deaths_of_the_others(seed: int) -> None:
    plan = ChurnPlan(seed=seed)
    late = [fault for fault in plan_faults(plan) if fault.at_s > plan.duration_s / 2 and fault.kind is FaultKind.KILL]
    assert late
    assert not {name for fault in late for name in fault.order} & {"prefill-0", "decode-0"}


def test_the_router_is_restarted_twice_and_nobody_else_with_it() -> None:
    restarts = [fault for fault in plan_faults(ChurnPlan()) if fault.kind is FaultKind.RESTART]
    assert [fault.order for fault in restarts] == [(ROUTER,), (ROUTER,)]


def test_a_fault_befalls_those_that_run() -> None:
    fault = Fault(1.0, FaultKind.KILL, ("decode-1", "prefill-0", "decode-0"), 2, 1.0)
    assert fault.victims(["prefill-0", "decode-0", "decode-1"]) == ("decode-1", "prefill-0")
    assert fault.victims(["decode-0"]) == ("decode-0",)
    assert fault.victims([]) == ()


@pytest.mark.parametrize(
    ("knobs", "option"),
    [
        ({"minutes": 0.5}, "--minutes"),
        ({"minutes": float("inf")}, "--minutes: a finite number"),
        ({"leaving": 1.5}, "--leaving"),
        ({"fault_every_s": 3}, "--fault-every-s"),
        ({"longest_stop_s": 1}, "--longest-stop-s"),
        ({"lease_s": 3}, "--lease-s"),
        ({"decode_blocks": 3}, "--decode-blocks"),
        ({"num_decode": 0}, "--num-decode"),
        ({"overload": float("nan")}, "--overload"),
    ],
)
def test_a_bad_knob_is_named_with_what_to_write(knobs: dict[str, float], option: str) -> None:
    with pytest.raises(ConfigError, match=option):
        ChurnPlan.from_mapping(knobs)


def test_a_knob_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match="minuets"):
        ChurnPlan.from_mapping({"minuets": 3})
