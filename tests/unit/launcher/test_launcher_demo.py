"""Figures of the demo: taken from Prometheus text, shown as a table."""

from __future__ import annotations

from kvshuttle.launcher.chat import Answer
from kvshuttle.launcher.demo import Moved, Turn, moved_in, table_of
from kvshuttle.launcher.metrics import samples_of, total_of, totals_by

METRICS = r"""
# HELP kvshuttle:transfer_tokens_total Tokens whose KV was moved and used.
# TYPE kvshuttle:transfer_tokens_total counter
kvshuttle:transfer_tokens_total{direction="read",engine="0",model_name="m"} 288.0
kvshuttle:transfer_tokens_total{direction="write",engine="0",model_name="m"} 7.0
kvshuttle:transfer_bytes_total{direction="read",engine="0",model_name="m"} 8.847360e+06
kvshuttle:transfer_post_seconds_sum{direction="read",engine="0",model_name="m"} 0.125
kvshuttle:transfer_wire_seconds_sum{direction="read",engine="0",model_name="m"} 0.25
kvshuttle:transfers_total{direction="read",engine="0",model_name="m",outcome="moved"} 1.0
kvshuttle:transfers_total{direction="read",engine="0",model_name="m",outcome="denied"} 2.0
vllm:cache{path="a\\b\"c,d\n",x="}"} 1 1700000000
no_labels 3
broken{ 4
not_a_number{a="b"} x
nan_value NaN
"""


def test_samples_are_read_with_their_labels_and_what_is_none_is_passed_over() -> None:
    samples = {name: (labels, value) for name, labels, value in samples_of(METRICS)}
    assert samples["no_labels"] == ({}, 3.0)
    assert samples["vllm:cache"] == ({"path": 'a\\b"c,d\n', "x": "}"}, 1.0)
    assert not {"broken", "not_a_number"} & set(samples)


def test_totals_are_over_the_samples_with_the_wanted_labels() -> None:
    assert total_of(METRICS, "kvshuttle:transfer_tokens_total") == 295.0
    assert total_of(METRICS, "kvshuttle:transfer_tokens_total", direction="read") == 288.0
    assert total_of(METRICS, "absent") == 0.0
    assert totals_by(METRICS, "kvshuttle:transfers_total", "outcome") == {"moved": 1.0, "denied": 2.0}


def test_what_moved_is_summed_over_the_decode_engines() -> None:
    moved = moved_in([METRICS, METRICS])
    assert moved == Moved(576.0, 17_694_720.0, 0.75, {"moved": 2.0, "denied": 4.0})


def test_a_difference_keeps_only_the_outcomes_that_changed() -> None:
    before = Moved(1.0, 10.0, 0.5, {"moved": 1.0, "denied": 2.0})
    after = Moved(3.0, 30.0, 0.75, {"moved": 2.0, "denied": 2.0})
    assert after.since(before) == Moved(2.0, 20.0, 0.25, {"moved": 1.0})


def test_the_table_shows_what_was_asked_for_of_each_turn() -> None:
    answer = Answer("Paris, of course.", num_prompt_tokens=300, num_answer_tokens=11, ttft_s=0.5, total_s=1.5)
    table = table_of([Turn(answer, Moved(288.0, 8_847_360.0, 0.02))])
    head, _, row = table.strip().splitlines()
    for column in ("prompt tokens", "KV moved", "bytes", "transfer", "TTFT", "tokens/s", "answer"):
        assert column in head
    for figure in ("300", "288 tokens", "8.8 MB", "20.0 ms", "500 ms", "10.0", "Paris, of course."):
        assert figure in row


def test_speed_is_zero_rather_than_wrong_when_there_is_too_little_to_measure() -> None:
    assert Answer("", 0, 0, ttft_s=1.0, total_s=1.0).tokens_per_s == 0.0
    assert Answer("a", 1, 1, ttft_s=1.0, total_s=2.0).tokens_per_s == 0.0
