"""From a load generator's result and engines' traces to requests with their stages, and to decode pace. Pure.

Clients and engines call a request by different names, and the answer joins them: an emulated engine's answer follows
from its prompt, so from each prompt in a trace follows the text that its client must have got.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from kvshuttle.bench.answers import expected_text, normal_text
from kvshuttle.bench.grid_records import NOT_KNOWN, Served, StepPace
from kvshuttle.emulate.model_dir import WRONG_KV_TEXT
from kvshuttle.emulate.trace import first_passes, prompt_ends

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvshuttle.bench.load import LoadResult
    from kvshuttle.emulate.trace import Pass, PassedRequest

PREFILL_NAME = "prefill-"
"""How names of engines begin that only compute prompts."""
_GIVEN_TWICE = "another request got the same answer"
_ERROR_CHARACTERS = 160


@dataclass(frozen=True, slots=True)
class _Seen:
    """One prompt on one engine."""

    engine: str
    first: Pass
    computed_at_s: float
    num_prompt_tokens: int
    num_computed_tokens: int
    """In the first pass."""
    began_at_token: int


@dataclass(frozen=True, slots=True)
class _Sightings:
    """Prompts by key, on engines that only compute prompts and on those that answer."""

    prefill: Mapping[str, _Seen]
    decode: Mapping[str, _Seen]


def served_requests(result: LoadResult, traces: Mapping[str, Sequence[Pass]], *, output_tokens: int) -> list[Served]:
    """All requests of one cell. ``traces``: by engine, only passes since the cell began."""
    seen = _sightings(traces)
    keys = {expected_text(key, each.num_prompt_tokens, output_tokens): key for key, each in seen.decode.items()}
    found = [keys.get(normal_text(text), "") for text in result.generated_texts]
    # All prompts of a cell are different, so of two clients with the same answer one has another's.
    twice = {key for key, count in Counter(found).items() if key and count > 1}
    faults = [
        _fault(text, num, output_tokens, key) or (_GIVEN_TWICE if key in twice else "")
        for text, num, key in zip(result.generated_texts, result.output_lens, found, strict=True)
    ]
    return _joined(result, seen, found, faults)


def served_in_order(result: LoadResult, traces: Mapping[str, Sequence[Pass]], *, output_tokens: int) -> list[Served]:
    """The same of engines that compute, whose answers nothing foretells: prompts are computed in the order of sending.

    Where the trace tells of more or fewer prompts than were sent, nothing is known of stages.
    """
    seen = _sightings(traces)
    sent = sorted(range(len(result.start_times)), key=result.start_times.__getitem__)
    seen_first = sorted(seen.prefill, key=lambda key: seen.prefill[key].first.start_s)
    found = [""] * len(sent)
    if len(seen_first) == len(sent):
        for index, key in zip(sent, seen_first, strict=True):
            found[index] = key
    faults = ["" if num == output_tokens else _too_short(num, output_tokens) for num in result.output_lens]
    return _joined(result, seen, found, faults)


def _joined(result: LoadResult, seen: _Sightings, keys: Sequence[str], faults: Sequence[str]) -> list[Served]:
    """Client and engines together. ``keys``: each request's prompt, "" where it is not known."""
    began_at_s = min(result.start_times, default=0.0)
    return [
        Served(
            sent_s=sent_at_s - began_at_s,
            ttft_s=result.ttfts[index],
            latency_s=result.latencies[index],
            num_output_tokens=result.output_lens[index],
            error=result.errors[index].strip().rsplit("\n", 1)[-1][:_ERROR_CHARACTERS] or faults[index],
            **_stages(seen, keys[index], sent_at_s),
        )
        for index, sent_at_s in enumerate(result.start_times)
    ]


def wrong_prompts(traces: Mapping[str, Sequence[Pass]]) -> dict[str, str]:
    """Prompts whose KV an engine found wrong, and where."""
    return {
        request.key: f"{engine} found wrong KV at position {request.wrong_at}"
        for engine, passes in traces.items()
        for forward in passes
        for request in forward.requests
        if request.wrong_at >= 0
    }


