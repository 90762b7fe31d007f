"""What aiperf is asked to do, and its words about it as turns of conversations; aiperf itself is not needed."""

from __future__ import annotations

import gzip
import itertools
import json
from typing import TYPE_CHECKING, Any

import pytest

from kvshuttle.bench.aiperf import (
    AIPERF_VERSION,
    AiperfOrder,
    aiperf_arguments,
    dataset_text,
    ensure_aiperf,
    read_aiperf,
)
from kvshuttle.bench.talk import API_KEY, digest_of, user_text
from kvshuttle.bench.texts import emulated_words
from kvshuttle.bench.turns_figures import looks_since
from kvshuttle.bench.turns_plan import TurnsPlan
from kvshuttle.bench.turns_records import MemoryRecord
from kvshuttle.errors import LaunchFailed

if TYPE_CHECKING:
    from pathlib import Path

PLAN = TurnsPlan(
    conversations=2, turns=2, first_tokens=20, turn_tokens=10, output_tokens=4, think_s=0.5, clients=("aiperf",)
)


def line(number: int, turn_index: int, *, start_ns: int, error: dict[str, Any] | None = None, **metrics: float) -> str:
    """A line of ``profile_export.jsonl``, with fields that nobody reads."""
    metadata = {
        "conversation_id": str(number),
        "turn_index": turn_index,
        "x_request_id": f"req-{number}-{turn_index}",
        "x_correlation_id": f"session-{number}",
        "request_start_ns": start_ns,
        "benchmark_phase": "profiling",
        "worker_id": "worker",
    }
    values = {name: {"value": value, "unit": "ms"} for name, value in metrics.items()}
    return json.dumps({"metadata": metadata, "metrics": values, "error": error})


def written(directory: Path, lines: list[str], texts: dict[str, str]) -> Path:
    """A directory as a run leaves it."""
    data = [{"x_request_id": name, "response_text": text} for name, text in texts.items()]
    with gzip.open(directory / "profile_export.jsonl.gz", "wt") as file:
        file.write("".join(f"{each}\n" for each in lines))
    with gzip.open(directory / "outputs.json.gz", "wt") as file:
        json.dump({"schema_version": "1.0", "data": data}, file)
    return directory


def test_aiperf_says_what_the_other_client_says_and_pauses_as_long() -> None:
    first, second = map(json.loads, dataset_text(PLAN, emulated_words).splitlines())
    assert (first["session_id"], second["session_id"]) == ("0", "1")
    assert first["turns"] == [
        {"text": user_text(PLAN, 0, 1, emulated_words)},
        {"text": user_text(PLAN, 0, 2, emulated_words), "delay": 500},
    ]


@pytest.mark.parametrize("is_streaming", [True, False])
def test_all_conversations_run_at_once_under_a_header_with_the_servers_token_counts(
    tmp_path: Path, is_streaming: bool
) -> None:
    order = AiperfOrder("http://127.0.0.1:1", "m", "tokenizer", "cell", PLAN, is_streaming)
    argv = aiperf_arguments(order, tmp_path / "in.jsonl", tmp_path / "work")
    options = dict(itertools.pairwise(argv))
    assert argv[0] == "profile"
    assert options["--concurrency"] == options["--num-conversations"] == "2"
    assert options["--session-header"] == "x-conversation-id"
    assert options["--api-key"] == API_KEY
    assert json.loads(options["--extra-inputs"]) == {"temperature": 0, "max_tokens": 4, "cache_salt": "cell"}
    assert "--use-server-token-count" in argv
    assert ("--streaming" in argv) is is_streaming


def test_its_figures_become_turns_with_the_history_that_it_sent(tmp_path: Path) -> None:
    whole = {"input_sequence_length": 20, "output_sequence_length": 4, "request_latency": 900.0}
    lines = [
        line(1, 0, start_ns=7_000_000_000, time_to_first_token=300.0, **whole),
        line(0, 1, start_ns=8_500_000_000, time_to_first_token=150.0, **whole),
        line(0, 0, start_ns=6_000_000_000, **whole),
        line(1, 1, start_ns=9_000_000_000, error={"type": "HTTP", "message": "gone"}),
    ]
    raw = written(tmp_path, lines, {"req-0-0": "baba", "req-0-1": "bebe <wrong-kv>", "req-1-0": "bibi"})
    held = read_aiperf(raw, PLAN, emulated_words, "cell")
    assert [(r.conversation, r.turn) for r in held.turns] == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert [r.sent_at_s for r in held.turns] == [0.0, 2.5, 1.0, 3.0]
    assert [r.ttft_s for r in held.turns] == [-1.0, 0.15, 0.3, -1.0]
    assert [r.error for r in held.turns] == ["", "", "", "aiperf: HTTP: gone"]
    assert held.names == {"session-0", "session-1"}
    second = held.turns[1]
    assert (second.prompt_tokens, second.answer_tokens, second.total_s, second.is_wrong) == (20, 4, 0.9, True)
    assert second.tpot_s == pytest.approx(0.25)
    assert second.answer_digest == digest_of("bebe <wrong-kv>")
    messages = [
        {"role": "user", "content": user_text(PLAN, 0, 1, emulated_words)},
        {"role": "assistant", "content": "baba"},
        {"role": "user", "content": user_text(PLAN, 0, 2, emulated_words)},
    ]
    assert second.prompt_digest == digest_of(messages)


def test_what_aiperf_did_not_write_is_a_failure_that_names_the_directory(tmp_path: Path) -> None:
    with pytest.raises(LaunchFailed, match="what aiperf wrote cannot be read"):
        read_aiperf(tmp_path, PLAN, emulated_words, "cell")
    with pytest.raises(LaunchFailed, match="aiperf measured no request"):
        read_aiperf(written(tmp_path, [], {}), PLAN, emulated_words, "cell")


def test_an_aiperf_that_is_installed_is_not_installed_again(tmp_path: Path) -> None:
    directory = tmp_path / "clients" / f"aiperf-{AIPERF_VERSION}"
    directory.mkdir(parents=True)
    (directory / "complete").touch()
    said: list[str] = []
    assert ensure_aiperf(tmp_path, env={}, say=said.append) == directory / "bin" / "python"
    assert said == []


def test_looks_at_memory_are_dated_from_the_first_turn_on() -> None:
    looks = [MemoryRecord("cell", at_s, 1, 0, 0.0, 0.0) for at_s in (1.0, 5.0, 7.5)]
    assert [look.at_s for look in looks_since(looks, 5.0)] == [0.0, 2.5]
