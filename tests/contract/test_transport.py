"""What every transport must do: one suite over the in-process fake, the fault wrapper without faults, and NIXL."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvshuttle.errors import LocalProtocolError, PeerUnreachable, TransferFailed, TransportError
from kvshuttle.transport import Operation, PeerName, TransferStatus
from support.transport_pairs import MIB, Pair, connected, faultless_maker, memory_maker, nixl_maker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from kvshuttle.transport import Transport

MAKERS = {"memory": memory_maker, "faultless": faultless_maker, "nixl": nixl_maker}


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.nixl if name == "nixl" else ()) for name in MAKERS])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Transport]]:
    """Makes agents of one kind and closes them at the end."""
    if request.param == "nixl":
        pytest.importorskip("nixl_cu12", reason="NIXL is not installed")
    maker = MAKERS[request.param]()
    made: list[Transport] = []

    def make_and_keep(name: str) -> Transport:
        made.append(maker(name))
        return made[-1]

    yield make_and_keep
    for transport in made:
        transport.close()


@pytest.fixture
def pair(make: Callable[[str], Transport]) -> Pair:
    return connected(make)


def random_rows(pair: Pair, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Non-overlapping local spans and arbitrary remote ones, in random order and of random lengths."""
    rng = random.Random(seed)
    num_rows = rng.choice((1, 2, 7, 64, 300))
    room = MIB // num_rows
    lengths = [rng.randint(1, room) for _ in range(num_rows)]
    slots = rng.sample(range(num_rows), num_rows)
    local = pair.reader.spans(
        *((slot * room + rng.randint(0, room - n), n) for slot, n in zip(slots, lengths, strict=True))
    )
    remote = pair.holder.spans(*((rng.randint(0, MIB - n), n) for n in lengths))
    return local, remote


def copied(target: NDArray[np.uint8], to: NDArray[np.int64], source: NDArray[np.uint8], origin: NDArray[np.int64]):
    """``target`` as it must look after copying each row."""
    expected = target.copy()
    for (to_address, length), (from_address, _) in zip(to.tolist(), origin.tolist(), strict=True):
        at, begin = to_address - target.ctypes.data, from_address - source.ctypes.data
        expected[at : at + length] = source[begin : begin + length]
    return expected


@pytest.mark.parametrize("seed", range(8))
def test_a_read_copies_exactly_the_named_spans(pair: Pair, seed: int) -> None:
    local, remote = random_rows(pair, seed)
    expected = copied(pair.reader.buffer, local, pair.holder.buffer, remote)
    untouched = pair.holder.buffer.copy()
    assert pair.finish(pair.post(local, remote)) is TransferStatus.DONE
    assert np.array_equal(pair.reader.buffer, expected)
    assert np.array_equal(pair.holder.buffer, untouched)


@pytest.mark.parametrize("seed", range(8))
def test_a_write_copies_exactly_the_named_spans(pair: Pair, seed: int) -> None:
    local, remote = random_rows(pair, seed)
    # Here the remote side is the target, so it is the one whose spans must not overlap.
    local, remote = (
        local - [pair.reader.address, 0] + [pair.holder.address, 0],
        remote - [pair.holder.address, 0] + [pair.reader.address, 0],
    )
    expected = copied(pair.holder.buffer, local, pair.reader.buffer, remote)
    transfer = pair.post(remote, local, Operation.WRITE, b"written")
    assert pair.finish(transfer) is TransferStatus.DONE
    pair.wait_for(lambda: bool(pair.received))
    assert np.array_equal(pair.holder.buffer, expected)


def test_several_transfers_run_side_by_side(pair: Pair) -> None:
    expected = pair.holder.buffer.copy()
    part = MIB // 16
    order = random.Random(1).sample(range(16), 16)
    transfers = [pair.post(pair.reader.spans((i * part, part)), pair.holder.spans((i * part, part))) for i in order]
    assert {pair.finish(transfer) for transfer in reversed(transfers)} == {TransferStatus.DONE}
    assert np.array_equal(pair.reader.buffer, expected)