def step_pace(traces: Mapping[str, Sequence[Pass]]) -> tuple[StepPace, StepPace]:
    """Decode engines' steps: while no prompt was on its way to them, and while some were."""
    seen = _sightings(traces)
    steps: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for engine, passes in traces.items():
        if engine.startswith(PREFILL_NAME):
            continue
        windows = [
            (source.first.start_s, seen.decode[key].first.start_s)
            for key, source in seen.prefill.items()
            if key in seen.decode and seen.decode[key].engine == engine
        ]
        for earlier, later in itertools.pairwise(passes):
            if _keys(earlier) & _keys(later) and earlier.planned_s > 0:
                is_moving = any(start < later.start_s and end > earlier.start_s for start, end in windows)
                steps[is_moving].append((later.start_s - earlier.start_s, earlier.planned_s))
    quiet, moving = (
        StepPace(len(pairs), sum(took for took, _ in pairs), sum(planned for _, planned in pairs))
        for pairs in (steps[False], steps[True])
    )
    return quiet, moving


def drift(requests: Sequence[Served]) -> float:
    """Median time to the first token of the last third by that of the first: above 1 a queue grows. 0: unknown."""
    ordered = sorted(requests, key=lambda request: request.sent_s)
    third = len(ordered) // 3
    if not third:
        return 0.0
    first, last = (median(each.ttft_s for each in part) for part in (ordered[:third], ordered[-third:]))
    return last / first if first > 0 else 0.0


def fairness(values: Iterable[float]) -> float:
    """Jain's index: 1 when all are equal, 1/n when one has everything. 0 for nothing."""
    shares = list(values)
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 0.0


def _sightings(traces: Mapping[str, Sequence[Pass]]) -> _Sightings:
    sides: tuple[dict[str, _Seen], dict[str, _Seen]] = ({}, {})
    for engine, passes in traces.items():
        side = sides[0] if engine.startswith(PREFILL_NAME) else sides[1]
        ends = prompt_ends(passes)
        for key, first in first_passes(passes).items():
            request = _request(first, key)
            each = _Seen(
                engine,
                first,
                ends.get(key, NOT_KNOWN),
                request.num_prompt_tokens,
                request.end - request.start,
                request.start,
            )
            # A request that was sent again: what counts is where it was computed last.
            if key not in side or side[key].computed_at_s < each.computed_at_s:
                side[key] = each
    return _Sightings(*sides)


def _stages(seen: _Sightings, key: str, sent_at_s: float) -> dict[str, Any]:
    """The fields of a ``Served`` that traces tell."""
    decode = seen.decode.get(key)
    if decode is None:
        return {}
    source = seen.prefill.get(key)
    if source is None or decode.began_at_token == 0:
        alone = {"prefill": decode.engine, "decode": decode.engine, "num_recomputed_tokens": decode.num_prompt_tokens}
        prefill_s = decode.computed_at_s - decode.first.start_s
        return {**alone, "queue_s": decode.first.start_s - sent_at_s, "prefill_s": prefill_s}
    return {
        "prefill": source.engine,
        "decode": decode.engine,
        "queue_s": source.first.start_s - sent_at_s,
        "prefill_s": source.computed_at_s - source.first.start_s,
        "gap_s": decode.first.start_s - source.computed_at_s,
        "first_step_s": decode.first.end_s - decode.first.start_s,
        "num_recomputed_tokens": decode.num_computed_tokens,
    }


def _fault(text: str, num_tokens: int, wanted: int, key: str) -> str:
    if WRONG_KV_TEXT in text:
        return "wrong KV"
    if num_tokens != wanted:
        return _too_short(num_tokens, wanted)
    return "" if key else "the answer is not that of any prompt"


def _too_short(num_tokens: int, wanted: int) -> str:
    return f"answered {num_tokens} of {wanted} tokens"


def _request(forward: Pass, key: str) -> PassedRequest:
    return next(each for each in forward.requests if each.key == key)


def _keys(forward: Pass) -> set[str]:
    return {request.key for request in forward.requests}
