"""What stands up for each system of a load benchmark."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvshuttle.bench.fleets import ARRANGEMENTS, Front, plan_engines, plan_front, wanted_engines
from kvshuttle.bench.grid_plan import GridPlan, GridSystem
from kvshuttle.bench.proxy import ProxyMode, proxy_from_json
from kvshuttle.bench.real_engines import TRACED_WORKER_CLASS, RealModel, plan_real_engines
from kvshuttle.bench.systems import Places
from kvshuttle.bench.turns_fleet import Host
from kvshuttle.cli import _build_parser, router_config_from
from kvshuttle.config import LauncherConfig, ModeChoice
from kvshuttle.errors import ConfigError
from kvshuttle.launcher.plan import Machine, plan_fleet
from support.grid_values import grid_plan

if TYPE_CHECKING:
    from kvshuttle.launcher.plan import ProcessPlan

PLACES = Places(Path("model"), Path("traces"))
SHUTTLE_MODES = (GridSystem.SHUTTLE_PULL, GridSystem.SHUTTLE_PUSH, GridSystem.SHUTTLE_AUTO)


def stand(name: GridSystem, plan: GridPlan | None = None) -> tuple[tuple[ProcessPlan, ...], ProcessPlan | None]:
    """Engines and front of a system."""
    ports = count(20_000)
    plan = plan or grid_plan(first_token_timeout_s=7)
    engines = plan_engines(ARRANGEMENTS[name].connector, plan, 8, PLACES, ports, "python")
    return engines, plan_front(ARRANGEMENTS[name], engines, plan, ports, "python")


def option(engine: ProcessPlan, name: str) -> str:
    return engine.argv[engine.argv.index(name) + 1]


def test_every_system_can_be_stood_up() -> None:
    assert set(ARRANGEMENTS) == set(GridSystem)
    assert len({arrangement.title for arrangement in ARRANGEMENTS.values()}) == len(GridSystem)
    for name in GridSystem:
        engines, front = stand(name)
        assert (front is None) == (ARRANGEMENTS[name].front is Front.NONE)
        assert len(engines) == (1 if name is GridSystem.PLAIN else 2)


def test_engines_have_the_slots_and_caches_of_their_role() -> None:
    plan = grid_plan(num_prefill=4, prefill_slots=3, prefill_kv_gib=2, decode_kv_gib=5)
    engines, _ = stand(GridSystem.UPSTREAM_PUSH, plan)
    assert [engine.name for engine in engines] == ["prefill-0", "prefill-1", "prefill-2", "prefill-3", "decode-0"]
    assert [option(engine, "--max-num-seqs") for engine in engines] == ["3"] * 4 + ["8"]
    assert [engine.env["VLLM_CPU_KVCACHE_SPACE"] for engine in engines] == ["2"] * 4 + ["5"]
    assert ["--no-enable-prefix-caching" in engine.argv for engine in engines] == [False] * 4 + [True]
    assert len({engine.port for engine in engines} | {engine.side_address for engine in engines}) == 10


def test_a_plain_engine_has_no_connector_and_is_asked_directly() -> None:
    (engine,), front = stand(GridSystem.PLAIN)
    assert (engine.name, front) == ("plain-0", None)
    assert "--kv-transfer-config" not in engine.argv


def test_all_our_modes_need_the_same_engines_and_tell_the_router() -> None:
    assert len({ARRANGEMENTS[name].connector for name in SHUTTLE_MODES}) == 1
    for name in SHUTTLE_MODES:
        engines, front = stand(name)
        config = router_config_from(_build_parser().parse_args(front.argv[3:]))
        assert config.mode is ModeChoice(name.removeprefix("shuttle-"))
        assert config.first_byte_timeout_s == 7
        assert [engine.side_address for engine in config.engines] == [engine.side_address for engine in engines]


@pytest.mark.parametrize("name", [GridSystem.UPSTREAM_PULL, GridSystem.UPSTREAM_PUSH_QUIET, GridSystem.FRONT_PROXY])
def test_vllms_connectors_stand_behind_a_proxy_that_knows_their_engines(name: GridSystem) -> None:
    engines, front = stand(name)
    assert front.argv[3] == "bench-proxy"
    mode, config = proxy_from_json(front.argv[4])
    assert mode == {"upstream-pull": "pull", "upstream-push-quiet": "push", "front-proxy": "alone"}[name]
    assert (config.port, config.host, config.first_byte_timeout_s) == (front.port, front.host, 7)
    assert [engine.name for engine in config.engines] == [engine.name for engine in engines]


def test_only_quiet_systems_switch_the_progress_thread_off() -> None:
    for name in GridSystem:
        engines, _ = stand(name)
        extra = [json.loads(option(engine, "--additional-config"))["kvshuttle_emulate"] for engine in engines]
        assert all(("nixl_progress_thread" in each) == name.endswith("-quiet") for each in extra)
        assert all(("nixl_progress_pause_us" in each) == name.endswith("-paced") for each in extra)


def test_a_router_that_is_measured_alone_leaves_prefill_engines_out() -> None:
    _, front = stand(GridSystem.FRONT_ROUTER)
    config = router_config_from(_build_parser().parse_args(front.argv[3:]))
    assert config.disaggregate_from_tokens > 1_000_000
    assert not ARRANGEMENTS[GridSystem.FRONT_ROUTER].is_handing_off


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"mode": "fax", "port": 1}'])
def test_a_proxy_refuses_what_is_no_order_for_it(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^bench-proxy: an object with mode"):
        proxy_from_json(text)


def test_a_proxy_has_the_modes_that_connectors_have() -> None:
    upstream = [name for name in GridSystem if name.startswith("upstream")]
    assert {ARRANGEMENTS[name].mode for name in upstream} == {ProxyMode.PULL, ProxyMode.PUSH}


def test_engines_that_compute_are_started_like_up_does_and_time_themselves() -> None:
    plan = grid_plan(prefill_slots=3, prefill_kv_gib=3, chunk_tokens=512)
    model = RealModel("m", Path("somewhere"), "auto")
    host = Host(Machine((0, 1)), count(20_000), "python")
    wanted = wanted_engines(ARRANGEMENTS[GridSystem.SHUTTLE_PUSH_REAL].connector, plan, 8)
    prefill, decode = plan_real_engines(model, wanted, PLACES, host)
    assert (prefill.name, decode.name) == ("prefill-0", "decode-0")
    assert (prefill.cores, decode.cores) == ((0,), (1,))
    assert (option(prefill, "--max-num-seqs"), option(decode, "--max-num-seqs")) == ("3", "8")
    assert prefill.env["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert option(decode, "--worker-cls") == TRACED_WORKER_CLASS
    assert str(PLACES.trace_dir_of("decode-0")) in option(decode, "--additional-config")
    assert ["--no-enable-prefix-caching" in engine.argv for engine in (prefill, decode)] == [False, True]
    up = plan_fleet(LauncherConfig(model="m"), Path("somewhere"), host.machine, count(30_000), "python").engines[0]
    ports = {str(port) for port in (up.port, prefill.port)} | {up.side_address, prefill.side_address}
    missing = [word for word in up.argv if word not in prefill.argv and word not in ports]
    assert missing == [option(up, "--kv-transfer-config")]
    assert set(up.env) <= set(prefill.env)


def test_engines_on_a_gpu_are_not_timed_from_inside() -> None:
    host = Host(Machine((0, 1), gpus=("0",), is_vllm_cpu_build=False), count(20_000), "python")
    wanted = wanted_engines(ARRANGEMENTS[GridSystem.SHUTTLE_PUSH_REAL].connector, grid_plan(), 8)
    engines = plan_real_engines(RealModel("m", Path("somewhere"), "auto"), wanted, PLACES, host)
    assert all("--worker-cls" not in engine.argv for engine in engines)
    assert all("VLLM_CPU_KVCACHE_SPACE" not in engine.env for engine in engines)
