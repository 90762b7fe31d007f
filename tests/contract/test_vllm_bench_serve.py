"""What load benchmarks take for granted of `vllm bench serve`, which is the real one here; the engine is a fake."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from typing import TYPE_CHECKING

import pytest

from kvshuttle.bench.load import (
    LoadGenerator,
    LoadOrder,
    LoadResult,
    load_arguments,
    parse_result,
    write_prompt_tokenizer,
    write_prompts,
)
from kvshuttle.emulate.model_dir import FIRST_WORD, write_model_dir
from kvshuttle.emulate.profile import load_profile
from support.fake_engine import DONE, FakeEngine, sse, stream

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NUM_PROMPTS, INPUT_TOKENS = 6, 1500
RATE = 1.6
"""Requests a second: so few that what a busy machine delays one by is little of what lies between two."""
DELAY_S = 0.5
USAGE = {"choices": [], "usage": {"completion_tokens": 3, "prompt_tokens": INPUT_TOKENS}}
EVENTS = [sse(" a"), sse(" b"), sse(" c"), b"data: " + json.dumps(USAGE).encode() + b"\n\n", DONE]


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    """On a loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    made = FakeEngine("engine")
    asyncio.run_coroutine_threadsafe(made.start(), loop).result(20)
    yield made
    asyncio.run_coroutine_threadsafe(made.kill(), loop).result(20)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(20)
    loop.close()


@pytest.fixture(scope="module")
def runs(engine: FakeEngine, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[LoadResult, list[list[int]]]]:
    """Results and prompts of three runs: one, the same again, one with another seed and other prompts."""
    path = tmp_path_factory.mktemp("load")
    write_model_dir(path / "model", load_profile("h200-tp8-qwen3-32b"))
    write_prompt_tokenizer(path / "tokenizer", path / "model")
    with LoadGenerator(env=os.environ, log_path=path / "load.log") as load:
        return {
            "first": run(load, engine, path, seed=0, first=100),
            "again": run(load, engine, path, seed=0, first=100),
            "other": run(load, engine, path, seed=1, first=200),
        }


def run(
    load: LoadGenerator, engine: FakeEngine, path: Path, *, seed: int, first: int
) -> tuple[LoadResult, list[list[int]]]:
    engine.calls.clear()
    engine.script.extend([stream(EVENTS, gap_s=0.02)] * NUM_PROMPTS)
    dataset, result = path / "prompts.jsonl", path / "result.json"
    write_prompts(dataset, first=first, num_prompts=NUM_PROMPTS, input_tokens=INPUT_TOKENS, output_tokens=3)
    url = f"http://127.0.0.1:{engine.port}"
    order = LoadOrder(url, path / "tokenizer", dataset, result, NUM_PROMPTS, INPUT_TOKENS, RATE, 1.0, seed)
    load.run(load_arguments(order), log_path=path / "run.log", timeout_s=300)
    return parse_result(result.read_bytes()), [call.body["prompt"] for call in engine.calls]


def test_every_request_is_in_the_result_with_its_answer(runs) -> None:
    result, _ = runs["first"]
    assert [" ".join(text.split()) for text in result.generated_texts] == ["a b c"] * NUM_PROMPTS
    assert (result.errors, result.output_lens) == ([""] * NUM_PROMPTS, [3] * NUM_PROMPTS)
    assert all(0 < ttft < latency for ttft, latency in zip(result.ttfts, result.latencies, strict=True))


def test_prompts_are_of_words_of_their_exact_length_and_all_different(runs) -> None:
    prompts = [prompt for name in ("first", "other") for prompt in runs[name][1]]
    assert {len(prompt) for prompt in prompts} == {INPUT_TOKENS}
    assert min(min(prompt) for prompt in prompts) >= FIRST_WORD
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 2 * NUM_PROMPTS


def test_numbers_name_prompts_and_seeds_name_arrivals(runs) -> None:
    assert sorted(runs["first"][1]) == sorted(runs["again"][1])
    first, again, other = ([at_s - result.start_times[0] for at_s in result.start_times] for result, _ in runs.values())
    assert first == pytest.approx(again, abs=DELAY_S)
    assert first != pytest.approx(other, abs=DELAY_S)


def test_instants_are_of_the_clock_of_traces(runs) -> None:
    import time

    latest_s = max(max(result.start_times) for result, _ in runs.values())
    assert 0 < time.monotonic() - latest_s < 600
