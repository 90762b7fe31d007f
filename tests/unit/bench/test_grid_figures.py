"""From a client's result and engines' traces to requests with their stages: checked on figures reckoned by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvshuttle.bench.answers import expected_text, normal_text
from kvshuttle.bench.grid_figures import drift, fairness, served_in_order, served_requests, step_pace, wrong_prompts
from kvshuttle.bench.grid_records import NOT_KNOWN, StepPace, read_cells
from kvshuttle.bench.record_file import append_records
from kvshuttle.emulate.pattern import prefix_sums, prompt_key
from support.grid_values import KEYS, NUM_OUTPUT_TOKENS, answer_to, cell_record, forward, load_result, served

if TYPE_CHECKING:
    from pathlib import Path

    from kvshuttle.bench.grid_records import Served
    from kvshuttle.emulate.trace import Pass

A, B, C, _ = KEYS
PREFILL = [forward(10.1, 10.3, (A, 0, 1024)), forward(10.3, 10.5, (A, 1024, 2048))]
DECODE = [forward(10.56, 10.6, (A, 2047, 2048)), forward(10.7, 10.8, (A, 2048, 2049))]


def joined(traces: dict[str, list[Pass]], *rows: tuple[str, float, float, float], error: str = "") -> list[Served]:
    return served_requests(load_result(*rows, error=error), traces, output_tokens=NUM_OUTPUT_TOKENS)


def test_a_request_is_found_in_the_traces_by_its_answer() -> None:
    other = [forward(11.0, 11.5, (B, 0, 2048))], [forward(11.6, 11.7, (B, 2047, 2048))]
    traces = {"prefill-0": PREFILL, "prefill-1": other[0], "decode-0": DECODE + other[1]}
    second, first = joined(traces, (answer_to(B), 10.9, 0.85, 1.2), (answer_to(A), 10.0, 0.62, 0.9))
    assert (first.prefill, first.decode, second.prefill) == ("prefill-0", "decode-0", "prefill-1")
    assert (first.queue_s, first.prefill_s) == pytest.approx((0.1, 0.4))
    assert (first.gap_s, first.first_step_s) == pytest.approx((0.06, 0.04))
    assert (first.sent_s, second.sent_s) == pytest.approx((0.0, 0.9))
    assert (first.num_recomputed_tokens, first.error, second.error) == (1, "", "")
    assert second.tpot_s == pytest.approx(0.35 / 3)


def test_requests_of_a_model_that_computes_are_found_by_their_order() -> None:
    other = [forward(11.0, 11.5, (B, 0, 2048))], [forward(11.6, 11.7, (B, 2047, 2048))]
    traces = {"prefill-0": PREFILL + other[0], "decode-0": DECODE + other[1]}
    result = load_result(("whatever", 10.9, 0.85, 1.2), ("it says", 10.0, 0.62, 0.9))
    second, first = served_in_order(result, traces, output_tokens=NUM_OUTPUT_TOKENS)
    assert (first.gap_s, second.gap_s) == pytest.approx((0.06, 0.1))
    assert (first.error, second.error) == ("", "")
    (alone,) = served_in_order(load_result(("more", 10.0, 0.6, 0.9)), traces, output_tokens=8)
    assert (alone.gap_s, alone.error) == (NOT_KNOWN, "answered 4 of 8 tokens")


def test_an_answer_that_no_prompt_has_does_not_count() -> None:
    (request,) = joined({"prefill-0": PREFILL, "decode-0": DECODE}, (answer_to(B), 10.0, 0.6, 0.9))
    assert request.error == "the answer is not that of any prompt"
    assert request.gap_s == NOT_KNOWN


def test_of_two_requests_with_the_same_answer_neither_counts() -> None:
    other = [forward(11.0, 11.5, (B, 0, 2048))], [forward(11.6, 11.7, (B, 2047, 2048))]
    traces = {"prefill-0": PREFILL + other[0], "decode-0": DECODE + other[1]}
    its_own, another_s = joined(traces, (answer_to(A), 10.0, 0.62, 0.9), (answer_to(A), 10.9, 0.85, 1.2))
    assert its_own.error == another_s.error == "another request got the same answer"


@pytest.mark.parametrize(
    ("text", "error", "told"),
    [
        ("<wrong-kv><wrong-kv><wrong-kv><wrong-kv>", "", "wrong KV"),
        ("", "Traceback\n  somewhere\nOSError: gone\n", "OSError: gone"),
    ],
)
def test_a_request_that_failed_says_why(text: str, error: str, told: str) -> None:
    (request,) = joined({"prefill-0": PREFILL, "decode-0": DECODE}, (text, 10.0, 0.6, 0.9), error=error)
    assert request.error == told


def test_a_short_answer_does_not_count() -> None:
    result = load_result((answer_to(A), 10.0, 0.6, 0.9))
    (request,) = served_requests(result, {"prefill-0": PREFILL, "decode-0": DECODE}, output_tokens=8)
    assert request.error == "answered 4 of 8 tokens"


def test_what_one_engine_does_alone_has_no_gap() -> None:
    alone = [forward(10.2, 10.7, (A, 0, 2048)), forward(10.7, 10.8, (A, 2048, 2049))]
    for engine, source in (("plain-0", {}), ("decode-0", {"prefill-0": PREFILL})):
        (request,) = joined({**source, engine: alone}, (answer_to(A), 10.0, 0.75, 1.0))
        assert (request.prefill, request.decode, request.gap_s) == (engine, engine, NOT_KNOWN)
        assert (request.queue_s, request.prefill_s) == pytest.approx((0.2, 0.5))
        assert request.num_recomputed_tokens == 2048


def test_a_prompt_that_was_computed_twice_counts_where_it_was_last() -> None:
    again = [forward(10.4, 10.55, (A, 0, 2048))]
    traces = {"prefill-0": PREFILL, "prefill-1": again, "decode-0": [forward(10.6, 10.7, (A, 2047, 2048))]}
    (request,) = joined(traces, (answer_to(A), 10.0, 0.75, 1.0))
    assert request.prefill == "prefill-1"
    assert request.gap_s == pytest.approx(0.05)


def test_wrong_kv_is_found_on_whichever_engine_saw_it() -> None:
    assert wrong_prompts({"prefill-0": PREFILL, "decode-0": DECODE}) == {}
    wrong = [forward(10.6, 10.7, (B, 2047, 2048), wrong_at=384)]
    assert wrong_prompts({"decode-1": wrong}) == {B: "decode-1 found wrong KV at position 384"}


def test_steps_are_compared_with_the_profile_while_prompts_move_and_while_none_do() -> None:
    prefill = [forward(2.0, 3.0, (B, 0, 2048))]
    decode = [
        forward(0.0, 0.5, (A, 2048, 2049)),
        forward(1.0, 1.5, (A, 2049, 2050)),
        forward(2.5, 3.0, (A, 2050, 2051)),
        forward(4.0, 4.4, (A, 2051, 2052), (B, 2047, 2048)),
        forward(9.0, 9.4, (C, 2048, 2049)),
    ]
    quiet, moving = step_pace({"prefill-0": prefill, "decode-0": decode})
    assert quiet == StepPace(1, 1.0, 0.5)
    assert moving == StepPace(2, pytest.approx(3.0), pytest.approx(1.0))
    assert (quiet.ratio, StepPace().ratio) == (2.0, 0.0)


def test_another_engines_prompts_do_not_disturb() -> None:
    traces = {
        "prefill-0": [forward(0.5, 2.0, (B, 0, 2048))],
        "decode-0": [forward(0.0, 0.5, (A, 2048, 2049)), forward(1.0, 1.5, (A, 2049, 2050))],
        "decode-1": [forward(3.0, 3.5, (B, 2047, 2048))],
    }
    quiet, moving = step_pace(traces)
    assert (quiet.num_steps, moving.num_steps) == (1, 0)


def test_a_growing_queue_shows_as_drift() -> None:
    steady = [served(0.5, sent_s=index) for index in range(9)]
    growing = [served(0.5 + index, sent_s=index) for index in range(9)]
    assert drift(steady) == 1.0
    assert drift(list(reversed(growing))) == pytest.approx(7.5 / 1.5)
    assert drift(steady[:2]) == 0.0


def test_fairness_is_one_for_equal_shares_and_one_of_n_for_one_that_takes_all() -> None:
    assert fairness([5, 5, 5, 5]) == 1.0
    assert fairness([20, 0, 0, 0]) == 0.25
    assert fairness([]) == fairness([0, 0]) == 0.0


def test_an_expected_answer_follows_from_the_whole_prompt() -> None:
    import numpy as np

    key = prompt_key(int(prefix_sums(np.arange(300, 800, dtype=np.int32))[-1]))
    text = expected_text(key, 500, 6)
    assert len(text.split()) == 6
    assert expected_text(key, 500, 3) == " ".join(text.split()[:3])
    assert expected_text(key, 501, 6).split()[0] == text.split()[0]
    assert expected_text(key, 501, 6) != text
    assert normal_text("  baba baci\n") == "baba baci"


def test_a_cell_that_was_run_again_counts_once_and_a_torn_line_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    assert read_cells(path) == []
    first, again = (cell_record("plain", [served(ttft_s)]) for ttft_s in (0.5, 0.7))
    other = cell_record("plain", [served()], rate=8.0, error="wrong KV in 1 requests")
    for record in (first, other, again):
        append_records(path, [record])
    with path.open("ab") as file:
        file.write(b'{"system": "pla')
    assert read_cells(path) == [again, other]
    append_records(path, [first])
    assert read_cells(path) == [first, other]
    assert other.served == []
