"""The systems under test: how each one's engines are started, and what their requests must carry."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from kvshuttle.bench.plan import PAIR_SLOTS, HandoffPlan, SystemName
from kvshuttle.config import QUIET_WAITS_VARIABLE
from kvshuttle.emulate.settings import additional_config
from kvshuttle.handoff.params import Mode
from kvshuttle.launcher.plan import LOOPBACK, EngineSettings, FleetPlan, ProcessPlan, Role, kv_transfer_config

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MODEL_NAME = "emulated"
WORKER_CLASS = "kvshuttle.emulate.worker.EmulatedWorker"
_PAUSE_US = 1000


class Protocol(StrEnum):
    """Whose ``kv_transfer_params`` the legs carry."""

    SHUTTLE = "shuttle"
    UPSTREAM = "upstream"


class Progress(StrEnum):
    """What NIXL's progress thread does in vLLM's connectors, which have no option for it. The value is for tables."""

    AS_SHIPPED = ""
    """It spins, and takes a core for each engine."""
    PACED = "paced progress thread"
    """It pauses for a millisecond where it would spin; all else is as vLLM ships it."""
    OFF = "no progress thread"
    """There is none: transfers go on only inside calls of the connector."""


@dataclass(frozen=True, slots=True)
class System:
    """A connector and how its legs are driven. ``progress``: of vLLM's connectors; ours has an option of its own."""

    name: SystemName
    protocol: Protocol
    mode: Mode
    connector: str
    progress: Progress = Progress.AS_SHIPPED

    @property
    def title(self) -> str:
        """For tables."""
        if self.protocol is Protocol.SHUTTLE:
            return f"kvshuttle {self.mode}"
        return f"vLLM {self.connector}" + (f", {self.progress}" if self.progress else "")


_PUSH_NAMES = (SystemName.UPSTREAM_PUSH, SystemName.UPSTREAM_PUSH_PACED, SystemName.UPSTREAM_PUSH_QUIET)
_PULL_NAMES = (SystemName.UPSTREAM_PULL, SystemName.UPSTREAM_PULL_PACED, SystemName.UPSTREAM_PULL_QUIET)

SYSTEMS = {
    system.name: system
    for system in (
        System(SystemName.SHUTTLE_PUSH, Protocol.SHUTTLE, Mode.PUSH, "ShuttleConnector"),
        System(SystemName.SHUTTLE_PULL, Protocol.SHUTTLE, Mode.PULL, "ShuttleConnector"),
        *(
            System(name, Protocol.UPSTREAM, mode, connector, progress)
            for names, mode, connector in (
                (_PUSH_NAMES, Mode.PUSH, "NixlPushConnector"),
                (_PULL_NAMES, Mode.PULL, "NixlConnector"),
            )
            for name, progress in zip(names, Progress, strict=True)
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Places:
    """Where a run keeps what its engines need: the emulated model, and a directory for each engine's trace."""

    model_dir: Path
    trace_dir: Path

    def trace_dir_of(self, engine: str) -> Path:
        """Where the workers of ``engine`` write their traces."""
        return self.trace_dir / engine


@dataclass(frozen=True, slots=True)
class EngineKnobs:
    """What an emulated engine is started with beside its connector. ``num_slots``: requests that it runs at a time."""

    max_model_len: int
    chunk_tokens: int
    num_slots: int
    kv_cache_gib: int
    is_quiet_wait: bool
    has_prefix_cache: bool = True


EMULATION_ENV = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_COMPUTE_NANS_IN_LOGITS": "1"}
"""What emulated engines find in their environment: they need no core, and requests with wrong KV are counted."""


def emulation_args(*, trace_dir: Path | None = None, progress: Progress = Progress.AS_SHIPPED) -> tuple[str, ...]:
    """What every emulated engine is started with; ``additional_config`` says what the arguments are."""
    extra = additional_config(
        trace_dir=str(trace_dir) if trace_dir else None,
        nixl_progress_thread=False if progress is Progress.OFF else None,
        nixl_progress_pause_us=_PAUSE_US if progress is Progress.PACED else None,
    )
    return "--load-format", "dummy", "--worker-cls", WORKER_CLASS, "--additional-config", json.dumps(extra)


def plan_pair(system: System, plan: HandoffPlan, places: Places, ports: Iterator[int], python: str) -> FleetPlan:
    """One prefill and one decode engine with emulated accelerators, and ``system``'s connector between them."""
    knobs = EngineKnobs(plan.max_model_len, plan.chunk_tokens, PAIR_SLOTS, plan.kv_cache_gib, plan.is_quiet_wait)
    engines = tuple(
        plan_engine(system, role, f"{role}-0", knobs, places, ports, python) for role in (Role.PREFILL, Role.DECODE)
    )
    return FleetPlan(MODEL_NAME, engines)


def plan_engine(
    system: System | None, role: Role, name: str, knobs: EngineKnobs, places: Places, ports: Iterator[int], python: str
) -> ProcessPlan:
    """One engine with an emulated accelerator and ``system``'s connector; None for none."""
    port, side_port = next(ports), next(ports)
    progress = Progress.AS_SHIPPED if system is None else system.progress
    emulation = emulation_args(trace_dir=places.trace_dir_of(name), progress=progress)
    options = {
        "--model": str(places.model_dir),
        "--served-model-name": MODEL_NAME,
        "--host": LOOPBACK,
        "--port": str(port),
        "--max-model-len": str(knobs.max_model_len),
        "--max-num-batched-tokens": str(knobs.chunk_tokens),
        "--max-num-seqs": str(knobs.num_slots),
    }
    if system is not None:
        options["--kv-transfer-config"] = _transfer_config(system, role, name, side_port)
    argv = [python, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    argv += [] if knobs.has_prefix_cache else ["--no-enable-prefix-caching"]
    argv += [*emulation, *(word for pair in options.items() for word in pair)]
    side_address = f"{LOOPBACK}:{side_port}" if system is not None else ""
    return ProcessPlan(name, role, tuple(argv), _engine_env(knobs, side_port), LOOPBACK, port, side_address)


def _engine_env(knobs: EngineKnobs, side_port: int) -> dict[str, str]:
    return {
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(knobs.kv_cache_gib),
        **EMULATION_ENV,
        "OMP_NUM_THREADS": "1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": LOOPBACK,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port),
        QUIET_WAITS_VARIABLE: "1" if knobs.is_quiet_wait else "",
    }


def _transfer_config(system: System, role: Role, name: str, side_port: int) -> str:
    if system.protocol is Protocol.SHUTTLE:
        return kv_transfer_config(EngineSettings(name, role), side_port)
    values: dict[str, Any] = {
        "kv_connector": system.connector,
        "kv_role": "kv_producer" if role is Role.PREFILL else "kv_consumer",
        "engine_id": name,
        "kv_load_failure_policy": "fail",
    }
    return json.dumps(values)
