"""A calibration: what it refuses, how times are read, what follows from them, and a whole one on made-up engines."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvshuttle.bench import calibrate, handoff_times, step_times
from kvshuttle.bench.calibrate import Subject, geometry_of, run_calibrate
from kvshuttle.bench.calibrate_plan import CalibratePlan
from kvshuttle.bench.calibration import (
    Calibration,
    HandOffTimes,
    slowdown_of_decoding,
    slowdown_of_prefill,
    thresholds,
)
from kvshuttle.bench.handoff_times import HandOffTimer
from kvshuttle.bench.legs import Driven, Pair
from kvshuttle.bench.plan import SystemName
from kvshuttle.bench.step_times import MeteredTimes, TracedTimes
from kvshuttle.bench.systems import SYSTEMS
from kvshuttle.cli import main
from kvshuttle.emulate.fit import TimedChunk
from kvshuttle.emulate.geometry import Geometry
from kvshuttle.emulate.profile import Contention, PrefillCost, load_profile
from kvshuttle.emulate.trace import Pass, PassedRequest
from kvshuttle.errors import ConfigError, TransportError
from kvshuttle.handoff.break_even import MAX_THRESHOLD_TOKENS
from support.grid_values import forward

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PAIR = Pair(SYSTEMS[SystemName.SHUTTLE_PULL], "http://p", "http://d", 1, None, "m")
CARD: Any = SimpleNamespace(
    fingerprint=SimpleNamespace(
        num_layers=30, num_kv_heads=3, head_size=64, tensor_parallel_size=1, kv_dtype="bfloat16"
    )
)
COST = PrefillCost(10.0, 0.5, 0.0001)
ONE = HandOffTimes(1.0, 2.0, 3.0)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--name", "My profile"], "--name: up to 100 small letters, digits, points and dashes, got 'My profile'"),
        (["--name", "a" * 101], "--name: up to 100 small letters"),
        (["--prompt-tokens", "12k"], "--prompt-tokens: whole numbers from 1 on, got 12k"),
        (["--prompt-tokens", "128", "--prompt-tokens", "256"], "--prompt-tokens: three different lengths or more"),
        (["--batches", "0"], "--batches: whole numbers from 1 on, got 0"),
        (["--repeats", "1"], "--repeats: 2 or more, got 1"),
        (["--step-overhead-ms", "inf"], "--step-overhead-ms: a finite number, got inf"),
        (["--step-overhead-ms", "-1"], "--step-overhead-ms: 0 or more"),
        (["--prefill", "http://127.0.0.1:1,127.0.0.1:2"], "--decode: a running pair is named by both engines"),
        (
            ["--prefill", "http://h:1", "--decode", "http://h:2,h:3"],
            "--prefill: prefill engine: the side channel's host:port is missing or malformed; write http://127.0.0.1:8100",
        ),
        (["--prefill", "http://h:x,h:2", "--decode", "http://h:2,h:3"], "--prefill: prefill engine: Port could not be"),
        (
            ["--prefill", "http://h:1,h:99999", "--decode", "http://h:2,h:3"],
            "--prefill: prefill engine: Port out of range 0-65535; write http://127.0.0.1:8100,127.0.0.1:14579 instead",
        ),
        (
            ["--prefill", "http://h h:1,h:2", "--decode", "http://h:2,h:3"],
            "--prefill: prefill engine: the URL is scheme, host and port only; write ",
        ),
        (
            ["--prefill", "http://h:1,h:2", "--decode", "http://h:3,h 2:3"],
            "--decode: decode engine: the side channel's host:port is missing or malformed",
        ),
        (
            ["--prefill", "http://h:1,h:2", "--decode", "http://,h:3"],
            "--decode: decode engine: the URL is scheme, host and port only",
        ),
        (
            ["--prefill", "https://h:1,h:2", "--decode", "http://h:2,h:3"],
            "--prefill: an engine is timed over http://, got 'https://h:1,h:2'",
        ),
        (["--batches", "33"], "--batches: up to 32, which engines that are started take at a time, got 33"),
        (
            ["--batches", "9" * 400],
            "--batches: whole numbers from 1 on, got 9999999999999999999999999999999999999999...",
        ),
        (["--contexts", str(10**12)], "--contexts: up to 1,000,000,000, got 1000000000000"),
        (["--contexts", "512", "--contexts", "0512"], "--contexts: each number once, got 512, 0512"),
        (["--repeats", str(10**22)], "--repeats: up to 10,000, got 1" + "0" * 22),
        (["--batches", "²"], "--batches: whole numbers from 1 on, got ²"),
        (
            ["--prefill", "http://h:1,h:2", "--decode", "http://h:3,h:4", "--chunk-tokens", "256"],
            "--prompt-tokens: 512 is more than one step computes (--chunk-tokens 256)",
        ),
    ],
)
def test_a_bad_option_is_told_with_its_fix(argv: list[str], told: str, tmp_path: Path, capsys) -> None:
    assert main(["bench", "calibrate", "--out", str(tmp_path / "out"), *argv]) == 2
    assert told in capsys.readouterr().err


class Trace:
    """A tracer with passes to take once."""

    def __init__(self, *passes: Pass) -> None:
        self.passes = list(passes)

    def take(self) -> list[Pass]:
        passes, self.passes = self.passes, []
        return passes


def test_a_trace_tells_each_chunk_of_a_prompt() -> None:
    trace: Any = Trace(forward(1.0, 1.5, ("a", 0, 1024)), forward(2.0, 2.25, ("a", 1024, 2048)))
    assert TracedTimes(trace).chunks(2048) == [TimedChunk(0, 1024, 500.0), TimedChunk(1024, 1024, 250.0)]


def test_only_steps_with_every_stream_decoding_count() -> None:
    both = ("a", 2048, 2049), ("b", 2049, 2050)
    trace: Any = Trace(
        forward(1.0, 1.5, ("a", 0, 2048), both[1]), forward(2.0, 2.25, *both), forward(3.0, 3.5, both[0])
    )
    assert TracedTimes(trace).decode_ms(2) == [250.0]


def metrics(num_prefills: int, prefill_s: float, num_between: int, between_s: float) -> str:
    series = {
        "vllm:request_prefill_time_seconds": (num_prefills, prefill_s),
        "vllm:inter_token_latency_seconds": (num_between, between_s),
    }
    return "\n".join(f"{name}_count {num}\n{name}_sum {total}" for name, (num, total) in series.items())


def test_metrics_tell_whole_steps_less_what_is_known_to_be_overhead(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = [metrics(1, 1.0, 0, 0.0), metrics(1, 1.0, 0, 0.0), metrics(2, 1.25, 10, 0.4)]
    monkeypatch.setattr(step_times, "fetch_metrics", lambda _: pages.pop(0) if len(pages) > 1 else pages[0])
    monkeypatch.setattr(step_times.time, "sleep", lambda _: None)
    times = MeteredTimes("http://p", 5.0)
    times.begin()
    (chunk,) = times.chunks(512)
    assert (chunk.before, chunk.num_tokens, chunk.took_ms) == (0, 512, pytest.approx(245.0))
    assert times.decode_ms(4) == [pytest.approx(35.0)]


@pytest.mark.parametrize(
    ("after", "overhead_ms", "error", "told"),
    [
        (metrics(3, 1.5, 0, 0.0), 0.0, TransportError, "http://p: computed other prompts meanwhile"),
        (metrics(2, 1.2, 0, 0.0), 250.0, ConfigError, "--step-overhead-ms: less than a whole step, which took 200 ms"),
    ],
)
def test_metrics_of_other_prompts_and_an_overhead_that_leaves_nothing_are_refused(
    after: str, overhead_ms: float, error: type[Exception], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = [metrics(1, 1.0, 0, 0.0), after]
    monkeypatch.setattr(step_times, "fetch_metrics", lambda _: pages.pop(0))
    times = MeteredTimes("http://p", overhead_ms)
    times.begin()
    with pytest.raises(error, match=told):
        times.chunks(512)


def test_an_engine_that_counts_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(step_times, "fetch_metrics", lambda _: metrics(1, 1.0, 0, 0.0))
    monkeypatch.setattr(step_times, "now_s", lambda: next(clock))
    monkeypatch.setattr(step_times.time, "sleep", lambda _: None)
    times = MeteredTimes("http://p", 0.0)
    times.begin()
    with pytest.raises(TransportError, match=r"http://p/metrics: vllm:request_prefill_time_seconds does not count"):
        times.chunks(512)


def connector_page(direction: str, num: int, post_s: float, wire_s: float, acquire_s: float) -> str:
    label = f'{{direction="{direction}"}}'
    return (
        f"kvshuttle:transfer_wire_seconds_count{label} {num}\nkvshuttle:transfer_wire_seconds_sum{label} {wire_s}\n"
        f"kvshuttle:transfer_post_seconds_sum{label} {post_s}\nkvshuttle:acquire_seconds_sum {acquire_s}\n"
    )


@pytest.mark.parametrize(
    ("is_push", "url", "direction", "acquire_ms"), [(False, "http://d", "read", 5.0), (True, "http://p", "write", 0.0)]
)
def test_a_hand_off_is_timed_by_who_moves_the_bytes(
    is_push: bool,
    url: str,
    direction: str,
    acquire_ms: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pages = [connector_page(direction, 1, 0.1, 0.2, 0.3), connector_page(direction, 2, 0.104, 0.21, 0.305)]
    asked: list[str] = []
    driven: list[Pair] = []

    def fetch(where: str) -> str:
        asked.append(where)
        return pages.pop(0)

    nudged: list[str] = []
    monkeypatch.setattr(handoff_times, "complete", lambda where, *_, **__: nudged.append(where))
    monkeypatch.setattr(handoff_times, "fetch_metrics", fetch)
    monkeypatch.setattr(handoff_times, "drive", lambda pair, *_, **__: driven.append(pair) or Driven())
    found = HandOffTimer(PAIR).hand_off([1, 2, 3], is_push=is_push)
    assert (found.post_ms, found.wire_ms, found.acquire_ms) == pytest.approx((4.0, 10.0, acquire_ms))
    assert asked == nudged == [url, url]
    assert driven[0].system.mode == ("push" if is_push else "pull")


def test_a_hand_off_that_failed_or_moved_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(handoff_times, "complete", lambda *_, **__: None)
    monkeypatch.setattr(handoff_times, "fetch_metrics", lambda _: "")
    monkeypatch.setattr(handoff_times, "now_s", lambda: next(clock))
    monkeypatch.setattr(handoff_times.time, "sleep", lambda _: None)
    monkeypatch.setattr(handoff_times, "drive", lambda *_, **__: Driven(error="gone"))
    with pytest.raises(TransportError, match="the push of 2 tokens failed: gone"):
        HandOffTimer(PAIR).hand_off([1, 2], is_push=True)
    monkeypatch.setattr(handoff_times, "drive", lambda *_, **__: Driven())
    with pytest.raises(TransportError, match="a prompt of 2 tokens was handed off, but no read counted"):
        HandOffTimer(PAIR).hand_off([1, 2], is_push=False)


def calibration(read_per_token_ms: float = 0.01) -> Calibration:
    """Of an engine that costs ``COST``, and of reads of 15 ms and so much for each token."""
    lengths = (128, 512, 2048)
    return Calibration(
        chunks=[TimedChunk(0, num, COST.step_ms([(0, num)])) for num in lengths],
        decode_ms={(1, 268): [[30.0]]},
        pulls={num: [HandOffTimes(5.0, 10 + read_per_token_ms * num, 5.0)] for num in lengths},
    )


def test_thresholds_follow_from_both_costs() -> None:
    found = calibration()
    suggested = thresholds(found, found.profile("mine", "made up", Geometry(30, 3, 64)))
    assert suggested.compute_per_token_s == pytest.approx(0.0005128, rel=1e-2)
    assert (suggested.read.fixed_s, suggested.read.per_token_s) == pytest.approx((0.015, 1e-5), rel=1e-6)
    assert suggested.num_tokens == 30  # 15 ms / (0.5128 - 0.01) ms


def test_where_computing_is_cheaper_than_reading_the_threshold_says_never() -> None:
    found = calibration(read_per_token_ms=1.0)
    profile = found.profile("mine", "made up", Geometry(30, 3, 64))
    assert thresholds(found, profile).num_tokens == MAX_THRESHOLD_TOKENS


def test_geometry_is_that_of_the_whole_engine() -> None:
    assert geometry_of(CARD) == Geometry(30, 3, 64, "bfloat16")
    sharded: Any = SimpleNamespace(
        fingerprint=SimpleNamespace(**{**vars(CARD.fingerprint), "num_kv_heads": 4, "tensor_parallel_size": 2})
    )
    assert geometry_of(sharded).num_kv_heads == 8


class Clockwork:
    """Engines whose steps take exactly what ``COST`` says, seen as ``complete`` and ``StepTimes`` see them."""

    what = "clockwork"
    knows_passes = False

    def __init__(self) -> None:
        self.computed: list[int] = []

    def begin(self) -> None:
        self.computed.clear()

    def complete(self, _url: str, prompt: list[int], **_: Any) -> dict[str, Any]:
        self.computed.append(len(prompt))
        return {}

    def chunks(self, _num_tokens: int) -> list[TimedChunk]:
        return [TimedChunk(0, num, COST.step_ms([(0, num)])) for num in self.computed]

    def resumed(self) -> list[TimedChunk]:
        return []

    def decode_ms(self, num_seqs: int) -> list[float]:
        return [30.0 + num_seqs]

    def passes(self) -> list[Pass]:
        raise AssertionError("nobody asks who knows none")


@pytest.fixture
def clockwork(monkeypatch: pytest.MonkeyPatch) -> Clockwork:
    """In place of a running pair."""
    made = Clockwork()

    @contextlib.contextmanager
    def pair(_plan: CalibratePlan) -> Iterator[Subject]:
        yield Subject(PAIR, CARD, made, made)

    hand_off: Callable[..., HandOffTimes] = lambda *_, **__: ONE  # noqa: E731 - one line for a double
    monkeypatch.setattr(calibrate, "running_pair", pair)
    monkeypatch.setattr(calibrate, "complete", made.complete)
    monkeypatch.setattr(calibrate, "stream", made.complete)
    monkeypatch.setattr(calibrate.HandOffTimer, "hand_off", hand_off)
    return made


PLAN = CalibratePlan(
    prefill="http://p:1,p:2",
    decode="http://d:1,d:2",
    name="mine",
    prompt_tokens=("64", "128", "256"),
    contexts=("16", "32"),
    batches=("1", "2"),
)


@pytest.mark.usefixtures("clockwork")
def test_a_calibration_writes_a_profile_that_loads_and_says_what_to_set(tmp_path: Path) -> None:
    said: list[str] = []
    path = run_calibrate(PLAN, tmp_path, env={}, say=said.append)
    profile = load_profile(str(path))
    assert (profile.name, profile.geometry) == ("mine", Geometry(30, 3, 64))
    assert profile.prefill.per_token_ms == pytest.approx(0.5, rel=0.01)
    assert profile.decode.contexts == (24, 40)
    assert profile.decode.steps_ms == ((31.0, 31.0), (32.0, 32.0))
    assert "kvshuttle bench calibrate" in profile.provenance
    values = json.loads((tmp_path / "calibration.json").read_text())
    assert values["kv_recompute_threshold"] == values["recompute_threshold_tokens"] == 16
    assert len(values["pull_ms"]) == len(values["push_ms"]) == 12
    assert profile.contention is None
    page = (tmp_path / "calibration.md").read_text()
    assert "kv_recompute_threshold = 16" in page
    assert "| 0 | 256 | 144.6 (144.6 to 144.6) |" in page
    assert page in said


def test_an_engine_that_others_use_is_refused(clockwork: Clockwork, tmp_path: Path) -> None:
    clockwork.begin = lambda: clockwork.computed.append(5)  # type: ignore[method-assign]
    with pytest.raises(TransportError, match="http://p: computed other prompts meanwhile"):
        run_calibrate(PLAN, tmp_path, env={}, say=lambda _: None)


def test_a_place_without_steps_is_named(clockwork: Clockwork, tmp_path: Path) -> None:
    clockwork.decode_ms = lambda _num: []  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="decode: no step of 1 requests at 24 tokens was measured; give more --steps"):
        run_calibrate(replace(PLAN, repeats=2), tmp_path, env={}, say=lambda _: None)


def test_passes_of_several_prompts_are_no_chunks() -> None:
    two = Pass(1.0, 2.0, 1.0, 0.0, (PassedRequest("a", 0, 8, 8), PassedRequest("b", 0, 8, 8)))
    trace: Any = Trace(two)
    assert TracedTimes(trace).chunks(8) == []


def test_what_a_decode_engine_computes_of_a_prompt_that_was_handed_to_it_is_a_chunk() -> None:
    trace: Any = Trace(
        forward(1.0, 1.5, ("nudge", 0, 8)), forward(2.0, 2.25, ("a", 1023, 1024)), forward(3.0, 3.1, ("a", 2048, 2049))
    )
    assert TracedTimes(trace).resumed() == [TimedChunk(1023, 1, 250.0)]


def test_contention_is_told_from_steps_inside_anothers_passes_and_steps_that_meet_none() -> None:
    prompts = [forward(10.0, 12.0, ("p", 0, 1024)), forward(12.0, 13.0, ("p", 1024, 2048))]
    decoding = [
        forward(9.0, 9.1, ("d", 2048, 2049)),
        forward(9.9, 10.8, ("d", 2049, 2050)),  # half of it alone
        forward(10.8, 11.0, ("d", 2050, 2051)),
        forward(11.0, 11.9, ("d", 0, 2048)),  # no decoding
        forward(12.1, 12.4, ("d", 2051, 2052)),
        forward(13.0, 13.1, ("d", 2052, 2053)),
    ]
    assert slowdown_of_decoding(prompts, decoding) == pytest.approx(2.5)
    assert slowdown_of_decoding(prompts, decoding[:2]) is None


def test_a_prompt_is_slowed_only_for_as_long_as_the_other_engine_computes() -> None:
    # 3 s, of which 1.8 s beside others; 2.5 s alone, of which 1.2 s went on undisturbed: 1.3 s of work took 1.8 s.
    prompts = [forward(10.0, 12.0, ("p", 0, 1024)), forward(12.5, 13.5, ("p", 1024, 2048))]
    others = [
        forward(9.0, 11.0, ("d", 2048, 2049)),
        forward(11.9, 12.6, ("d", 2049, 2050)),
        forward(12.8, 13.4, ("d", 2047, 2048)),
    ]
    assert slowdown_of_prefill(prompts, others, 2500.0) == pytest.approx(1.8 / 1.3)
    assert slowdown_of_prefill([], others, 2500.0) is None
    assert slowdown_of_prefill(prompts, [], 2500.0) is None
    assert slowdown_of_prefill(prompts, others, 1000.0) is None


class SharedClockwork(Clockwork):
    """Engines of one machine: beside decoding a prompt goes on at two thirds of its pace, and steps take twice as long.

    A prompt's last token alone takes what it costs.
    """

    knows_passes = True

    def resumed(self) -> list[TimedChunk]:
        assert not self.computed, "from the beginning of the hand-off on"
        return [TimedChunk(63, 1, COST.step_ms([(63, 1)]))]

    def passes(self) -> list[Pass]:
        end_s = 1.0 + 1.5 * COST.step_ms([(0, 256)]) / 1000
        if 256 in self.computed:
            return [forward(1.0, end_s, ("p", 0, 256))]
        return [
            forward(0.9, 0.95, ("d", 2048, 2049)),
            forward(1.0, 1.1, ("d", 2049, 2050)),
            forward(1.1, end_s + 0.2, ("d", 2050, 2051)),
        ]


def test_a_pair_on_one_machine_is_timed_beside_each_other_too(
    clockwork: Clockwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = SharedClockwork(), SharedClockwork()

    @contextlib.contextmanager
    def pair(_plan: CalibratePlan) -> Iterator[Subject]:
        yield Subject(PAIR, CARD, prefill, decode)

    monkeypatch.setattr(calibrate, "running_pair", pair)
    monkeypatch.setattr(calibrate, "complete", prefill.complete)
    monkeypatch.setattr(calibrate, "stream", decode.complete)
    profile = load_profile(str(run_calibrate(PLAN, tmp_path, env={}, say=lambda _: None)))
    assert profile.contention == Contention(1.5, 2.0)
    assert "Contention: one stream decoded beside one prompt of the longest" in profile.provenance.replace("\n", " ")
    page = (tmp_path / "calibration.md").read_text()
    assert "| Decode steps, while the other engine computes a prompt | 2.00 | 2.00 to 2.00 |" in page
    assert "| 63 | 1 | 10.5 (10.5 to 10.5) |" in page
    values = json.loads((tmp_path / "calibration.json").read_text())
    assert values["decode_slowed"] == [pytest.approx(2.0)] * 8
    # What a token costs is taken of whole prompts, not of last tokens.
    assert values["compute_per_token_ms"] == pytest.approx(0.5 + 0.0001 * 64, rel=0.005)


def test_a_pair_whose_passes_never_met_is_told_what_to_change(
    clockwork: Clockwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clockwork.knows_passes = True
    monkeypatch.setattr(clockwork, "passes", list)
    said: list[str] = []
    profile = load_profile(str(run_calibrate(PLAN, tmp_path, env={}, say=said.append)))
    assert profile.contention is None
    assert "Contention: not measured." in profile.provenance.replace("\n", " ")
    told = "no decode step lay within the computing of 256 tokens; give a longer one of --prompt-tokens"
    assert any(told in each for each in said)
