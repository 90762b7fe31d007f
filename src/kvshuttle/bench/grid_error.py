"""The emulator's own error, where a plan has the same load on engines that compute and on emulated ones. Pure."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from kvshuttle.bench.grid_plan import GridSystem
from kvshuttle.bench.markdown import NOTHING
from kvshuttle.bench.sections import Section

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvshuttle.bench.grid_records import Served
    from kvshuttle.bench.grid_results import GridResults

TWINS = {
    GridSystem.SHUTTLE_PULL_REAL: GridSystem.SHUTTLE_PULL,
    GridSystem.SHUTTLE_PUSH_REAL: GridSystem.SHUTTLE_PUSH,
}
"""Systems that compute, and their emulation."""


def error_section(results: GridResults) -> Section | None:
    """Medians of both and their ratio; nothing where a plan does not have both."""
    rows = []
    for real, emulated in TWINS.items():
        for point in results.points:
            both = results.served(real, point), results.served(emulated, point)
            if not all(both):
                continue
            shape = point.shape
            place = [f"{shape.input_tokens:,}", str(shape.output_tokens), str(shape.slots), f"{point.rate:g}"]
            rows.append([*place, str(emulated), *_compared(both, "ttft_s"), *_compared(both, "tpot_s")])
    if not rows:
        return None
    has_contention = "contention" in results.facts.get("profile", {})
    return Section(
        "The emulator's own error",
        f"Medians at the client in milliseconds, the same lengths and arrivals: {results.plan.model} computing, with"
        f" --dtype {results.plan.dtype}; its profile {results.plan.profile}, emulated; emulated by computing, and how"
        " far that is off. A pass that computes takes its core, an emulated one sleeps: of what others do meanwhile it"
        + (
            " knows what its profile says of contention."
            if has_contention
            else " knows nothing: its profile has no [contention]."
        ),
        ("In", "Out", "Slots", "Rate", "System", *_heads("TTFT"), *_heads("TPOT")),
        rows,
    )


def _heads(name: str) -> tuple[str, str, str]:
    return f"{name}, computing", "emulated", "ratio"


def _compared(both: tuple[Sequence[Served], Sequence[Served]], name: str) -> list[str]:
    real_ms, emulated_ms = (median([getattr(request, name) for request in served]) * 1000 for served in both)
    if not real_ms:  # an answer of one token has no time per output token
        return [f"{real_ms:,.1f}", f"{emulated_ms:,.1f}", NOTHING]
    ratio = emulated_ms / real_ms
    return [f"{real_ms:,.1f}", f"{emulated_ms:,.1f}", f"{ratio:.2f} ({ratio - 1:+.0%})"]
