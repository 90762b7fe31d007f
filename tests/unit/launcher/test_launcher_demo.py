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
kvshuttle:transfer_tokens_total{direction="push",engine="0",model_name="m"} 12.0
kvshuttle:transfer_bytes_total{direction="push",engine="0",model_name="m"} 5.0
kvshuttle:transfer_bytes_total{direction="write",engine="0",model_name="m"} 3.0
kvshuttle:transfer_post_seconds_sum{direction="write",engine="0",model_name="m"} 1.0
kvshuttle:transfer_wire_seconds_sum{direction="write",engine="0",model_name="m"} 2.0
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
    assert total_of(METRICS, "kvshuttle:transfer_tokens_total") == 307.0
    assert total_of(METRICS, "kvshuttle:transfer_tokens_total", direction="read") == 288.0
    assert total_of(METRICS, "absent") == 0.0
    assert totals_by(METRICS, "kvshuttle:transfers_total", "outcome") == {"moved": 1.0, "denied": 2.0}


def test_what_arrived_is_summed_over_the_decode_engines_and_timed_by_whoever_posted_it() -> None:
    moved = moved_in([METRICS, METRICS], [METRICS])
    assert moved.num_tokens == 600.0
    assert moved == Moved(
        num_bytes=17_694_730.0,
        transfer_s=0.75 + 3.0,
        ways={"read": 576.0, "push": 24.0},
        outcomes={"moved": 2.0, "denied": 4.0},
    )


def test_a_difference_keeps_only_what_changed() -> None:
    before = Moved(10.0, 0.5, {"read": 1.0, "push": 4.0}, {"moved": 1.0, "denied": 2.0})
    after = Moved(30.0, 0.75, {"read": 1.0, "push": 6.0}, {"moved": 2.0, "denied": 2.0})
    assert after.since(before) == Moved(20.0, 0.25, {"push": 2.0}, {"moved": 1.0})


def test_the_table_shows_what_was_asked_for_of_each_turn() -> None:
    answer = Answer("Paris, of course.", num_prompt_tokens=300, num_answer_tokens=11, ttft_s=0.5, total_s=1.5)
    table = table_of([Turn(answer, Moved(8_847_360.0, 0.02, {"push": 288.0}))])
    head, _, row = table.strip().splitlines()
    for column in ("prompt tokens", "KV moved", "way", "bytes", "transfer", "TTFT", "tokens/s", "answer"):
        assert column in head
    for figure in ("300", "288 tokens", "pushed", "8.8 MB", "20.0 ms", "500 ms", "10.0", "Paris, of course."):
        assert figure in row


def test_the_table_has_no_way_where_nothing_moved() -> None:
    answer = Answer("Paris, of course.", num_prompt_tokens=300, num_answer_tokens=11, ttft_s=0.5, total_s=1.5)
    row = table_of([Turn(answer, Moved())]).strip().splitlines()[-1]
    assert "0 tokens    -  0.0 MB" in row


def test_speed_is_zero_rather_than_wrong_when_there_is_too_little_to_measure() -> None:
    assert Answer("", 0, 0, ttft_s=1.0, total_s=1.0).tokens_per_s == 0.0
    assert Answer("a", 1, 1, ttft_s=1.0, total_s=2.0).tokens_per_s == 0.0
