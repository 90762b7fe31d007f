"""What the figures of a benchmark of conversations depend on, as the first section of its report. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvshuttle.bench.aiperf import AIPERF_VERSION
from kvshuttle.bench.markdown import machine_rows
from kvshuttle.bench.plan_file import command_of
from kvshuttle.bench.sections import Section
from kvshuttle.bench.talk import CONVERSATION_HEADER
from kvshuttle.bench.turns_plan import ClientName, TurnsSystem

if TYPE_CHECKING:
    from kvshuttle.bench.turns_figures import TurnsResults

_CLIENTS = {
    ClientName.OPENAI: "the OpenAI client, which names no conversation to our router",
    ClientName.AIPERF: f"aiperf {AIPERF_VERSION}, which names conversations by {CONVERSATION_HEADER}; TTFT, TPOT and"
    " the whole answer are what it measured",
}
_SYSTEMS = {
    TurnsSystem.SHUTTLE: "kvshuttle, behind its router",
    TurnsSystem.UPSTREAM: "vLLM's NixlConnector with a paced progress thread, bidirectional where history is reused,"
    " behind a plain proxy that remembers where it is; its answers are not streamed, since its streams do not say that",
}
_HOW_TO_READ = (
    "Anew: the whole prompt goes to P as if it were the first. Reused: D keeps each turn, and P reads it back."
    " Figures are medians over conversations, with the 10th to the 90th percentile where there are several."
)


def facts_section(results: TurnsResults) -> Section:
    """Machine, versions, model, engines, load, command."""
    plan, facts = results.plan, results.facts
    rows = [*machine_rows(facts), ("Model", _model(results))]
    if results.cells:
        done = results.done(results.cells[0])
        rows.append(("KV cache", f"{done.block_len_bytes // done.block_size_tokens:,} bytes a token"))
    rows += [
        (
            "Engines",
            f"1 P, 1 D, chunks of {plan.chunk_tokens} tokens, D's prefix cache on; fresh ones for each setting of P and"
            " each connector, and no cell finds what an earlier one has left in a cache (each has its own cache salt)",
        ),
        (
            "Load",
            f"{plan.conversations} at a time x {plan.turns} turns, closed loop, {plan.think_s:g} s between an answer"
            f" and the next turn; about {plan.first_tokens} new tokens first, then {plan.turn_tokens}; answers of up to"
            f" {plan.output_tokens}; seed {plan.seed}",
        ),
        ("Clients", "; ".join(text for name, text in _CLIENTS.items() if name in plan.clients)),
        ("Served by", "; ".join(text for name, text in _SYSTEMS.items() if name in plan.systems)),
        ("Command", f"`{command_of(plan)}`"),
    ]
    return Section("What was run", _HOW_TO_READ, ("", ""), rows)


def _model(results: TurnsResults) -> str:
    plan, profile = results.plan, results.facts.get("profile")
    if profile is None:
        return f"{plan.model}, {plan.dtype}, real"
    geometry = profile["geometry"]
    return (
        f"emulated: {profile['name']}, every duration times {plan.time_scale:g};"
        f" {geometry['num_layers']} layers, {geometry['num_kv_heads']} KV heads x {geometry['head_dim']},"
        f" {geometry['dtype']}: {plan.bytes_scale:g} of the profile's bytes"
    )
