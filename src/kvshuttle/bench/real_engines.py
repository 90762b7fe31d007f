"""Engines that compute, as `kvshuttle up` starts them, and write the trace that emulated engines write. Pure."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvshuttle.config import QUIET_WAITS_VARIABLE, Device, LauncherConfig
from kvshuttle.emulate.settings import additional_config
from kvshuttle.launcher.plan import EngineSettings, plan_engines

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvshuttle.bench.systems import EngineKnobs, Places
    from kvshuttle.bench.turns_fleet import Host
    from kvshuttle.launcher.plan import Machine, ProcessPlan, Role

TRACED_WORKER_CLASS = "kvshuttle.emulate.traced_worker.TracedWorker"


@dataclass(frozen=True, slots=True)
class RealModel:
    """A model and what vLLM makes of it. ``location``: its directory, or a name that vLLM fetches itself."""

    name: str
    location: Path | str
    dtype: str


def is_traceable(machine: Machine) -> bool:
    """Whether engines here can be timed from inside: on a GPU a forward pass returns before it is computed."""
    return not machine.computes_on_gpu(Device.AUTO)


def plan_real_engines(
    model: RealModel, wanted: Sequence[tuple[Role, EngineKnobs]], places: Places, host: Host
) -> tuple[ProcessPlan, ...]:
    """One engine for each of ``wanted``, named by its role and number."""
    count: Counter[Role] = Counter()
    settings = []
    for role, knobs in wanted:
        name = f"{role}-{count[role]}"
        count[role] += 1
        settings.append(EngineSettings(name, role, _arguments(knobs, places.trace_dir_of(name), host.machine)))
    launcher = LauncherConfig(model=model.name, served_model_name=model.name, dtype=model.dtype)
    engines = plan_engines(settings, launcher, model.location, host.machine, host.ports, host.python)
    return tuple(
        replace(engine, env={**engine.env, **_memory(engine, knobs)})
        for engine, (_, knobs) in zip(engines, wanted, strict=True)
    )


def _arguments(knobs: EngineKnobs, trace_dir: Path, machine: Machine) -> tuple[str, ...]:
    options = {
        "--max-model-len": str(knobs.max_model_len),
        "--max-num-batched-tokens": str(knobs.chunk_tokens),
        "--max-num-seqs": str(knobs.num_slots),
    }
    if is_traceable(machine):
        options["--worker-cls"] = TRACED_WORKER_CLASS
        options["--additional-config"] = json.dumps(additional_config(trace_dir=str(trace_dir)))
    caching = () if knobs.has_prefix_cache else ("--no-enable-prefix-caching",)
    return (*(word for pair in options.items() for word in pair), *caching)


def _memory(engine: ProcessPlan, knobs: EngineKnobs) -> dict[str, str]:
    if "VLLM_CPU_KVCACHE_SPACE" not in engine.env:
        return {}
    quiet = "1" if knobs.is_quiet_wait else ""
    return {"VLLM_CPU_KVCACHE_SPACE": str(knobs.kv_cache_gib), QUIET_WAITS_VARIABLE: quiet}
