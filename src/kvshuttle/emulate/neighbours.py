"""Engines of one machine tell each other when they compute: what profiles with contention need to know."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_FILE = "neighbours"
_LOOK_AGAIN_S = 0.004
"""Between two looks at the neighbours: a tenth of the shortest step of a CPU or less, and hardly any work."""
_NOTHING_S = 1e-6
_PID_BITS = 22
"""Of the highest process id that Linux gives."""
_TO_THE_END = 0
_FLOCK = struct.Struct("@hhqqi4x")
"""Linux's ``struct flock``: kind of lock, where offsets count from, offset, length, process."""


class Neighbours:
    """All engines that share the file at ``path``. ``engine``: our own number in it, the same for all of its workers.

    A worker locks the byte of its engine while it computes. Locks end with their holder, so one that was killed
    computes no longer; one that is suspended in the middle of a step still does. Nobody waits: the locks are shared
    ones, and a look takes none.
    """

    def __init__(self, path: Path, engine: int) -> None:
        self._file = path.open("ab+")
        self._engine = engine

    @classmethod
    def of(cls, model_dir: Path) -> Neighbours:
        """Of this worker process, among engines that run the model in ``model_dir``.

        Workers of one engine have one parent, as have engine cores behind one API server, which count as one then.
        Containers that share the directory may give processes the same ids; hosts must not share it.
        """
        return cls(model_dir / _FILE, Path("/proc/self/ns/pid").stat().st_ino << _PID_BITS | os.getppid())

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Others see us compute meanwhile."""
        self._lock(fcntl.F_RDLCK)
        try:
            yield
        finally:
            self._lock(fcntl.F_UNLCK)

    def is_computing(self) -> bool:
        """Whether any other engine is."""
        # A length of 0 reaches to the end, and in front of the first byte there is nothing to ask for.
        spans = [(self._engine + 1, _TO_THE_END), *([(0, self._engine)] if self._engine else [])]
        return any(self._is_locked(start, length) for start, length in spans)

    def close(self) -> None:
        """Give the file back; a worker has it until it ends."""
        self._file.close()

    def _lock(self, kind: int) -> None:
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, self._engine, 1, 0))

    def _is_locked(self, start: int, length: int) -> bool:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
        kind = _FLOCK.unpack(fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, asked))[0]
        return bool(kind != fcntl.F_UNLCK)


def let_pass(
    work_s: float,
    *,
    since_s: float,
    slowdown: float,
    neighbours: Neighbours | None,
    now_s: Callable[[], float],
    sleep: Callable[[float], None],
) -> float:
    """Sleep until a step is over that began at ``since_s`` and takes ``work_s`` on a machine of its own.

    ``slowdown``: how many times slower it goes on while a neighbour computes. Returns how long it had to last.
    """
    is_slowed = neighbours is not None and slowdown > 1
    look_again_s = _LOOK_AGAIN_S if is_slowed else math.inf
    at_s, left_s, lost_s = since_s, work_s, 0.0
    while True:
        stretch = slowdown if is_slowed and neighbours is not None and neighbours.is_computing() else 1.0
        passed_s = now_s() - at_s
        at_s += passed_s
        done_s = min(passed_s / stretch, left_s)
        left_s -= done_s
        lost_s += done_s * (stretch - 1)
        if left_s < _NOTHING_S:
            return work_s + lost_s
        sleep(min(left_s * stretch, look_again_s))
