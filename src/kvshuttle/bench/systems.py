"""The systems under test: how each one's engines are started, and what their requests must carry."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from kvshuttle.bench.plan import HandoffPlan, SystemName
from kvshuttle.config import QUIET_WAITS_VARIABLE
from kvshuttle.emulate.settings import additional_config
from kvshuttle.handoff.params import Mode
from kvshuttle.launcher.plan import LOOPBACK, EngineSettings, FleetPlan, ProcessPlan, Role, kv_transfer_config

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MODEL_NAME = "emulated"
WORKER_CLASS = "kvshuttle.emulate.worker.EmulatedWorker"


class Protocol(StrEnum):
    """Whose ``kv_transfer_params`` the legs carry."""

    SHUTTLE = "shuttle"
    UPSTREAM = "upstream"


@dataclass(frozen=True, slots=True)
class System:
    """A connector and how its legs are driven."""

    name: SystemName
    protocol: Protocol
    mode: Mode
    connector: str
    has_progress_thread: bool

    @property
    def title(self) -> str:
        """For tables."""
        if self.protocol is Protocol.SHUTTLE:
            return f"kvshuttle {self.mode}"
        return f"vLLM {self.connector}" + ("" if self.has_progress_thread else ", no progress thread")


SYSTEMS = {
    system.name: system
    for system in (
        System(SystemName.SHUTTLE_PUSH, Protocol.SHUTTLE, Mode.PUSH, "ShuttleConnector", has_progress_thread=False),
        System(SystemName.SHUTTLE_PULL, Protocol.SHUTTLE, Mode.PULL, "ShuttleConnector", has_progress_thread=False),
        System(SystemName.UPSTREAM_PUSH, Protocol.UPSTREAM, Mode.PUSH, "NixlPushConnector", has_progress_thread=True),
        System(SystemName.UPSTREAM_PULL, Protocol.UPSTREAM, Mode.PULL, "NixlConnector", has_progress_thread=True),
        System(
            SystemName.UPSTREAM_PUSH_QUIET,
            Protocol.UPSTREAM,
            Mode.PUSH,
            "NixlPushConnector",
            has_progress_thread=False,
        ),
        System(
            SystemName.UPSTREAM_PULL_QUIET, Protocol.UPSTREAM, Mode.PULL, "NixlConnector", has_progress_thread=False
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


EMULATION_ENV = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_COMPUTE_NANS_IN_LOGITS": "1"}
"""What emulated engines find in their environment: they need no core, and requests with wrong KV are counted."""


def emulation_args(*, trace_dir: Path | None = None, nixl_progress_thread: bool | None = None) -> tuple[str, ...]:
    """What every emulated engine is started with; ``additional_config`` says what the arguments are."""
    extra = additional_config(
        trace_dir=str(trace_dir) if trace_dir else None, nixl_progress_thread=nixl_progress_thread
    )
    return "--load-format", "dummy", "--worker-cls", WORKER_CLASS, "--additional-config", json.dumps(extra)


def plan_pair(system: System, plan: HandoffPlan, places: Places, ports: Iterator[int], python: str) -> FleetPlan:
    """One prefill and one decode engine with emulated accelerators, and ``system``'s connector between them."""
    engines = tuple(_plan_engine(system, role, plan, places, ports, python) for role in (Role.PREFILL, Role.DECODE))
    return FleetPlan(MODEL_NAME, engines)


def _plan_engine(
    system: System, role: Role, plan: HandoffPlan, places: Places, ports: Iterator[int], python: str
) -> ProcessPlan:
    port, side_port = next(ports), next(ports)
    name = f"{role}-0"
    # The progress thread of our own connector is an option of it; vLLM's have none.
    is_thread_as_shipped = system.has_progress_thread or system.protocol is Protocol.SHUTTLE
    emulation = emulation_args(
        trace_dir=places.trace_dir_of(name), nixl_progress_thread=None if is_thread_as_shipped else False
    )
    options = {
        "--model": str(places.model_dir),
        "--served-model-name": MODEL_NAME,
        "--host": LOOPBACK,
        "--port": str(port),
        "--max-model-len": str(plan.max_model_len),
        "--max-num-batched-tokens": str(plan.chunk_tokens),
        "--max-num-seqs": "32",
        "--kv-transfer-config": _transfer_config(system, role, name, side_port),
    }
    env = {
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(plan.kv_cache_gib),
        **EMULATION_ENV,
        "OMP_NUM_THREADS": "1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": LOOPBACK,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port),
        QUIET_WAITS_VARIABLE: "1" if plan.is_quiet_wait else "",
    }
    argv = [python, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    argv += [*emulation, *(word for pair in options.items() for word in pair)]
    return ProcessPlan(name, role, tuple(argv), env, LOOPBACK, port, side_address=f"{LOOPBACK}:{side_port}")


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
