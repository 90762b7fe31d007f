"""How the load generator is started, and what is read of what it wrote."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path

import pytest

from kvshuttle.bench.load import LoadOrder, load_arguments, parse_result, write_prompt_tokenizer, write_prompts
from kvshuttle.emulate.model_dir import END, FIRST_WORD, VOCAB_SIZE, write_model_dir
from kvshuttle.emulate.profile import load_profile
from kvshuttle.errors import LaunchFailed

ORDER = LoadOrder("http://127.0.0.1:1", Path("model"), Path("in.jsonl"), Path("raw/cell.json"), 16, 2048, 0.25, 1.0, 7)
RESULT = {
    "duration": 3.5,
    "completed": 1,
    "request_rate": 0.25,
    "start_times": [1.0, 2.0],
    "ttfts": [0.5, 0.0],
    "latencies": [1.5, 0.0],
    "output_lens": [4, 0],
    "input_lens": [2048, 2048],
    "generated_texts": ["a", ""],
    "errors": ["", "Traceback\nOSError: gone"],
    "mean_ttft_ms": 500.0,
}


def options_of(order: LoadOrder) -> dict[str, str]:
    return {name: value for name, value in itertools.pairwise(load_arguments(order)) if name.startswith("--")}


def test_the_load_generator_keeps_every_request_and_sends_at_the_plans_rate() -> None:
    assert {"--save-result", "--save-detailed", "--no-self-timed"} <= set(load_arguments(ORDER))
    options = options_of(ORDER)
    assert (options["--base-url"], options["--request-rate"], options["--seed"]) == ("http://127.0.0.1:1", "0.25", "7")
    assert (options["--result-dir"], options["--result-filename"]) == ("raw", "cell.json")
    assert options["--temperature"] == "0"
    assert options_of(dataclasses.replace(ORDER, rate=math.inf))["--request-rate"] == "inf"


def test_each_prompt_has_a_number_of_its_own_and_one_piece(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    write_prompts(path, first=300, num_prompts=3, input_tokens=2048, output_tokens=16)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["hash_ids"] for line in lines] == [[300], [301], [302]]
    assert {(line["input_length"], line["output_length"]) for line in lines} == {(2048, 16)}
    assert options_of(ORDER)["--timed-trace-chunk-hash-size"] == "2048"


def test_prompts_are_drawn_from_words_only(tmp_path: Path) -> None:
    write_model_dir(tmp_path / "model", load_profile("h200-tp8-qwen3-32b"))
    write_prompt_tokenizer(tmp_path / "tokenizer", tmp_path / "model")
    written = json.loads((tmp_path / "tokenizer" / "tokenizer.json").read_text())
    assert sorted(written["model"]["vocab"].values()) == [END, *range(FIRST_WORD, VOCAB_SIZE)]
    assert [(token["id"], token["special"]) for token in written["added_tokens"]] == [(END, True)]
    assert (tmp_path / "tokenizer" / "config.json").exists()


def test_what_the_load_generator_wrote_is_read_request_by_request() -> None:
    result = parse_result(json.dumps(RESULT).encode())
    assert (result.duration, result.ttfts, result.errors[1]) == (3.5, [0.5, 0.0], "Traceback\nOSError: gone")


@pytest.mark.parametrize("broken", [b"", b"[]", json.dumps({**RESULT, "ttfts": [0.5]}).encode()])
def test_a_result_that_cannot_be_read_is_a_failure_of_the_load_generator(broken: bytes) -> None:
    with pytest.raises(LaunchFailed, match=r"^the load generator's result cannot be read"):
        parse_result(broken)
