"""Engines of one machine see each other compute, and a step goes on the slower for it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from typing import TYPE_CHECKING

import pytest

from kvshuttle.emulate.neighbours import Neighbours, let_pass

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess
    from pathlib import Path


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Callable[[int], Neighbours]]:
    """Makes workers of an engine by its number."""
    with contextlib.ExitStack() as stack:
        yield lambda engine: stack.enter_context(contextlib.closing(Neighbours(tmp_path / "file", engine)))


@pytest.mark.parametrize(("mine", "other"), [(0, 1), (1, 0), (7, 3 << 40), (3 << 40, 7)])
def test_engines_see_each_other_compute(worker: Callable[[int], Neighbours], mine: int, other: int) -> None:
    one, another = worker(mine), worker(other)
    assert not one.is_computing()
    with another.computing():
        assert one.is_computing()
        assert not another.is_computing()
        with one.computing():
            assert one.is_computing()
            assert another.is_computing()
        assert not another.is_computing()
    assert not one.is_computing()


def test_looking_hides_nobody_and_locks_nothing(worker: Callable[[int], Neighbours]) -> None:
    one, other, third = worker(1), worker(2), worker(3)
    with other.computing():
        assert [each.is_computing() for each in (one, third, one, third)] == [True] * 4
    assert not any(each.is_computing() for each in (one, other, third))


def test_workers_of_one_engine_are_no_neighbours(worker: Callable[[int], Neighbours]) -> None:
    one, other, stranger = worker(5), worker(5), worker(6)
    with one.computing(), other.computing():
        assert not one.is_computing()
        assert not other.is_computing()
        assert stranger.is_computing()
    with one.computing():
        with other.computing():
            pass
        assert stranger.is_computing()


def compute_until_killed(path: Path, sender: Connection) -> None:
    with Neighbours(path, 2).computing():
        sender.send("computing")
        signal.pause()


def compute_by_its_own_name(model_dir: Path, sender: Connection) -> None:
    with Neighbours.of(model_dir).computing():
        sender.send("computing")
        signal.pause()


@contextlib.contextmanager
def other_process(target: Callable[[Path, Connection], None], path: Path) -> Iterator[BaseProcess]:
    """One that computes."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(path, sender))
    process.start()
    try:
        assert receiver.recv() == "computing"
        yield process
    finally:
        process.kill()
        process.join()
        process.close()
        receiver.close()
        sender.close()


def test_an_engine_that_is_killed_computes_no_longer(worker: Callable[[int], Neighbours], tmp_path: Path) -> None:
    one = worker(1)
    with other_process(compute_until_killed, tmp_path / "file") as other:
        assert one.is_computing()
        os.kill(other.pid or 0, signal.SIGKILL)
        other.join()
        assert not one.is_computing()


def test_engines_are_told_apart_by_their_parents(tmp_path: Path) -> None:
    """A child of ours has us as its parent, and we have another one."""
    with (
        other_process(compute_by_its_own_name, tmp_path),
        contextlib.closing(Neighbours.of(tmp_path)) as mine,
    ):
        assert mine.is_computing()


class Scene:
    """A clock that sleeping moves, and a neighbour that computes in the given spans."""

    def __init__(self, *spans: tuple[float, float]) -> None:
        self.at_s = 100.0
        self.num_sleeps = 0
        self._spans = spans

    def now_s(self) -> float:
        return self.at_s

    def sleep(self, length_s: float) -> None:
        self.at_s += length_s
        self.num_sleeps += 1

    def is_computing(self) -> bool:
        return any(start <= self.at_s - 100.0 < end for start, end in self._spans)

    def let_pass(self, work_s: float, slowdown: float, *, since_s: float = 100.0, is_alone: bool = False) -> float:
        neighbours = None if is_alone else self
        return let_pass(
            work_s,
            since_s=since_s,
            slowdown=slowdown,
            neighbours=neighbours,  # type: ignore[arg-type]
            now_s=self.now_s,
            sleep=self.sleep,
        )


@pytest.mark.parametrize(
    ("spans", "lasting_s"),
    [
        ((), 0.1),
        (((0.0, 1.0),), 0.15),
        (((0.0, 0.075),), 0.125),
        (((0.05, 1.0),), 0.125),
        (((0.0, 0.03), (0.06, 0.09)), 0.12),
    ],
)
def test_a_step_goes_on_slower_only_while_a_neighbour_computes(
    spans: tuple[tuple[float, float], ...], lasting_s: float
) -> None:
    scene = Scene(*spans)
    told_s = scene.let_pass(0.1, 1.5)
    assert told_s == pytest.approx(lasting_s, abs=0.005)  # it looks every 4 ms
    assert scene.at_s - 100.0 == pytest.approx(told_s)


def test_without_neighbours_or_slowing_a_step_is_slept_through_at_once() -> None:
    for scene, is_alone, slowdown in ((Scene((0.0, 1.0)), True, 1.5), (Scene((0.0, 1.0)), False, 1.0)):
        assert scene.let_pass(0.1, slowdown, is_alone=is_alone) == pytest.approx(0.1)
        assert scene.at_s == pytest.approx(100.1)
        assert scene.num_sleeps == 1


def test_what_emulating_took_is_part_of_the_step() -> None:
    scene = Scene()
    scene.at_s = 100.04
    assert scene.let_pass(0.1, 1.5, is_alone=True) == pytest.approx(0.1)
    assert scene.at_s == pytest.approx(100.1)
    late = Scene()
    late.at_s = 100.3
    assert late.let_pass(0.1, 1.5, is_alone=True) == pytest.approx(0.1)
    assert late.num_sleeps == 0
