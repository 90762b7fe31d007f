"""The state file: what runs where, as JSON, for scripts and tests. It is replaced as a whole, never half written."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from pathlib import Path

STATE_VERSION = 1


class RestartCommand(msgspec.Struct, frozen=True):
    """How to start a process by hand. ``env`` is what to add to the environment the launcher was started in."""

    argv: list[str]
    env: dict[str, str]


class ProcessState(msgspec.Struct, frozen=True):
    """One process. ``status``: starting, healthy or dead. ``side_channel``: ``host:port``, null for the router."""

    name: str
    role: str
    status: str
    url: str
    side_channel: str | None
    pid: int
    """Also the number of its process group: the engine's core and workers belong to it."""
    cores: list[int]
    num_starts: int
    log: str
    restart: RestartCommand


class FleetState(msgspec.Struct, frozen=True):
    """Everything that one launcher runs. ``endpoint``: where clients go; null without a router."""

    version: int
    launcher_pid: int
    model: str
    endpoint: str | None
    processes: list[ProcessState]


def write_state(path: Path, state: FleetState) -> None:
    """Replace the file at ``path``. Only its owner may read it: environments can hold secrets."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as file:  # noqa: PTH123 - a descriptor, not a path
        file.write(msgspec.json.format(msgspec.json.encode(state)) + b"\n")
    part.replace(path)


def read_state(path: Path) -> FleetState:
    """The state a launcher last wrote. Raises ``OSError`` or, on foreign content, ``msgspec.DecodeError``."""
    return msgspec.json.decode(path.read_bytes(), type=FleetState)
