"""What stands up for each system of a load benchmark: its engines, and the process in front of them. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from kvshuttle.bench.grid_plan import GridSystem
from kvshuttle.bench.plan import SystemName
from kvshuttle.bench.proxy import ProxyMode
from kvshuttle.bench.systems import SYSTEMS, EngineKnobs, plan_engine
from kvshuttle.config import LauncherConfig, ModeChoice
from kvshuttle.launcher.plan import LOOPBACK, ProcessPlan, Role, plan_router

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvshuttle.bench.grid_plan import GridPlan
    from kvshuttle.bench.systems import Places, System

_LONGER_THAN_ANY_PROMPT = "1000000000"


class Front(StrEnum):
    """What clients talk to."""

    NONE = "none"
    """The only engine, or the first decode engine."""
    PROXY = "proxy"
    ROUTER = "router"


@dataclass(frozen=True, slots=True)
class Arrangement:
    """How a system is set up. ``connector``: of its engines, None for a plain engine. ``mode``: what the front does."""

    title: str
    connector: SystemName | None
    front: Front
    mode: str = ""

    @property
    def is_plain(self) -> bool:
        """One engine that does everything."""
        return self.connector is None

    @property
    def is_handing_off(self) -> bool:
        """Requests go through a prefill engine."""
        return self.mode in ("push", "pull", "auto")


def _upstream(name: SystemName) -> Arrangement:
    system = SYSTEMS[name]
    return Arrangement(system.title, name, Front.PROXY, str(system.mode))


def _shuttle(mode: ModeChoice) -> Arrangement:
    # One connector for all modes, so that engines stay when only the mode changes.
    return Arrangement(f"kvshuttle {mode}", SystemName.SHUTTLE_PUSH, Front.ROUTER, str(mode))


ARRANGEMENTS: dict[GridSystem, Arrangement] = {
    GridSystem.PLAIN: Arrangement("one plain engine", None, Front.NONE),
    GridSystem.UPSTREAM_PULL: _upstream(SystemName.UPSTREAM_PULL),
    GridSystem.UPSTREAM_PULL_QUIET: _upstream(SystemName.UPSTREAM_PULL_QUIET),
    GridSystem.UPSTREAM_PUSH: _upstream(SystemName.UPSTREAM_PUSH),
    GridSystem.UPSTREAM_PUSH_QUIET: _upstream(SystemName.UPSTREAM_PUSH_QUIET),
    GridSystem.UPSTREAM_PULL_PACED: _upstream(SystemName.UPSTREAM_PULL_PACED),
    GridSystem.UPSTREAM_PUSH_PACED: _upstream(SystemName.UPSTREAM_PUSH_PACED),
    GridSystem.SHUTTLE_PULL: _shuttle(ModeChoice.PULL),
    GridSystem.SHUTTLE_PUSH: _shuttle(ModeChoice.PUSH),
    GridSystem.SHUTTLE_AUTO: _shuttle(ModeChoice.AUTO),
    GridSystem.FRONT_NONE: Arrangement("decode engine alone, asked directly", SystemName.SHUTTLE_PUSH, Front.NONE),
    GridSystem.FRONT_PROXY: Arrangement(
        "decode engine alone, behind the proxy", SystemName.SHUTTLE_PUSH, Front.PROXY, ProxyMode.ALONE
    ),
    GridSystem.FRONT_ROUTER: Arrangement(
        "decode engine alone, behind our router", SystemName.SHUTTLE_PUSH, Front.ROUTER, "alone"
    ),
}


def plan_engines(
    connector: SystemName | None, plan: GridPlan, slots: int, places: Places, ports: Iterator[int], python: str
) -> tuple[ProcessPlan, ...]:
    """All engines: ``prefill-0`` …, ``decode-0`` …, or the one ``plain-0``. ``slots``: of those that decode."""
    prefill = EngineKnobs(
        plan.max_model_len,
        plan.chunk_tokens,
        plan.prefill_slots,
        plan.prefill_kv_gib,
        plan.is_quiet_wait,
        plan.has_prefill_prefix_cache,
    )
    decode = EngineKnobs(
        plan.max_model_len,
        plan.chunk_tokens,
        slots,
        plan.decode_kv_gib,
        plan.is_quiet_wait,
        plan.has_decode_prefix_cache,
    )
    plain = EngineKnobs(
        plan.max_model_len,
        plan.chunk_tokens,
        slots,
        plan.prefill_kv_gib,
        plan.is_quiet_wait,
        plan.has_prefill_prefix_cache,
    )
    wanted = [(Role.PREFILL, prefill)] * plan.num_prefill + [(Role.DECODE, decode)] * plan.num_decode
    system: System | None = None
    if connector is None:
        wanted = [(Role.PLAIN, plain)]
    else:
        system = SYSTEMS[connector]
    engines: list[ProcessPlan] = []
    for role, knobs in wanted:
        name = f"{role}-{sum(engine.role is role for engine in engines)}"
        engines.append(plan_engine(system, role, name, knobs, places, ports, python))
    return tuple(engines)


def plan_front(
    arrangement: Arrangement, engines: Sequence[ProcessPlan], plan: GridPlan, ports: Iterator[int], python: str
) -> ProcessPlan | None:
    """The process between clients and ``engines``; None where they ask an engine directly."""
    if arrangement.front is Front.NONE:
        return None
    port = next(ports)
    if arrangement.front is Front.ROUTER:
        return _plan_router(arrangement, tuple(engines), plan, port, python)
    spec = {
        "mode": arrangement.mode,
        "port": port,
        "first_byte_timeout_s": plan.first_token_timeout_s,
        **{
            str(role): [f"{engine.url},{engine.side_address}" for engine in engines if engine.role is role]
            for role in (Role.PREFILL, Role.DECODE)
        },
    }
    argv = (python, "-m", "kvshuttle", "bench-proxy", json.dumps(spec))
    return ProcessPlan("proxy", Role.ROUTER, argv, {}, LOOPBACK, port)


def _plan_router(
    arrangement: Arrangement, engines: tuple[ProcessPlan, ...], plan: GridPlan, port: int, python: str
) -> ProcessPlan:
    args = ("--first-byte-timeout-s", f"{plan.first_token_timeout_s:g}")
    if arrangement.is_handing_off:
        config = LauncherConfig(mode=ModeChoice(arrangement.mode), router_args=args)
    else:
        config = LauncherConfig(router_args=(*args, "--disaggregate-from-tokens", _LONGER_THAN_ANY_PROMPT))
    return plan_router(engines, config, port, python)
