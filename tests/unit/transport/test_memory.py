"""What only the in-process transport can show on demand: crashed, stopped and restarted peers."""

from __future__ import annotations

import numpy as np
import pytest

from kvshuttle.errors import LocalProtocolError, PeerUnreachable, TransferFailed
from kvshuttle.transport import Operation, TransferStatus
from kvshuttle.transport.memory import MemoryFabric, MemoryTransport
from support.transport_pairs import Pair, connected


def fabric_and_pair(*, num_steps: int = 4) -> tuple[MemoryFabric, Pair]:
    fabric = MemoryFabric(num_steps=num_steps)
    return fabric, connected(lambda name: MemoryTransport(fabric, name), size_bytes=4096)


def quarters(pair: Pair) -> tuple[np.ndarray, np.ndarray]:
    rows = [(offset, 1024) for offset in range(0, 4096, 1024)]
    return pair.reader.spans(*rows), pair.holder.spans(*rows)


def test_bytes_move_a_part_per_call() -> None:
    _, pair = fabric_and_pair()
    pair.reader.buffer[:] = 0
    pair.holder.buffer[:] = 1
    transfer = pair.post(*quarters(pair))
    seen = []
    while pair.reader.transport.poll(transfer) is TransferStatus.PENDING:
        seen.append(int(pair.reader.buffer.sum()))
    assert seen == [1024, 2048, 3072]
    assert pair.reader.buffer.all()


def test_a_crash_fails_and_ends_transfers_half_way() -> None:
    fabric, pair = fabric_and_pair()
    pair.reader.buffer[:] = 0
    transfer = pair.post(*quarters(pair))
    pair.reader.transport.poll(transfer)
    fabric.crash("holder")
    assert pair.reader.transport.poll(transfer) is TransferStatus.FAILED
    assert "is gone" in transfer.error
    assert pair.reader.transport.release(transfer)
    with pytest.raises(PeerUnreachable):
        pair.reader.transport.notify(pair.peer, b"hello")


def test_a_stopped_peer_keeps_a_transfer_pending_and_its_bytes_land_even_after_removal() -> None:
    fabric, pair = fabric_and_pair()
    pair.reader.buffer[:] = 0
    pair.holder.buffer[:] = 1
    transfer = pair.post(*quarters(pair))
    pair.reader.transport.poll(transfer)
    fabric.stop("holder")
    for _ in range(10):
        assert pair.reader.transport.poll(transfer) is TransferStatus.PENDING
    pair.reader.transport.remove_peer(pair.peer)
    assert pair.reader.transport.poll(transfer) is TransferStatus.FAILED
    assert not pair.reader.transport.release(transfer)
    assert pair.reader.buffer.sum() == 1024
    fabric.resume("holder")
    while not pair.reader.transport.release(transfer):
        pass
    assert pair.reader.buffer.sum() == 4096
    assert pair.reader.transport.poll(transfer) is TransferStatus.FAILED


def test_a_restarted_peer_is_another_one() -> None:
    fabric, pair = fabric_and_pair()
    fabric.crash("holder")
    successor = MemoryTransport(fabric, "holder")
    successor.register(pair.holder.spans((0, 4096)), device="DRAM", device_id=0)
    transfer = pair.post(*quarters(pair))
    assert pair.reader.transport.poll(transfer) is TransferStatus.FAILED
    pair.reader.transport.add_peer(successor.metadata())
    again = pair.post(*quarters(pair))
    pair.turn = lambda: None  # type: ignore[method-assign]
    assert pair.finish(again) is TransferStatus.DONE


def test_a_name_can_only_be_taken_once_at_a_time() -> None:
    fabric, pair = fabric_and_pair()
    with pytest.raises(LocalProtocolError, match="holder"):
        MemoryTransport(fabric, "holder")
    assert repr(fabric) == "<MemoryFabric agents=['holder', 'reader'] stopped=[]>"
    pair.holder.transport.close()
    assert MemoryTransport(fabric, "holder").name == "holder"


@pytest.mark.parametrize(("device", "device_id", "remote_device_id"), [("VRAM", 0, 0), ("DRAM", 1, 0), ("DRAM", 0, 1)])
def test_the_device_is_part_of_a_registration(device: str, device_id: int, remote_device_id: int) -> None:
    _, pair = fabric_and_pair()
    local, remote = quarters(pair)
    with pytest.raises(TransferFailed):
        pair.reader.transport.post(
            Operation.READ,
            pair.peer,
            local,
            remote,
            device=device,
            device_id=device_id,
            remote_device_id=remote_device_id,
        )


def test_a_row_over_two_registrations_that_touch_is_refused() -> None:
    fabric = MemoryFabric()
    memory = np.zeros(4096, dtype=np.uint8)
    transport = MemoryTransport(fabric, "split")
    address = memory.ctypes.data
    spans = np.array([[address, 2048], [address + 2048, 2048]], dtype=np.int64)
    transport.register(spans, device="DRAM", device_id=0)
    _, pair = fabric_and_pair()
    other = MemoryTransport(fabric, "other")
    other.register(pair.reader.spans((0, 4096)), device="DRAM", device_id=0)
    peer = other.add_peer(transport.metadata())
    with pytest.raises(TransferFailed, match="row 0"):
        other.post(
            Operation.READ,
            peer,
            pair.reader.spans((0, 2)),
            np.array([[address + 2047, 2]], dtype=np.int64),
            device="DRAM",
            device_id=0,
            remote_device_id=0,
        )
