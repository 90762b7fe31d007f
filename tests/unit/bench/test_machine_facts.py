"""What a run depends on, kept also where it goes on with something else."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from kvshuttle.bench.machine_facts import joined_facts, write_facts
from kvshuttle.emulate.profile import load_profile
from kvshuttle.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def facts(commit: str, numpy: str = "2.1", **more: Any) -> dict[str, Any]:
    return {"date": "2026-01-02", "cores": 2, "commit": commit, "packages": {"numpy": numpy}, "profile": None, **more}


def test_a_run_that_goes_on_tells_every_commit_and_version_that_it_was_measured_with() -> None:
    joined = joined_facts(facts("aaa"), facts("bbb", "2.2"))
    assert (joined["commit"], joined["date"]) == ("aaa, later bbb", "2026-01-02")
    assert joined["packages"] == {"numpy": "2.1, later 2.2"}
    again = joined_facts(joined, facts("aaa", "2.2"))
    assert again == {**joined, "packages": {"numpy": "2.1, later 2.2"}}
    assert joined_facts(again, facts(""))["commit"] == "aaa, later bbb, later none"


def test_another_accelerator_is_refused() -> None:
    small, large = ({"name": "p", "geometry": {"num_layers": num}} for num in (1, 2))
    assert joined_facts(facts("a", profile=small), facts("a", profile=small))["profile"] == small
    with pytest.raises(ConfigError, match="profile: it has changed since the run in --out began"):
        joined_facts(facts("a", profile=small), facts("a", profile=large))


def test_facts_of_a_run_that_has_not_begun_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    slow, fast = (load_profile("h200-tp8-qwen3-32b").slowed(scale) for scale in (4, 1))
    write_facts(path, slow, is_continued=False)
    write_facts(path, fast, is_continued=False)
    assert json.loads(path.read_text())["profile"]["name"] == "h200-tp8-qwen3-32b"
    write_facts(path, fast, is_continued=True)
    with pytest.raises(ConfigError, match="profile"):
        write_facts(path, slow, is_continued=True)