def test_a_transfer_of_64_mib_arrives_whole(make: Callable[[str], Transport]) -> None:
    pair = connected(make, size_bytes=64 * MIB)
    transfer = pair.post(pair.reader.spans((0, 64 * MIB)), pair.holder.spans((0, 64 * MIB)))
    assert pair.finish(transfer) is TransferStatus.DONE
    assert np.array_equal(pair.reader.buffer, pair.holder.buffer)
    assert (transfer.num_bytes, transfer.num_descriptors) == (64 * MIB, 1)


def test_a_transfer_records_what_it_cost(pair: Pair) -> None:
    transfer = pair.post(pair.reader.spans((0, 10), (20, 30)), pair.holder.spans((0, 10), (50, 30)))
    assert pair.finish(transfer) is TransferStatus.DONE
    assert (transfer.num_descriptors, transfer.num_bytes, transfer.error) == (2, 40, "")
    assert transfer.wire_s is not None
    assert 0 <= transfer.wire_s < 30
    assert 0 <= transfer.post_s < 30
    assert "descriptors=2 bytes=40 done" in repr(transfer)


def test_a_notification_comes_once_and_after_the_data(make: Callable[[str], Transport]) -> None:
    pair = connected(make, size_bytes=8 * MIB)
    expected = pair.reader.buffer.copy()
    everything = (0, 8 * MIB)
    transfer = pair.post(pair.reader.spans(everything), pair.holder.spans(everything), Operation.WRITE, b"here it is")

    def has_come() -> bool:
        pair.reader.transport.poll(transfer)
        return bool(pair.received)

    pair.wait_for(has_come)
    assert np.array_equal(pair.holder.buffer, expected)
    pair.settle()
    assert pair.received == [(pair.reader.transport.name, b"here it is")]


def test_plain_notifications_come_once_in_both_directions(pair: Pair) -> None:
    back = pair.holder.transport.add_peer(pair.reader.transport.metadata())
    answers: list[tuple[str, bytes]] = []

    def have_come() -> bool:
        answers.extend(pair.reader.transport.take_notifications())
        return len(pair.received) >= 20 and len(answers) >= 1

    for index in range(20):
        pair.reader.transport.notify(pair.peer, b"message %d" % index)
    pair.holder.transport.notify(back, b"\x00binary\xff")
    pair.wait_for(have_come)
    pair.settle()
    name = pair.reader.transport.name
    assert sorted(pair.received) == sorted((name, b"message %d" % index) for index in range(20))
    assert answers == [(pair.holder.transport.name, b"\x00binary\xff")]


def test_adding_the_same_peer_again_changes_nothing_even_during_a_transfer(pair: Pair) -> None:
    expected = pair.holder.buffer.copy()
    transfer = pair.post(pair.reader.spans((0, MIB)), pair.holder.spans((0, MIB)))
    assert pair.reader.transport.add_peer(pair.holder.transport.metadata()) == pair.peer
    assert pair.finish(transfer) is TransferStatus.DONE
    assert np.array_equal(pair.reader.buffer, expected)


@pytest.mark.parametrize("garbage", [b"", b"x", b"not metadata at all", bytes(1000)])
def test_garbage_is_no_peer(pair: Pair, garbage: bytes) -> None:
    with pytest.raises(TransportError):
        pair.reader.transport.add_peer(garbage)


def test_an_agent_is_no_peer_of_its_own(pair: Pair) -> None:
    with pytest.raises(TransportError):
        pair.reader.transport.add_peer(pair.reader.transport.metadata())


@pytest.mark.parametrize(
    ("local", "remote"),
    [
        ([(0, 10)], [(0, 11)]),
        ([(0, 10), (10, 10)], [(0, 20)]),
        ([(0, 10), (10, 5)], [(0, 5), (10, 10)]),
    ],
    ids=["length", "rows", "order"],
)
def test_spans_that_do_not_pair_up_are_a_bug_of_ours(
    pair: Pair, local: list[tuple[int, int]], remote: list[tuple[int, int]]
) -> None:
    with pytest.raises(LocalProtocolError):
        pair.post(pair.reader.spans(*local), pair.holder.spans(*remote))


