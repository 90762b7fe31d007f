"""The locked environment and the script that makes it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCKS = sorted((ROOT / "requirements").glob("*.lock"))
BREAK_VLLM = {"torchvision", "torchaudio", "torchcodec"}


def pins(lock: Path) -> list[str]:
    return [line for line in lock.read_text().splitlines() if line and not line.startswith("#")]


def test_there_are_locks() -> None:
    assert {lock.name for lock in LOCKS} == {"cpu.lock", "dev.lock", "torch.lock", "torch-cuda-libs.lock"}


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_every_package_is_pinned_to_one_version_by_name_alone(lock: Path) -> None:
    for line in pins(lock):
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!]+", line), line


def test_no_package_is_pinned_twice() -> None:
    names = [line.partition("==")[0].lower().replace("_", "-") for lock in LOCKS for line in pins(lock)]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_packages_that_break_vllms_import_are_not_locked() -> None:
    names = {line.partition("==")[0].lower() for lock in LOCKS for line in pins(lock)}
    assert names & BREAK_VLLM == set()


def test_the_setup_script_can_say_that_python_is_too_old() -> None:
    text = (ROOT / "scripts" / "setup.py").read_text()
    ast.parse(text, feature_version=(3, 6))
    head = text[: text.index("import argparse")]
    assert "sys.version_info < (3, 11)" in head


def test_the_setup_path_names_no_host() -> None:
    files = [ROOT / "Makefile", ROOT / ".ci" / "run", ROOT / "scripts" / "setup.py", *LOCKS]
    for file in files:
        assert not re.search(r"https?://", file.read_text()), file
