"""Follows the trace of one emulated engine while it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvshuttle.emulate.trace import Pass, read_trace

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(slots=True)
class Tracer:
    """Reads what an engine's worker has appended to its trace since the last look."""

    directory: Path
    _path: Path | None = None
    _offset: int = 0

    def take(self) -> list[Pass]:
        """The passes since the last call; none when the engine has not run any yet."""
        if self._path is None:
            # A directory keeps traces of earlier starts; the newest is of the engine that runs.
            paths = sorted(self.directory.glob("*.jsonl"), key=lambda path: path.stat().st_mtime)
            if not paths:
                return []
            self._path = paths[-1]
        passes, self._offset = read_trace(self._path, offset=self._offset)
        return passes