@pytest.mark.parametrize(
    "rows",
    [
        np.empty((0, 2), dtype=np.int64),
        np.ones((1, 3), dtype=np.int64),
        np.ones(2, dtype=np.int64),
        np.ones((1, 2), dtype=np.int32),
        np.array([[4096, 0]], dtype=np.int64),
        np.array([[-4096, 1]], dtype=np.int64),
    ],
    ids=["empty", "three columns", "flat", "int32", "no length", "negative"],
)
def test_misshapen_spans_are_a_bug_of_ours(pair: Pair, rows: NDArray[np.int64]) -> None:
    with pytest.raises(LocalProtocolError):
        pair.post(rows, rows)
    with pytest.raises(LocalProtocolError):
        pair.reader.transport.register(rows, device="DRAM", device_id=0)


def test_memory_that_was_not_registered_is_refused(pair: Pair) -> None:
    alien = np.zeros(4096, dtype=np.uint8)
    alien_rows = np.array([[alien.ctypes.data, 4096]], dtype=np.int64)
    with pytest.raises(TransferFailed):
        pair.post(alien_rows, pair.holder.spans((0, 4096)))
    with pytest.raises(TransferFailed):
        pair.post(pair.reader.spans((0, 4096)), alien_rows)


def test_a_span_that_begins_inside_and_ends_outside_is_refused(pair: Pair) -> None:
    with pytest.raises(TransferFailed):
        pair.post(pair.reader.spans((MIB - 10, 11)), pair.holder.spans((0, 11)))
    with pytest.raises(TransferFailed):
        pair.post(pair.reader.spans((0, 11)), pair.holder.spans((MIB - 10, 11)))


def test_a_peer_that_was_never_added_cannot_be_reached(pair: Pair) -> None:
    with pytest.raises(PeerUnreachable):
        pair.reader.transport.notify(PeerName("nobody"), b"hello")
    pair.reader.transport.remove_peer(PeerName("nobody"))
    pair.peer = PeerName("nobody")
    with pytest.raises(PeerUnreachable):
        pair.post(pair.reader.spans((0, 1)), pair.holder.spans((0, 1)))


def test_a_removed_peer_cannot_be_reached_until_it_is_added_again(pair: Pair) -> None:
    pair.reader.transport.remove_peer(pair.peer)
    pair.reader.transport.remove_peer(pair.peer)
    with pytest.raises(PeerUnreachable):
        pair.post(pair.reader.spans((0, 1)), pair.holder.spans((0, 1)))
    with pytest.raises(PeerUnreachable):
        pair.reader.transport.notify(pair.peer, b"hello")
    pair.peer = pair.reader.transport.add_peer(pair.holder.transport.metadata())
    expected = pair.holder.buffer.copy()
    assert pair.finish(pair.post(pair.reader.spans((0, MIB)), pair.holder.spans((0, MIB)))) is TransferStatus.DONE
    assert np.array_equal(pair.reader.buffer, expected)


def test_removing_a_peer_fails_its_transfers_but_keeps_them_until_they_have_ended(
    make: Callable[[str], Transport],
) -> None:
    pair = connected(make, size_bytes=8 * MIB)
    rows = [(offset, 64 * 1024) for offset in range(0, 8 * MIB, 64 * 1024)]
    transfer = pair.post(pair.reader.spans(*rows), pair.holder.spans(*rows))
    was_pending = pair.reader.transport.poll(transfer) is TransferStatus.PENDING
    pair.reader.transport.remove_peer(pair.peer)
    status = pair.reader.transport.poll(transfer)
    assert status is (TransferStatus.FAILED if was_pending else TransferStatus.DONE)
    pair.wait_for(lambda: pair.reader.transport.release(transfer))
    # Released: from here on our memory is ours again.
    pair.reader.buffer[:] = 0
    pair.settle()
    assert not pair.reader.buffer.any()
    assert pair.reader.transport.poll(transfer) is status


