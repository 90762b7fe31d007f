"""The load generator as a process: its orders, and how its failures are told."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvshuttle.bench.load import LoadGenerator
from kvshuttle.errors import LaunchFailed
from support.tiny_fleet import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

PROGRAM = """
import os, time
print("what libraries say when they are imported")
def run(argv):
    what, *rest = argv
    print("asked to", what, "by", os.getpid(), hash("prompt"))
    if what == "fail":
        raise ValueError("no such data set")
    if what == "hang":
        time.sleep(60)
    if what == "leave":
        server = os.getppid()
        print("from", server)
        if not os.fork():
            while not os.path.exists(rest[0]):
                time.sleep(0.01)
            os.kill(server, 9)
            os._exit(0)
    if what == "die":
        os.kill(os.getppid(), 9)
"""


@pytest.fixture
def load(tmp_path: Path) -> Iterator[LoadGenerator]:
    with LoadGenerator(env=os.environ, log_path=tmp_path / "load.log", program=PROGRAM) as generator:
        yield generator


def test_each_order_is_carried_out_by_a_process_of_its_own_with_equal_hashes(
    load: LoadGenerator, tmp_path: Path
) -> None:
    for name in ("first.log", "second.log"):
        load.run(["work"], log_path=tmp_path / name, timeout_s=60)
    first, second = ((tmp_path / name).read_text().split() for name in ("first.log", "second.log"))
    assert first[:3] == ["asked", "to", "work"]
    assert first[4] != second[4]
    assert first[5] == second[5]


def test_an_order_that_fails_tells_why_and_the_next_one_is_carried_out(load: LoadGenerator, tmp_path: Path) -> None:
    with pytest.raises(LaunchFailed, match=r"(?s)^the load generator failed.*ValueError: no such data set"):
        load.run(["fail"], log_path=tmp_path / "a.log", timeout_s=60)
    load.run(["work"], log_path=tmp_path / "b.log", timeout_s=60)
    assert "asked to work" in (tmp_path / "b.log").read_text()


@pytest.mark.parametrize(
    ("what", "timeout_s", "told"), [("hang", 1.6, "did not end within 2 s"), ("die", 60, "ended. The end of")]
)
def test_a_load_generator_that_is_lost_is_replaced(
    load: LoadGenerator, tmp_path: Path, what: str, timeout_s: float, told: str
) -> None:
    load.run(["work"], log_path=tmp_path / "a.log", timeout_s=60)
    with pytest.raises(LaunchFailed, match=f"the load generator {told}"):
        load.run([what], log_path=tmp_path / "a.log", timeout_s=timeout_s)
    load.run(["work"], log_path=tmp_path / "b.log", timeout_s=60)
    assert "asked to work" in (tmp_path / "b.log").read_text()


def test_a_load_generator_that_ends_between_two_orders_is_replaced(load: LoadGenerator, tmp_path: Path) -> None:
    load.run(["leave", str(tmp_path / "now")], log_path=tmp_path / "a.log", timeout_s=60)
    (tmp_path / "now").touch()
    server = int((tmp_path / "a.log").read_text().split("from ")[1].split()[0])
    stat = Path(f"/proc/{server}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z")
    with pytest.raises(LaunchFailed, match="the load generator ended"):
        load.run(["work"], log_path=tmp_path / "b.log", timeout_s=60)
    load.run(["work"], log_path=tmp_path / "c.log", timeout_s=60)
    assert "asked to work" in (tmp_path / "c.log").read_text()


def test_a_program_that_cannot_be_imported_tells_why(tmp_path: Path) -> None:
    with (
        LoadGenerator(env=os.environ, log_path=tmp_path / "load.log", program="import no_such_engine") as generator,
        pytest.raises(LaunchFailed, match=r"(?s)the load generator ended.*No module named 'no_such_engine'"),
    ):
        generator.run(["work"], log_path=tmp_path / "a.log", timeout_s=60)
