"""Engines of one machine tell each other when they compute: what profiles with contention need to know."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from io import BufferedRandom
    from pathlib import Path

_DIRECTORY = "neighbours"
_LOOK_AGAIN_S = 0.004
"""Between two looks at the neighbours: a tenth of the shortest step of a CPU or less, and hardly any work."""

_NOTHING_S = 1e-6


class Neighbours:
    """The workers of other engines on this machine, each with a file ``DIR/ENGINE/WORKER``. ``path``: our own.

    A worker holds a lock on its file while it computes, so that one that was killed no longer does.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._own = path.open("ab+")
        self._others: dict[Path, BufferedRandom] = {}

    @classmethod
    def of(cls, model_dir: Path) -> Neighbours:
        """Of this worker process, among engines that run the model in ``model_dir``. One engine's have one parent."""
        return cls(model_dir / _DIRECTORY / f"engine-{os.getppid()}" / f"worker-{os.getpid()}")

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Others see us compute meanwhile."""
        self._meet()
        fcntl.flock(self._own, fcntl.LOCK_EX)  # waits for others' looks at most
        try:
            yield
        finally:
            fcntl.flock(self._own, fcntl.LOCK_UN)

    def is_computing(self) -> bool:
        """Whether any of them is."""
        return any(_is_locked(file) for file in self._others.values())

    def close(self) -> None:
        """Give the files back; a worker has them until it ends."""
        for file in (self._own, *self._others.values()):
            file.close()

    def _meet(self) -> None:
        """Engines start and end while we run."""
        present = {path for path in self._path.parent.parent.glob("*/*") if path.parent != self._path.parent}
        for path in self._others.keys() - present:
            self._others.pop(path).close()
        for path in present - self._others.keys():
            with contextlib.suppress(FileNotFoundError):
                self._others[path] = path.open("rb+")


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


def _is_locked(file: BufferedRandom) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(file, fcntl.LOCK_UN)
    return False
