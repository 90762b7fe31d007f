"""The state file."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec
import pytest

from kvshuttle.launcher.state import FleetState, ProcessState, RestartCommand, read_state, write_state

if TYPE_CHECKING:
    from pathlib import Path

STATE = FleetState(
    version=1,
    launcher_pid=10,
    model="m",
    endpoint="http://127.0.0.1:8000",
    processes=[
        ProcessState(
            name="decode-0",
            role="decode",
            status="healthy",
            url="http://127.0.0.1:20001",
            side_channel="127.0.0.1:20002",
            pid=11,
            cores=[1],
            num_starts=1,
            log="/logs/decode-0.log",
            restart=RestartCommand(["python", "-m", "x"], {"A": "1"}),
        )
    ],
)


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "state.json"
    write_state(path, STATE)
    assert read_state(path) == STATE


def test_it_is_json_that_scripts_can_read_and_only_its_owner_may(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_state(path, STATE)
    (process,) = json.loads(path.read_text())["processes"]
    assert (process["role"], process["side_channel"], process["restart"]["argv"][0]) == (
        "decode",
        "127.0.0.1:20002",
        "python",
    )
    assert path.stat().st_mode & 0o777 == 0o600


def test_it_is_replaced_as_a_whole_and_nothing_stays_behind(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_state(path, STATE)
    with path.open("rb") as held_open:
        write_state(path, msgspec.structs.replace(STATE, processes=[]))
        assert msgspec.json.decode(held_open.read(), type=FleetState) == STATE
    assert read_state(path).processes == []
    assert list(tmp_path.iterdir()) == [path]


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_text("[]")
    with pytest.raises(msgspec.DecodeError):
        read_state(path)
