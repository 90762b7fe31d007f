"""Reads from another process over NIXL while that process is killed or stopped; prints what was seen as JSON.

Run as a program, so that UCX's environment can be chosen: ``python -m support.dying_peer SCENARIO``.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from kvshuttle.errors import TransportError
from kvshuttle.transport import Operation, PeerName, TransferStatus
from kvshuttle.transport.nixl import NixlTransfer, NixlTransport, prepare_environment

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

SIZE_BYTES = 64 * 1024 * 1024
FILL = 7
_SAMPLE_BYTES = SIZE_BYTES // 64
_MAX_TRIES = 50


def hold(pipe: Connection) -> None:
    """The holder's process: registers memory, says where, and serves until it is killed."""
    transport = NixlTransport(name="holder")
    memory = np.full(SIZE_BYTES, FILL, dtype=np.uint8)
    transport.register(np.array([[memory.ctypes.data, SIZE_BYTES]], dtype=np.int64), device="DRAM", device_id=0)
    pipe.send((transport.metadata(), memory.ctypes.data))
    while True:
        transport.take_notifications()
        time.sleep(0.0002)


class Reader:
    """A reader with zeroed memory, and the holder that it reads from."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self.holder = context.Process(target=hold, args=(theirs,), daemon=True)
        self.holder.start()
        metadata, self._address = ours.recv()
        self.transport = NixlTransport(name="reader")
        self.memory = np.ones(SIZE_BYTES, dtype=np.uint8)
        self.memory[:] = 0
        self._rows = np.array([[self.memory.ctypes.data, SIZE_BYTES]], dtype=np.int64)
        self.transport.register(self._rows, device="DRAM", device_id=0)
        self.metadata = metadata
        self.peer: PeerName = self.transport.add_peer(metadata)

    def post(self) -> NixlTransfer:
        """Read everything."""
        remote = np.array([[self._address, SIZE_BYTES]], dtype=np.int64)
        return self.transport.post(
            Operation.READ, self.peer, self._rows, remote, device="DRAM", device_id=0, remote_device_id=0
        )

    def follow(self, transfer: NixlTransfer, limit_s: float) -> None:
        """Poll until the end, or for a while."""
        deadline_at_s = time.monotonic() + limit_s
        while self.transport.poll(transfer) is TransferStatus.PENDING and time.monotonic() < deadline_at_s:
            time.sleep(0.0005)

    def signal(self, number: signal.Signals) -> None:
        """Signal the holder, by its pid."""
        assert self.holder.pid is not None
        os.kill(self.holder.pid, number)
        if number is signal.SIGKILL:
            self.holder.join()

    def stop_half_way(self) -> NixlTransfer:
        """A read whose holder was stopped in the middle of it."""
        for _ in range(_MAX_TRIES):
            transfer = self.post()
            # A look at all of the memory takes as long as the rest of the read.
            while not self.memory[::_SAMPLE_BYTES].any() and self.transport.poll(transfer) is TransferStatus.PENDING:
                pass
            self.signal(signal.SIGSTOP)
            self.follow(transfer, 0.5)
            if transfer.status is TransferStatus.PENDING:
                return transfer
            self.signal(signal.SIGCONT)
            self.transport.release(transfer)
            self.memory[:] = 0
        raise RuntimeError("every read ended before its holder had stopped")

    def count(self) -> int:
        """Bytes that have arrived."""
        return int((self.memory == FILL).sum())


def kill_before(reader: Reader) -> dict[str, Any]:
    """The peer was added and read from once, then dies; then we read again."""
    first = reader.post()
    reader.follow(first, 20.0)
    reader.transport.release(first)
    reader.signal(signal.SIGKILL)
    started_at_s = time.monotonic()
    try:
        transfer = reader.post()
    except TransportError as error:
        return {"first": first.status.value, "status": "failed", "error": str(error), "is_released": True}
    reader.follow(transfer, 30.0)
    return {"first": first.status.value, **outcome(reader, transfer, started_at_s)}


def kill_during(reader: Reader) -> dict[str, Any]:
    """The peer stops in the middle of a read, and is killed a while later."""
    transfer = reader.stop_half_way()
    while_stopped = transfer.status.value
    reader.signal(signal.SIGKILL)
    started_at_s = time.monotonic()
    reader.follow(transfer, 30.0)
    return {"while_stopped": while_stopped, **outcome(reader, transfer, started_at_s)}


def stop_and_remove(reader: Reader) -> dict[str, Any]:
    """The peer stops in the middle of a read, we give it up, and then it goes on."""
    transfer = reader.stop_half_way()
    reader.transport.remove_peer(reader.peer)
    seen = {"status": transfer.status.value, "is_released_while_stopped": reader.transport.release(transfer)}
    before = reader.count()
    reader.signal(signal.SIGCONT)
    deadline_at_s = time.monotonic() + 20.0
    while not reader.transport.release(transfer) and time.monotonic() < deadline_at_s:
        time.sleep(0.0005)
    seen["num_late_bytes"] = reader.count() - before
    seen["is_released"] = reader.transport.release(transfer)
    reader.memory[:] = 0
    for _ in range(500):
        reader.transport.take_notifications()
        time.sleep(0.0005)
    seen["num_bytes_after_release"] = reader.count()
    reader.peer = reader.transport.add_peer(reader.metadata)
    again = reader.post()
    reader.follow(again, 20.0)
    return {**seen, "again": again.status.value}


def outcome(reader: Reader, transfer: NixlTransfer, started_at_s: float) -> dict[str, Any]:
    """How a transfer ended, and how long after the event."""
    elapsed_s = time.monotonic() - started_at_s
    return {
        "status": transfer.status.value,
        "error": transfer.error,
        "elapsed_s": round(elapsed_s, 3),
        "is_released": reader.transport.release(transfer),
    }


SCENARIOS = {scenario.__name__: scenario for scenario in (kill_before, kill_during, stop_and_remove)}

if __name__ == "__main__":
    prepare_environment(os.environ)
    the_reader = Reader()
    try:
        print("RESULT " + json.dumps(SCENARIOS[sys.argv[1]](the_reader)), flush=True)
    finally:
        the_reader.signal(signal.SIGKILL)
    the_reader.transport.close()
