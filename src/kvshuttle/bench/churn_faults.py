"""When which engines are killed or stopped, and the router restarted: a schedule from a seed. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from kvshuttle.bench.churn_plan import SHORTEST_FAULT_PAUSE_S

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvshuttle.bench.churn_plan import ChurnPlan

ROUTER = "router"
SHORTEST_STOP_S = 2.0
_FIRST_FAULT_S = 8.0
_QUIET_END = 0.1
"""Part of the time at whose end there are no faults, so that clients see everything come back under load."""
_RESTART_PAUSE_S = (1.0, 8.0)
_INTO_STARTUP_S = (0.5, 6.0)
"""After the start of an engine, when another one, or the same, is killed."""
_ROUTER_RESTARTS_AT = (0.35, 0.75)


class FaultKind(StrEnum):
    """What is done."""

    KILL = "kill"
    """SIGKILL to all processes of an engine; it is started again after a pause."""
    STOP = "stop"
    """SIGSTOP to all processes of an engine, and SIGCONT later."""
    RESTART = "restart"
    """SIGTERM to the router, and another one at once."""


@dataclass(frozen=True, slots=True)
class Fault:
    """``order``: whom it may befall; it befalls the first that run. ``for_s``: until SIGCONT, or the next start."""

    at_s: float
    kind: FaultKind
    order: tuple[str, ...]
    num_victims: int
    for_s: float

    def victims(self, running: Collection[str]) -> tuple[str, ...]:
        """Of those that run now."""
        return tuple(name for name in self.order if name in running)[: self.num_victims]


def plan_faults(plan: ChurnPlan) -> list[Fault]:
    """All faults of a run, in order. The same plan gives the same ones.

    In the second half the first engine of each role is stopped but not killed: it lives through the deaths of all
    others, which is where leaks would show.
    """
    rng = random.Random(f"faults {plan.seed}")
    end_s = plan.duration_s * (1 - _QUIET_END)
    faults: list[Fault] = []
    at_s = _FIRST_FAULT_S
    while at_s < end_s:
        faults += _one(plan, rng, at_s)
        at_s += max(SHORTEST_FAULT_PAUSE_S, rng.uniform(0.5, 1.5) * plan.fault_every_s)
    restarts = [plan.duration_s * part for part in _ROUTER_RESTARTS_AT]
    faults += [Fault(each, FaultKind.RESTART, (ROUTER,), 1, 0.0) for each in restarts]
    return sorted((fault for fault in faults if fault.at_s < end_s), key=lambda fault: fault.at_s)


def spared(plan: ChurnPlan, at_s: float) -> set[str]:
    """Engines that nobody kills at that time."""
    return {"prefill-0", "decode-0"} if at_s > plan.duration_s / 2 else set()


def _one(plan: ChurnPlan, rng: random.Random, at_s: float) -> list[Fault]:
    """One stroke of bad luck: a fault, or two close together."""
    luck = rng.random()
    if luck < 0.3:
        for_s = rng.uniform(SHORTEST_STOP_S, plan.longest_stop_s)
        return [Fault(at_s, FaultKind.STOP, _shuffled(rng, plan.engine_names), 1, for_s)]
    first = _kill(plan, rng, at_s, num_victims=2 if luck > 0.85 else 1)
    if luck < 0.65:
        return [first]
    if first.num_victims > 1:
        return [first]
    return [first, _kill(plan, rng, at_s + first.for_s + rng.uniform(*_INTO_STARTUP_S), num_victims=1)]


def _kill(plan: ChurnPlan, rng: random.Random, at_s: float, *, num_victims: int) -> Fault:
    names = [name for name in plan.engine_names if name not in spared(plan, at_s)]
    return Fault(at_s, FaultKind.KILL, _shuffled(rng, names), num_victims, rng.uniform(*_RESTART_PAUSE_S))


def _shuffled(rng: random.Random, names: Collection[str]) -> tuple[str, ...]:
    return tuple(rng.sample(sorted(names), len(names)))
