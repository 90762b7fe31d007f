"""From traces to figures, pure: hand-off records, decode pace, percentiles."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from kvshuttle.bench.records import HandoffRecord
from kvshuttle.emulate.trace import first_passes, prompt_ends

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from kvshuttle.bench.legs import Driven
    from kvshuttle.bench.plan import Cell
    from kvshuttle.emulate.trace import Pass


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between neighbours. Raises ``ValueError`` for no values."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def handoff_records(
    system: str,
    cell: Cell,
    round_index: int,
    driven: dict[str, Driven],
    prefill: Sequence[Pass],
    decode: Sequence[Pass],
) -> list[HandoffRecord]:
    """One record for each of ``driven``, by prompt key, from what both engines' traces say of the round."""
    starts, ends, firsts = first_passes(prefill), prompt_ends(prefill), first_passes(decode)
    records = []
    for key, each in driven.items():
        first = firsts.get(key)
        error = each.error or _fault(key, ends, first)
        request = next((r for r in first.requests if r.key == key), None) if first is not None else None
        at_s = {
            "prefill_start_s": starts[key].start_s if key in starts else None,
            "prefill_end_s": ends.get(key),
            "prefill_answered_s": each.prefill_answered_at_s or None,
            "decode_start_s": first.start_s if first is not None else None,
            "decode_end_s": first.end_s if first is not None else None,
            "answered_s": each.answered_at_s or None,
        }
        records.append(
            HandoffRecord(
                system=system,
                prompt_tokens=cell.prompt_tokens,
                concurrency=cell.concurrency,
                background=cell.background,
                round=round_index,
                key=key,
                decode_computed_tokens=request.end - request.start if request is not None else -1,
                error=error or _wrong(key, decode),
                **{name: -1.0 if value is None else value - each.sent_at_s for name, value in at_s.items()},
            )
        )
    return records


def intervals(passes: Sequence[Pass], keys: Collection[str], *, start_s: float, end_s: float) -> list[float]:
    """Seconds between starts of neighbouring passes that hold all of ``keys``, within a window."""
    inside = [
        forward.start_s
        for forward in passes
        if start_s <= forward.start_s <= end_s and set(keys) <= {request.key for request in forward.requests}
    ]
    return [later - earlier for earlier, later in itertools.pairwise(inside)]


def _fault(key: str, ends: dict[str, float], first: Pass | None) -> str:
    if key not in ends:
        return "P never computed it"
    if first is None:
        return "D never computed it"
    request = next(each for each in first.requests if each.key == key)
    if request.start == 0:
        return "D computed the prompt itself"
    return ""


def _wrong(key: str, decode: Sequence[Pass]) -> str:
    wrong = [r.wrong_at for forward in decode for r in forward.requests if r.key == key and r.wrong_at >= 0]
    return f"wrong KV at position {wrong[0]}" if wrong else ""
