"""The fault wrapper: each fault does what it says, and the same seed does the same again."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from kvshuttle.errors import ConfigError, TransferFailed
from kvshuttle.transport import Operation, TransferStatus
from kvshuttle.transport.faulty import Faults, FaultyTransport
from kvshuttle.transport.memory import MemoryFabric, MemoryTransport
from support.transport_pairs import Pair, connected

if TYPE_CHECKING:
    import numpy as np

    from kvshuttle.transport import Transport

SIZE_BYTES = 4096
ALL = Faults(
    fail_post=0.2,
    fail_transfer=0.2,
    half_write=0.2,
    keep_release=0.3,
    drop_notification=0.2,
    duplicate_notification=0.2,
    reorder_notifications=0.5,
    delay_polls_max=4,
)


def faulty_pair(faults: Faults, seed: int = 0) -> Pair:
    fabric = MemoryFabric()

    def make(name: str) -> Transport:
        return FaultyTransport(MemoryTransport(fabric, name), faults=faults, rng=random.Random(f"{seed}{name}"))

    pair = connected(make, size_bytes=SIZE_BYTES)
    pair.reader.buffer[:] = 0
    pair.holder.buffer[:] = 1
    return pair


def everything(pair: Pair) -> tuple[np.ndarray, np.ndarray]:
    rows = [(offset, 1024) for offset in range(0, SIZE_BYTES, 1024)]
    return pair.reader.spans(*rows), pair.holder.spans(*rows)


def drive(seed: int) -> tuple[list[str], list[str], list[str]]:
    """A fixed conversation under all faults at once: what was injected on each side, and what was seen."""
    pair = faulty_pair(ALL, seed)
    seen: list[str] = []
    for index in range(40):
        try:
            transfer = pair.post(*everything(pair), Operation.READ, b"%d" % index)
        except TransferFailed:
            seen.append(f"{index} refused")
            continue
        polls = 0
        while pair.reader.transport.poll(transfer) is TransferStatus.PENDING:
            polls += 1
        releases = 0
        while not pair.reader.transport.release(transfer):
            releases += 1
        pair.turn()
        seen.append(f"{index} {pair.reader.transport.poll(transfer).value} {polls} {releases} {len(pair.received)}")
    pair.settle()
    traces = [list(side.transport.trace) for side in (pair.reader, pair.holder)]  # type: ignore[attr-defined]
    return traces[0], traces[1], seen


@pytest.mark.parametrize("seed", range(5))
def test_the_same_seed_gives_the_same_faults(seed: int) -> None:
    assert drive(seed) == drive(seed)


def test_different_seeds_give_different_faults() -> None:
    assert len({tuple(drive(seed)[0]) for seed in range(10)}) == 10


def test_every_fault_is_seen_and_named_in_the_trace() -> None:
    words = " ".join(" ".join(part) for seed in range(5) for part in drive(seed))
    for fault in ("refused", "fail", "half", "late", "kept", "drop", "duplicate", "reorder"):
        assert fault in words


def test_a_refused_post_raises_and_moves_nothing() -> None:
    pair = faulty_pair(Faults(fail_post=1.0))
    with pytest.raises(TransferFailed, match="injected"):
        pair.post(*everything(pair))
    assert not pair.reader.buffer.any()


def test_a_failed_transfer_moves_the_bytes_and_announces_nothing() -> None:
    pair = faulty_pair(Faults(fail_transfer=1.0))
    transfer = pair.post(*everything(pair), Operation.READ, b"never")
    assert pair.finish(transfer) is TransferStatus.FAILED
    assert transfer.error == "injected"
    assert pair.reader.buffer.all()
    pair.settle()
    assert not pair.received


def test_half_a_write_moves_the_first_half_and_says_the_whole_size() -> None:
    pair = faulty_pair(Faults(half_write=1.0))
    transfer = pair.post(*everything(pair))
    assert (transfer.num_descriptors, transfer.num_bytes) == (4, SIZE_BYTES)
    assert pair.finish(transfer) is TransferStatus.FAILED
    assert pair.reader.buffer[: SIZE_BYTES // 2].all()
    assert not pair.reader.buffer[SIZE_BYTES // 2 :].any()


def test_half_of_a_single_row_is_half_of_its_bytes() -> None:
    pair = faulty_pair(Faults(half_write=1.0))
    assert pair.finish(pair.post(pair.reader.spans((0, 1000)), pair.holder.spans((0, 1000)))) is TransferStatus.FAILED
    assert pair.reader.buffer.sum() == 500


def test_a_kept_release_says_false_although_the_transfer_has_ended() -> None:
    pair = faulty_pair(Faults(keep_release=1.0))
    transfer = pair.post(*everything(pair))
    assert pair.finish(transfer) is TransferStatus.DONE
    assert not pair.reader.transport.release(transfer)


def test_a_late_status_is_not_released_early_and_comes_in_the_end() -> None:
    pair = faulty_pair(Faults(delay_polls_max=50), seed=3)
    transfer = pair.post(*everything(pair))
    assert not pair.reader.transport.release(transfer)
    assert pair.finish(transfer) is TransferStatus.DONE
    assert pair.reader.transport.release(transfer)


@pytest.mark.parametrize(
    ("faults", "copies"), [(Faults(drop_notification=1.0), 0), (Faults(duplicate_notification=1.0), 2)]
)
def test_notifications_are_lost_or_doubled_at_the_receiver(faults: Faults, copies: int) -> None:
    pair = faulty_pair(faults)
    pair.reader.transport.notify(pair.peer, b"n")
    pair.settle()
    assert pair.received == [("reader", b"n")] * copies


def test_late_notifications_all_come_though_in_another_order() -> None:
    pair = faulty_pair(Faults(delay_polls_max=10, reorder_notifications=1.0), seed=1)
    sent = [b"%d" % index for index in range(30)]
    for message in sent:
        pair.reader.transport.notify(pair.peer, message)
    pair.settle()
    messages = [message for _, message in pair.received]
    assert sorted(messages) == sorted(sent)
    assert messages != sent


@pytest.mark.parametrize("faults", [{"fail_post": 1.1}, {"drop_notification": -0.1}, {"delay_polls_max": -1}])
def test_a_probability_that_is_none_is_refused_by_name(faults: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(faults))):
        Faults(**faults)  # type: ignore[arg-type]
