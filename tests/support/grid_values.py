"""Traces, results and records of load benchmarks, small enough to reckon by hand."""

from __future__ import annotations

from typing import Any

from kvshuttle.bench.answers import expected_text
from kvshuttle.bench.grid_plan import GridPlan
from kvshuttle.bench.grid_records import CellRecord, Served, StepPace
from kvshuttle.bench.load import LoadResult
from kvshuttle.emulate.trace import Pass, PassedRequest

NUM_PROMPT_TOKENS = 2048
NUM_OUTPUT_TOKENS = 4
KEYS = tuple(f"{number:016x}" for number in (101, 202, 303, 404))
"""As traces name prompts."""


def grid_plan(**knobs: Any) -> GridPlan:
    """One system, one rate, one length."""
    values = {"systems": ["shuttle-push"], "rates": [4], "input_tokens": [NUM_PROMPT_TOKENS], "num_prompts": 8}
    return GridPlan.from_mapping({**values, "output_tokens": [NUM_OUTPUT_TOKENS], **knobs})


def forward(start_s: float, end_s: float, *requests: tuple[str, int, int], wrong_at: int = -1) -> Pass:
    """A pass that took as long as planned, with requests (key, start, end)."""
    passed = tuple(PassedRequest(key, start, end, NUM_PROMPT_TOKENS, wrong_at) for key, start, end in requests)
    return Pass(start_s, end_s, end_s - start_s, 0.0, passed)


def answer_to(key: str) -> str:
    """What a client gets for a prompt, as it is streamed."""
    return f" {expected_text(key, NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS)}"


def load_result(*rows: tuple[str, float, float, float], error: str = "") -> LoadResult:
    """Requests of (answer, sent, time to the first token, time to the last)."""
    texts, sent, ttfts, latencies = (list(column) for column in zip(*rows, strict=True))
    return LoadResult(
        duration=10.0,
        completed=len(rows),
        start_times=sent,
        ttfts=ttfts,
        latencies=latencies,
        output_lens=[NUM_OUTPUT_TOKENS] * len(rows),
        input_lens=[NUM_PROMPT_TOKENS] * len(rows),
        generated_texts=texts,
        errors=[error] * len(rows),
    )


def served(ttft_s: float = 0.5, *, gap_s: float = 0.05, sent_s: float = 0.0, **fields: Any) -> Served:
    """A request that was handed off; its answer took 0.1 s for each further token."""
    values: dict[str, Any] = {
        "prefill": "prefill-0",
        "decode": "decode-0",
        "queue_s": 0.1,
        "prefill_s": 0.2,
        "gap_s": gap_s,
        "first_step_s": 0.05,
        "num_recomputed_tokens": 1,
    }
    latency_s = ttft_s + 0.1 * (NUM_OUTPUT_TOKENS - 1)
    return Served(sent_s, ttft_s, latency_s, NUM_OUTPUT_TOKENS, **(values | fields))


def cell_record(system: str, requests: list[Served], *, rate: float = 4.0, **fields: Any) -> CellRecord:
    """A cell of ``grid_plan``."""
    values: dict[str, Any] = {
        "seed": 0,
        "repeat": 0,
        "duration_s": 10.0,
        "quiet": StepPace(10, 1.1, 1.0),
        "moving": StepPace(10, 1.32, 1.0),
        "front_cpu_s": 0.02,
        "prefill_cpu_s": 0.3,
        "decode_cpu_s": 3.6,
        "busy_cores": 1.5,
        "load_average": 2.5,
    }
    place = (system, 8, NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS, rate)
    return CellRecord(*place, requests=requests, **(values | fields))
