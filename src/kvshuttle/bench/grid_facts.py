"""What the figures of a load benchmark depend on, as the first section of its report. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvshuttle.bench.grid_plan import REAL_SYSTEMS, Prompts
from kvshuttle.bench.markdown import machine_rows
from kvshuttle.bench.sections import Section

if TYPE_CHECKING:
    from kvshuttle.bench.grid_results import GridResults


def facts_section(results: GridResults) -> Section:
    """Machine, versions, accelerator, engines, caches, load."""
    plan, facts = results.plan, results.facts
    profile = facts["profile"]
    geometry = profile["geometry"]
    rows = [
        *machine_rows(facts),
        (
            "Accelerator",
            f"emulated: {profile['name']}; every duration times {plan.time_scale:g}. All times in this report are of"
            f" this machine's clock; divided by {plan.time_scale:g} they compare with an accelerator's, except for"
            " what vLLM, HTTP and NIXL take, which is real and not scaled",
        ),
        (
            "KV cache",
            f"{geometry['num_layers']} layers, {geometry['num_kv_heads']} KV heads x {geometry['head_dim']},"
            f" {geometry['dtype']}: {facts['kv_bytes_per_token']:,} bytes a token ({plan.bytes_scale:g} of the"
            f" profile's); {plan.prefill_kv_gib} GiB for each prefill engine, {plan.decode_kv_gib} for each decode"
            " engine",
        ),
        (
            "Engines",
            f"{plan.num_prefill} prefill, {plan.num_decode} decode; chunks of {plan.chunk_tokens} tokens; slots:"
            f" prefill {plan.prefill_slots}, decode {', '.join(map(str, plan.decode_slots))}; processes"
            f" {'sleep' if plan.is_quiet_wait else 'spin, as vLLM ships,'} while they wait for each other",
        ),
        (
            "Prefix caches",
            f"prefill {_on(plan.has_prefill_prefix_cache)}, decode {_on(plan.has_decode_prefix_cache)};"
            f" {_prompts(plan.prompts)}",
        ),
        (
            "Load",
            "vllm bench serve, completions of token ids, streamed; rates"
            f" {', '.join(f'{rate:g}' for rate in plan.rates)} requests per second at full"
            f" speed, sent {plan.time_scale:g} times slower; {_amount(results)};"
            f" burstiness {plan.burstiness:g}; seeds {', '.join(map(str, plan.seeds))}, {plan.repeats} run(s) of each",
        ),
    ]
    if REAL_SYSTEMS & set(results.systems):
        rows.insert(
            4, ("Model", f"systems that compute: {plan.model}, --dtype {plan.dtype}, as kvshuttle up starts it")
        )
    return Section("What was run", "", ("", ""), rows)


def _on(is_on: bool) -> str:  # noqa: FBT001 - a word for a switch
    return "on" if is_on else "off"


def _prompts(prompts: str) -> str:
    if prompts == Prompts.REPEATED:
        return "all cells of a length have the same prompts, which the prefill engine had computed before the first"
    return "no engine had seen a cell's prompts before"


def _amount(results: GridResults) -> str:
    plan = results.plan
    if plan.num_prompts:
        return f"{plan.num_prompts} requests in each cell"
    numbers = sorted({plan.num_prompts_of(cell) for cell in plan.cells})
    span = f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
    return f"{plan.duration_s:g} s of arrivals in each cell, {span} requests"
