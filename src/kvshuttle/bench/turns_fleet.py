"""What conversations are held with: a real or an emulated model, a pair of engines, and what stands in front."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvshuttle.bench.fleets import plan_proxy
from kvshuttle.bench.plan import BLOCK_SIZE_TOKENS, PAIR_SLOTS
from kvshuttle.bench.plan_file import option_of
from kvshuttle.bench.proxy import ProxyMode
from kvshuttle.bench.systems import EMULATION_ENV, MODEL_NAME, Progress, emulation_args
from kvshuttle.bench.texts import emulated_words, prose
from kvshuttle.bench.turns_plan import PrefillCache, TurnsSystem
from kvshuttle.config import Device, LauncherConfig, ModeChoice
from kvshuttle.emulate.model_dir import write_model_dir
from kvshuttle.errors import ConfigError
from kvshuttle.launcher.model_config import context_tokens_in, kv_bytes_per_token_in, read_model_config
from kvshuttle.launcher.plan import EngineSettings, FleetPlan, Machine, Role, plan_engines, plan_router, served_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvshuttle.bench.texts import Writer
    from kvshuttle.bench.turns_plan import EngineSetting, TurnsCell, TurnsPlan
    from kvshuttle.emulate.profile import Profile
    from kvshuttle.launcher.plan import ProcessPlan

_FIRST_BYTE_TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class Subject:
    """A model. ``args`` and ``env``: what its engines are started with besides; ``write``: what it is told."""

    name: str
    model: Path | str
    dtype: str
    write: Writer
    profile: Profile | None = None
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


def real_subject(plan: TurnsPlan, model: Path | str, machine: Machine) -> Subject:
    """A model found at ``model``. Raises ``ConfigError`` when the plan takes longer conversations, or more memory."""
    if isinstance(model, Path):
        config = read_model_config(model)
        longest = context_tokens_in(config)
        if 0 < longest < plan.max_model_len:
            raise ConfigError(
                f"--turns: conversations may come to {plan.max_model_len} tokens, and {plan.model} takes {longest};"
                " fewer turns, or a smaller --first-tokens, --turn-tokens or --output-tokens"
            )
        if not machine.computes_on_gpu(Device.AUTO):
            check_pools(plan, kv_bytes_per_token_in(config, plan.dtype), machine)
    return Subject(served_name(LauncherConfig(model=plan.model)), model, plan.dtype, prose)


def check_pools(plan: TurnsPlan, bytes_per_token: int, machine: Machine) -> None:
    """Raises ``ConfigError`` for KV memory that the machine does not have."""
    for name in ("prefill_pool_tokens", "decode_pool_tokens"):
        num_bytes = plan.pool_blocks(getattr(plan, name)) * BLOCK_SIZE_TOKENS * bytes_per_token
        advice = "give less, or where it is left open fewer --conversations or --turns"
        machine.check_memory(num_bytes, named_by=option_of(name), advice=advice)


def emulated_subject(plan: TurnsPlan, profile: Profile, model_dir: Path) -> Subject:
    """An emulated model, written to ``model_dir``. ``profile``: the plan's effective one."""
    write_model_dir(model_dir, profile, max_model_len=plan.max_model_len)
    return Subject(
        MODEL_NAME, model_dir, profile.geometry.dtype, emulated_words, profile, emulation_args(), EMULATION_ENV
    )


@dataclass(frozen=True, slots=True)
class Host:
    """Where processes are to run. ``ports``: free ones, each given once. ``python``: interpreter to start them with."""

    machine: Machine
    ports: Iterator[int]
    python: str


def plan_pair_of_turns(
    subject: Subject, plan: TurnsPlan, setting: EngineSetting, prefill_blocks: int, host: Host
) -> FleetPlan:
    """P and D without anything in front. ``prefill_blocks``: P's pool."""
    is_ours = setting.system is TurnsSystem.SHUTTLE
    shared = (
        "--block-size", str(BLOCK_SIZE_TOKENS),
        "--max-num-batched-tokens", str(plan.chunk_tokens),
        "--max-num-seqs", str(PAIR_SLOTS),
        *(subject.args if is_ours else emulation_args(progress=Progress.PACED)),
    )  # fmt: skip
    caching = () if setting.prefill_cache is not PrefillCache.OFF else ("--no-enable-prefix-caching",)
    decode_blocks = plan.pool_blocks(plan.decode_pool_tokens)
    settings = [
        EngineSettings("prefill-0", Role.PREFILL, (*shared, *_pool_args(prefill_blocks), *caching)),
        EngineSettings("decode-0", Role.DECODE, (*shared, *_pool_args(decode_blocks))),
    ]
    engines = plan_engines(settings, _launcher(subject, plan), subject.model, host.machine, host.ports, host.python)
    engines = tuple(replace(engine, env={**engine.env, **subject.env}) for engine in engines)
    if not is_ours:
        engines = tuple(_with_upstream_connector(engine, setting) for engine in engines)
    return FleetPlan(subject.name, engines)


def plan_front_of_turns(
    subject: Subject, plan: TurnsPlan, cell: TurnsCell, engines: tuple[ProcessPlan, ...], host: Host
) -> FleetPlan:
    """What stands in front of ``engines`` in ``cell``, alone: our router, or the proxy."""
    port = next(host.ports)
    if cell.system is TurnsSystem.UPSTREAM:
        mode = ProxyMode.BOTH if cell.is_reusing else ProxyMode.PULL
        proxy = plan_proxy(mode, engines, port, host.python, {"first_byte_timeout_s": _FIRST_BYTE_TIMEOUT_S})
        return FleetPlan(subject.name, (), proxy)
    args = () if cell.is_reusing else ("--no-reuse-history",)
    config = replace(_launcher(subject, plan), mode=ModeChoice(cell.mode), router_args=args)
    return FleetPlan(subject.name, (), plan_router(engines, config, port, host.python))


def _with_upstream_connector(engine: ProcessPlan, setting: EngineSetting) -> ProcessPlan:
    """The same engine with vLLM's connector in the place of ours, and the same port for its side channel."""
    host, _, port = engine.side_address.rpartition(":")
    values = {
        "kv_connector": "NixlConnector",
        # With roles of their own, P would not delay the freeing of blocks that it reads into.
        "kv_role": "kv_both",
        "engine_id": engine.name,
        # By its default, a turn fails whose history is not kept any more.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"bidirectional_kv_xfer": setting.is_both_ways},
    }
    at = engine.argv.index("--kv-transfer-config") + 1
    argv = (*engine.argv[:at], json.dumps(values), *engine.argv[at + 1 :])
    env = {"VLLM_NIXL_SIDE_CHANNEL_HOST": host, "VLLM_NIXL_SIDE_CHANNEL_PORT": port}
    return replace(engine, argv=argv, env={**engine.env, **env})


def _launcher(subject: Subject, plan: TurnsPlan) -> LauncherConfig:
    return LauncherConfig(
        model=plan.model,
        served_model_name=subject.name,
        dtype=subject.dtype,
        kv_cache_gib=1,  # how much there is, is said in blocks
        max_model_len=plan.max_model_len,
    )


def _pool_args(num_blocks: int) -> tuple[str, ...]:
    return ("--num-gpu-blocks-override", str(num_blocks))
