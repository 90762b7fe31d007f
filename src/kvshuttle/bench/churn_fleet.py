"""What overload and churn befall: emulated engines with small pools, and our router."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from kvshuttle.bench.churn_plan import CHUNK_TOKENS
from kvshuttle.bench.plan import BLOCK_SIZE_TOKENS
from kvshuttle.bench.systems import EMULATION_ENV, MODEL_NAME, emulation_args
from kvshuttle.config import LauncherConfig
from kvshuttle.launcher.machine import free_ports, this_machine
from kvshuttle.launcher.plan import FleetPlan, plan_fleet

if TYPE_CHECKING:
    from pathlib import Path

    from kvshuttle.bench.churn_plan import ChurnPlan

_PREFILL_SLOTS = 8
_DRAIN_S = 3.0
"""What a router that is restarted gives to running requests; the others are cut, which is wanted here."""


def plan_churn_fleet(plan: ChurnPlan, model_dir: Path, dtype: str) -> FleetPlan:
    """Engines and router."""
    config = LauncherConfig(
        served_model_name=MODEL_NAME,
        port=0,
        num_prefill=plan.num_prefill,
        num_decode=plan.num_decode,
        dtype=dtype,
        kv_cache_gib=1,  # how much there is, is said in blocks
        max_model_len=plan.max_model_len,
        engine_args=(
            *("--block-size", str(BLOCK_SIZE_TOKENS)),
            *("--max-num-batched-tokens", str(CHUNK_TOKENS)),
            *emulation_args(),
        ),
        prefill_args=("--max-num-seqs", str(_PREFILL_SLOTS), *_pool(plan.prefill_blocks)),
        decode_args=("--max-num-seqs", str(plan.decode_slots), *_pool(plan.decode_blocks)),
        router_args=(
            *("--history-ttl-s", f"{plan.ttl_s:g}"),
            *("--max-engine-connections", str(plan.max_engine_connections)),
            *("--drain-s", f"{_DRAIN_S:g}"),
        ),
        connector_options={"lease_s": plan.lease_s, "decoder_kv_blocks_ttl": plan.ttl_s},
    )
    fleet = plan_fleet(config, model_dir, this_machine(), free_ports(random.Random()), sys.executable)
    return replace(fleet, engines=tuple(replace(each, env={**each.env, **EMULATION_ENV}) for each in fleet.engines))


def _pool(num_blocks: int) -> tuple[str, ...]:
    return "--num-gpu-blocks-override", str(num_blocks)
