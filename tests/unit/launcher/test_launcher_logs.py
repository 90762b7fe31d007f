"""Ends of logs, and the advice that goes with well-known ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvshuttle.launcher.logs import advice_for, tail_of

if TYPE_CHECKING:
    from pathlib import Path


def test_the_tail_is_the_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("".join(f"line {number}\n" for number in range(100)))
    assert tail_of(log, num_lines=2) == "line 98\nline 99"


def test_a_huge_log_is_not_read_whole(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("x" * 1_000_000 + "\nend\n")
    assert len(tail_of(log, num_lines=30)) < 70_000
    assert tail_of(log, num_lines=1) == "end"


def test_progress_bars_count_as_the_line_they_left_standing(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(b"  0%\r 50%\r100%\n\n\nnext\n")
    assert tail_of(log, num_lines=5) == "100%\nnext"


def test_bytes_that_are_no_text_do_not_hurt(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(b"\xff\xfe bad\n")
    assert "bad" in tail_of(log, num_lines=5)


def test_a_missing_log_is_said_to_be_missing(tmp_path: Path) -> None:
    assert tail_of(tmp_path / "none.log", num_lines=5).startswith("(no log: ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("OSError: [Errno 98] Address already in use", "another process has the port"),
        ("ValueError: No available memory for the cache blocks.", "lower --kv-cache-gib"),
        ("4.0 GiB KV cache is needed, which is larger than the available", "--max-model-len"),
        ("api_server.py: error: unrecognized arguments: --frobnicate", "--engine-arg"),
        ("ModuleNotFoundError: No module named 'vllm'", "make serve"),
        ("RuntimeError: operator torchvision::nms does not exist", "pip uninstall torchvision"),
    ],
)
def test_known_failures_come_with_what_to_do(text: str, expected: str) -> None:
    advice = advice_for(f"some\n{text}\nmore")
    assert advice is not None
    assert expected in advice


def test_unknown_failures_come_without_advice() -> None:
    assert advice_for("KeyError: 'x'") is None