def test_a_pending_transfer_is_not_released_and_an_ended_one_is_as_often_as_asked(pair: Pair) -> None:
    rows = [(offset, 4096) for offset in range(0, MIB, 4096)]
    transfer = pair.post(pair.reader.spans(*rows), pair.holder.spans(*rows))
    while pair.reader.transport.poll(transfer) is TransferStatus.PENDING:
        if pair.reader.transport.release(transfer):
            # Asking makes progress too, so it may have ended in between; pending it cannot be any more.
            break
        pair.turn()
    assert pair.reader.transport.poll(transfer) is TransferStatus.DONE
    assert pair.reader.transport.release(transfer)
    assert pair.reader.transport.release(transfer)
    assert pair.reader.transport.poll(transfer) is TransferStatus.DONE


def test_a_read_from_a_peer_that_has_closed_ends(pair: Pair) -> None:
    """Within a host UCX reads a living process's memory without asking it, so the read may even succeed."""
    assert pair.finish(pair.post(pair.reader.spans((0, 100)), pair.holder.spans((0, 100)))) is TransferStatus.DONE
    pair.holder.transport.close()
    pair.turn = lambda: None  # type: ignore[method-assign]
    try:
        transfer = pair.post(pair.reader.spans((100, 100)), pair.holder.spans((100, 100)))
    except TransportError:
        return
    if pair.finish(transfer) is TransferStatus.DONE:
        assert np.array_equal(pair.reader.buffer[100:200], pair.holder.buffer[100:200])
    else:
        assert transfer.error
    pair.wait_for(lambda: pair.reader.transport.release(transfer))
    pair.reader.transport.remove_peer(pair.peer)


def test_closing_is_idempotent_and_ends_everything(make: Callable[[str], Transport]) -> None:
    pair = connected(make, size_bytes=8 * MIB)
    transfer = pair.post(pair.reader.spans((0, 8 * MIB)), pair.holder.spans((0, 8 * MIB)))
    was_done = pair.reader.transport.poll(transfer) is TransferStatus.DONE
    pair.reader.transport.close()
    pair.reader.transport.close()
    assert pair.reader.transport.poll(transfer) is (TransferStatus.DONE if was_done else TransferStatus.FAILED)
    assert pair.reader.transport.release(transfer)
    with pytest.raises(LocalProtocolError):
        pair.reader.transport.metadata()
    with pytest.raises(LocalProtocolError):
        pair.post(pair.reader.spans((0, 1)), pair.holder.spans((0, 1)))
    with pytest.raises(LocalProtocolError):
        pair.reader.transport.take_notifications()


def test_nothing_lands_after_closing(make: Callable[[str], Transport]) -> None:
    pair = connected(make, size_bytes=8 * MIB)
    pair.post(pair.reader.spans((0, 8 * MIB)), pair.holder.spans((0, 8 * MIB)))
    pair.reader.transport.close()
    pair.reader.buffer[:] = 0
    for _ in range(200):
        pair.turn()
    assert not pair.reader.buffer.any()


def test_memory_registered_later_is_usable_once_its_metadata_is_added(pair: Pair) -> None:
    late = np.full(4096, 7, dtype=np.uint8)
    rows = np.array([[late.ctypes.data, 4096]], dtype=np.int64)
    pair.holder.transport.register(rows, device="DRAM", device_id=0)
    with pytest.raises(TransferFailed):
        pair.post(pair.reader.spans((0, 4096)), rows)
    assert pair.reader.transport.add_peer(pair.holder.transport.metadata()) == pair.peer
    assert pair.finish(pair.post(pair.reader.spans((0, 4096)), rows)) is TransferStatus.DONE
    assert (pair.reader.buffer[:4096] == 7).all()


def test_the_repr_says_how_things_stand(pair: Pair) -> None:
    assert "peers=1 unreleased=0" in repr(pair.reader.transport)
    transfer = pair.post(pair.reader.spans((0, 1)), pair.holder.spans((0, 1)))
    pair.finish(transfer)
    assert "unreleased=1" in repr(pair.reader.transport)
    pair.reader.transport.release(transfer)
    pair.reader.transport.close()
    assert "closed" in repr(pair.reader.transport)
