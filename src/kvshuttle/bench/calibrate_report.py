"""What a calibration tells people: a page of Markdown, and the provenance of its profile. Pure."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from kvshuttle.bench.calibration import thresholds
from kvshuttle.bench.markdown import NOTHING, machine_rows, pairs, table
from kvshuttle.emulate.fit import alike_chunks, largest_error
from kvshuttle.handoff.break_even import MAX_THRESHOLD_TOKENS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvshuttle.bench.calibrate_plan import CalibratePlan
    from kvshuttle.bench.calibration import Calibration, HandOffTimes, Thresholds
    from kvshuttle.emulate.profile import Profile


def provenance_of(plan: CalibratePlan, facts: Mapping[str, Any], times_of: str, *, has_contention: bool) -> str:
    """Text for the profile: who measured what, where and when."""
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    subject = "a running pair" if plan.prefill else f"{plan.model} with --dtype {plan.dtype}, as kvshuttle up starts it"
    overhead = f", less {plan.step_overhead_ms:g} ms" if plan.prefill else ""
    return (
        f"Measured by kvshuttle bench calibrate on {facts['date']}: {subject}, on {facts['cpu']},"
        f" {facts['cores']} cores for both engines, Linux {facts['kernel']}; kvshuttle {facts['kvshuttle']} at"
        f" {facts['commit'] or 'no commit'}, {packages}.\n"
        f"Times are of {times_of}{overhead}; medians of {plan.repeats} rounds, each with a prompt of every length"
        f" and {plan.steps} steps of every batch, of which the mean counts."
        " Prefill: least squares of relative errors, none below zero."
        + (
            " Contention: one stream decoded beside one prompt of the longest length."
            if has_contention
            else " Contention: not measured."
        )
    )


def calibration_markdown(calibration: Calibration, profile: Profile, facts: Mapping[str, Any]) -> str:
    """The whole page."""
    suggested = thresholds(calibration, profile)
    cost = profile.prefill
    is_resumed = any(chunk.before and chunk.num_tokens == 1 for chunk in calibration.chunks)
    return "\n\n".join(
        [
            f"# Calibration: {profile.name}",
            pairs(machine_rows(facts)),
            " ".join(profile.provenance.split()),
            "## Prefill",
            f"Fitted: {cost.fixed_ms:g} ms for a step, {cost.per_token_ms:g} ms for each token,"
            f" {cost.per_token_squared_ms:g} ms for each square of tokens; largest error"
            f" {largest_error(cost, calibration.chunks):.1%}.",
            _prefill_table(calibration, profile),
            *(
                ["One token: what the decode engine computes of a prompt that it was handed, of any length."]
                if is_resumed
                else []
            ),
            "## Decode steps",
            "Milliseconds, by requests at a time and by their context.",
            _decode_table(profile),
            *_contention_part(calibration),
            "## Hand-offs",
            "Milliseconds, medians, by the connector's own metrics. A pull is asked for and read, a push is"
            " written; posting is the part of that in which the call for it lasts.",
            _handoff_table(calibration),
            "## Thresholds",
            _threshold_text(suggested),
        ]
    )


def _prefill_table(calibration: Calibration, profile: Profile) -> str:
    rows = [
        [
            str(before),
            str(num),
            f"{median(times):.1f} ({min(times):.1f} to {max(times):.1f})",
            f"{profile.prefill.step_ms([(before, num)]):.1f}",
            f"{num / median(times) * 1000:,.0f}",
        ]
        for (before, num), times in sorted(alike_chunks(calibration.chunks).items())
    ]
    return table(["Tokens before", "Tokens", "Measured, ms", "Fitted, ms", "Tokens/s"], rows)


def _decode_table(profile: Profile) -> str:
    decode = profile.decode
    rows = [
        [str(batch), *(f"{step_ms:.1f}" for step_ms in row)]
        for batch, row in zip(decode.batches, decode.steps_ms, strict=True)
    ]
    return table(["Requests", *map(str, decode.contexts)], rows)


def _contention_part(calibration: Calibration) -> list[str]:
    contention = calibration.contention()
    if contention is None:
        return []
    rows = [
        [name, f"{factor:.2f}", f"{min(times):.2f} to {max(times):.2f}"]
        for name, factor, times in (
            ("Prompts, while the other engine decodes", contention.prefill, calibration.prefill_slowed),
            ("Decode steps, while the other engine computes a prompt", contention.decode, calibration.decode_slowed),
        )
    ]
    return [
        "## Contention",
        "The engines share cores and memory: how many times longer steps take while both compute; medians of the"
        " rounds.",
        table(["Steps", "Times longer", "From round to round"], rows),
    ]


def _handoff_table(calibration: Calibration) -> str:
    rows = [
        [str(num), *_medians(calibration.pulls.get(num, ())), *_medians(calibration.pushes.get(num, ()))[1:]]
        for num in sorted(calibration.pulls)
    ]
    return table(["Tokens", "Pull: asking", "of the read posting", "read", "Push: of the write posting", "write"], rows)


def _medians(times: Sequence[HandOffTimes]) -> list[str]:
    if not times:
        return [NOTHING] * 3
    return [f"{median([getattr(each, name) for each in times]):.2f}" for name in ("acquire_ms", "post_ms", "wire_ms")]


def _threshold_text(suggested: Thresholds) -> str:
    read = suggested.read
    costs = (
        f"A token costs {suggested.compute_per_token_s * 1000:.4g} ms to compute; a read costs"
        f" {read.fixed_s * 1000:.4g} ms and {read.per_token_s * 1000:.4g} ms for each token. "
    )
    if suggested.num_tokens >= MAX_THRESHOLD_TOKENS:
        return (
            f"{costs}Reading never pays here: computing is cheaper at any length. Suggested:"
            f" `kv_recompute_threshold={MAX_THRESHOLD_TOKENS}`; hand off only to keep prefill off the decode engines."
        )
    return (
        f"{costs}Reading pays from {suggested.num_tokens} tokens on. Suggested: `kv_recompute_threshold ="
        f" {suggested.num_tokens}` and, where a decode engine may compute a few tokens beside its other requests,"
        f" `recompute_threshold_tokens = {suggested.num_tokens}`."
    )
