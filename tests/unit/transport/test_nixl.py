"""The edge to NIXL, with a scripted agent: how statuses and exceptions are read, and what is never given back early."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvshuttle.errors import ConfigError, PeerUnreachable, TransferFailed, TransportError
from kvshuttle.transport import Operation, PeerName, TransferStatus
from kvshuttle.transport import nixl as module
from kvshuttle.transport.nixl import NixlTransfer, NixlTransport, prepare_environment

ROWS = np.array([[4096, 64]], dtype=np.int64)


class nixlNotFoundError(Exception):  # noqa: N801 - NIXL's own name, by which it is recognised
    pass


class nixlRemoteDisconnectError(Exception):  # noqa: N801
    pass


class ScriptedHandle:
    def __init__(self) -> None:
        self.failures: list[Exception] = []
        self.num_released = 0

    def release(self) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.num_released += 1


class ScriptedAgent:
    """Answers status questions from a list; keeps what it was told."""

    def __init__(self, name: str, config: object) -> None:
        self.answers: list[str | Exception] = []
        self.handle = ScriptedHandle()
        self.removed: list[str] = []
        self.added: list[bytes] = []
        self.failure: Exception | None = None
        self.backends: dict[str, dict[str, str]] = {}

    def get_plugin_list(self) -> list[str]:
        return ["UCX", "POSIX", "BROKEN"]

    def create_backend(self, backend: str, params: dict[str, str]) -> None:
        if backend == "BROKEN":
            raise RuntimeError("no device")
        self.backends[backend] = params

    def add_remote_agent(self, metadata: bytes) -> bytes:
        self.added.append(metadata)
        return b"peer"

    def remove_remote_agent(self, peer: str) -> None:
        self.removed.append(peer)

    def get_xfer_descs(self, rows: Any, device: str) -> Any:
        return rows

    def initialize_xfer(self, *args: object) -> ScriptedHandle:
        if self.failure:
            raise self.failure
        return self.handle

    def transfer(self, handle: ScriptedHandle, notification: bytes) -> str:
        return self.check_xfer_state(handle)

    def check_xfer_state(self, handle: ScriptedHandle) -> str:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def send_notif(self, peer: str, notification: bytes) -> None:
        raise nixlNotFoundError("gone")


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> NixlTransport:
    api = SimpleNamespace(nixl_agent=ScriptedAgent, nixl_agent_config=lambda **_: None)
    monkeypatch.setattr(module, "_import_nixl", lambda: api)
    ticks = iter(range(1000))
    return NixlTransport(name="reader", now_s=lambda: float(next(ticks)))


def posted(
    transport: NixlTransport, *answers: str | Exception, operation: Operation = Operation.READ
) -> tuple[NixlTransfer, ScriptedAgent]:
    """A transfer, and the agent that will give these answers about it."""
    agent = transport._agent
    agent.answers = list(answers)
    peer = transport.add_peer(b"metadata")
    transfer = transport.post(operation, peer, ROWS, ROWS, device="DRAM", device_id=0, remote_device_id=0)
    return transfer, agent


def test_a_transfer_is_pending_until_nixl_says_done(transport: NixlTransport) -> None:
    transfer, agent = posted(transport, "PROC", "PROC", "DONE")
    assert transfer.wire_s is None
    assert transport.poll(transfer) is TransferStatus.PENDING
    assert transport.poll(transfer) is TransferStatus.DONE
    assert transport.poll(transfer) is TransferStatus.DONE
    assert transport.release(transfer)
    assert transport.release(transfer)
    assert agent.handle.num_released == 1
    # One tick of the clock at the post, one after it, one at the end.
    assert (transfer.posted_at_s, transfer.post_s, transfer.wire_s) == (0.0, 1.0, 2.0)


@pytest.mark.parametrize("answer", ["ERR", "WHATEVER", nixlRemoteDisconnectError("peer"), RuntimeError("x")])
def test_everything_but_done_and_proc_is_a_failure_that_has_ended(
    transport: NixlTransport, answer: str | Exception
) -> None:
    transfer, agent = posted(transport, "PROC", answer)
    assert transport.poll(transfer) is TransferStatus.FAILED
    assert transfer.error
    assert transport.release(transfer)
    assert agent.handle.num_released == 1


@pytest.mark.parametrize("answer", ["ERR", nixlRemoteDisconnectError("peer")])
def test_what_a_failed_write_had_sent_has_time_to_land(transport: NixlTransport, answer: str | Exception) -> None:
    transfer, agent = posted(transport, "PROC", answer, operation=Operation.WRITE)
    assert transport.poll(transfer) is TransferStatus.FAILED
    failed_at_s = transport._now_s()
    while not transport.release(transfer):
        assert agent.handle.num_released == 0
    assert transport._now_s() - failed_at_s >= module.FAILED_WRITE_LANDS_WITHIN_S
    assert agent.handle.num_released == 1


def test_a_write_that_was_done_needs_no_time_to_land(transport: NixlTransport) -> None:
    transfer, _ = posted(transport, "PROC", "DONE", operation=Operation.WRITE)
    transport.remove_peer(transfer.peer)
    assert transport.release(transfer)


def test_a_pending_transfer_is_never_cancelled(transport: NixlTransport) -> None:
    transfer, agent = posted(transport, "PROC", "PROC", "PROC", "DONE")
    assert not transport.release(transfer)
    assert not transport.release(transfer)
    assert agent.handle.num_released == 0
    assert transport.release(transfer)
    assert agent.handle.num_released == 1


def test_a_handle_that_nixl_keeps_is_asked_for_again(transport: NixlTransport) -> None:
    transfer, agent = posted(transport, "DONE")
    agent.handle.failures = [RuntimeError("still active")]
    assert not transport.release(transfer)
    assert "unreleased=1" in repr(transport)
    assert transport.release(transfer)
    assert "unreleased=0" in repr(transport)


def test_a_removed_peer_stays_known_to_nixl_until_its_transfers_have_ended(transport: NixlTransport) -> None:
    transfer, agent = posted(transport, "PROC", "PROC", "DONE")
    transport.remove_peer(transfer.peer)
    assert transport.poll(transfer) is TransferStatus.FAILED
    assert not transport.release(transfer)
    assert not agent.removed
    assert transport.release(transfer)
    assert agent.removed == ["peer"]
    assert transport.poll(transfer) is TransferStatus.FAILED
    transport.remove_peer(transfer.peer)
    assert agent.removed == ["peer"]


def test_a_peer_added_again_meanwhile_is_not_loaded_anew(transport: NixlTransport) -> None:
    transfer, agent = posted(transport, "PROC", "DONE")
    transport.remove_peer(transfer.peer)
    assert transport.add_peer(b"metadata") == transfer.peer
    assert agent.added == [b"metadata"]
    assert transport.release(transfer)
    assert not agent.removed


def test_a_transfer_that_nixl_lost_sight_of_is_kept_until_the_end(transport: NixlTransport) -> None:
    transfer, agent = posted(transport, "PROC", nixlNotFoundError("invalidated"))
    assert transport.poll(transfer) is TransferStatus.FAILED
    assert not transport.release(transfer)
    assert not transport.release(transfer)
    assert agent.handle.num_released == 0
    transport.close()
    assert transport.release(transfer)
    assert agent.handle.num_released == 1


def test_what_nixl_raises_at_the_post_is_ours_to_raise(transport: NixlTransport) -> None:
    peer = transport.add_peer(b"metadata")
    transport._agent.failure = nixlNotFoundError("not registered")
    with pytest.raises(TransferFailed, match="nixlNotFoundError: not registered"):
        transport.post(Operation.READ, peer, ROWS, ROWS, device="DRAM", device_id=0, remote_device_id=0)
    with pytest.raises(PeerUnreachable, match="nixlNotFoundError"):
        transport.notify(peer, b"hello")
    with pytest.raises(PeerUnreachable):
        transport.notify(PeerName("stranger"), b"hello")
    with pytest.raises(TransportError):
        transport.take_notifications()


def test_backends_get_their_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    api = SimpleNamespace(nixl_agent=ScriptedAgent, nixl_agent_config=lambda **_: None)
    monkeypatch.setattr(module, "_import_nixl", lambda: api)
    transport = NixlTransport(
        name="x", backends=("UCX", "POSIX"), backend_params={"UCX": {"engine_config": "a=b"}}, num_threads=2
    )
    assert transport._agent.backends == {
        "UCX": {"engine_config": "a=b", "num_threads": "2"},
        "POSIX": {"num_threads": "2"},
    }


@pytest.mark.parametrize(("backend", "why"), [("EFA", "not among"), ("BROKEN", "no device")])
def test_a_backend_that_is_missing_or_broken_is_named(monkeypatch: pytest.MonkeyPatch, backend: str, why: str) -> None:
    api = SimpleNamespace(nixl_agent=ScriptedAgent, nixl_agent_config=lambda **_: None)
    monkeypatch.setattr(module, "_import_nixl", lambda: api)
    with pytest.raises(ConfigError, match=f"nixl_backends: '{backend}'.*{why}"):
        NixlTransport(name="x", backends=(backend,))


def test_without_nixl_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MODULES", ("no_such_nixl._api",))
    with pytest.raises(ConfigError, match="pip install nixl-cu12"):
        NixlTransport(name="x")


def test_the_environment_gets_defaults_and_keeps_what_the_operator_set() -> None:
    environ = {"UCX_TCP_USER_TIMEOUT": "3s", "OTHER": "x"}
    prepare_environment(environ)
    assert environ == {"UCX_TCP_USER_TIMEOUT": "3s", "OTHER": "x"}
    empty: dict[str, str] = {}
    prepare_environment(empty)
    assert empty == {"UCX_TCP_USER_TIMEOUT": "10s"}
