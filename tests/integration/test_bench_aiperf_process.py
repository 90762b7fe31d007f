"""How aiperf is run: a process that does not outlive us, whose files are kept compressed. A script stands in for it."""

from __future__ import annotations

import gzip
import os
from typing import TYPE_CHECKING

import pytest

from kvshuttle.bench.aiperf import AiperfOrder, run_aiperf
from kvshuttle.bench.texts import emulated_words
from kvshuttle.bench.turns_plan import TurnsPlan
from kvshuttle.errors import LaunchFailed

if TYPE_CHECKING:
    from pathlib import Path

PLAN = TurnsPlan(turns=1, first_tokens=5)
FIND_DIRECTORY = 'while [ "$1" != --output-artifact-dir ]; do shift; done; mkdir -p "$2"; cd "$2"; '
WRITE = "echo record > profile_export.jsonl; echo texts > outputs.json; "


def script(tmp_path: Path, text: str) -> Path:
    """Something that is started in the place of a Python."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{FIND_DIRECTORY}{text}\n")
    path.chmod(0o755)
    return path


def run(tmp_path: Path, text: str) -> Path:
    """Returns the directory of what it wrote."""
    raw_dir = tmp_path / "raw" / "cell"
    order = AiperfOrder("http://127.0.0.1:1", "m", "tokenizer", "cell", PLAN, is_streaming=True)
    run_aiperf(script(tmp_path, text), order, emulated_words, raw_dir, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    return raw_dir


def test_what_it_wrote_and_was_asked_is_kept_compressed(tmp_path: Path) -> None:
    raw_dir = run(tmp_path, f"{WRITE}echo offline:$HF_HUB_OFFLINE; echo summary > profile_export_aiperf.json")
    assert {path.name for path in raw_dir.iterdir()} == {
        "aiperf.log.gz",
        "conversations.jsonl.gz",
        "outputs.json.gz",
        "profile_export.jsonl.gz",
        "profile_export_aiperf.json.gz",
    }
    assert gzip.decompress((raw_dir / "profile_export.jsonl.gz").read_bytes()) == b"record\n"
    assert gzip.decompress((raw_dir / "aiperf.log.gz").read_bytes()) == b"offline:\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [("echo no such model; exit 3", "exit code 3(.|\n)*no such model"), (WRITE, "wrote no profile_export_aiperf.json")],
)
def test_a_run_that_fails_shows_the_end_of_its_log(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(LaunchFailed, match=told):
        run(tmp_path, text)
