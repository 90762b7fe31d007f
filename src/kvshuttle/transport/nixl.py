"""The NIXL transport: the one file that names NIXL.

NIXL is driven without its progress thread, which would burn a core per agent: bytes then move only inside
``post``, ``poll``, ``release`` and ``take_notifications``, on *both* ends. Status strings become ``TransferStatus``
and NIXL's exceptions become ours here, at this edge.

What was found about ending a transfer early, on UCX 1.5.1 with a peer stopped in the middle of a read over TCP:
releasing the pending handle succeeds, and so does removing the peer (its transfers then report NOT_FOUND). In both
cases the rest of the bytes still landed in our memory once the peer went on. So neither is used to
end a transfer. One that NIXL calls pending is followed until NIXL says that it ended, whatever its owner was told;
only then is its handle released and its peer really removed. The last resort is ``close``: it destroys the
connections, after which nothing lands.

A write that has failed is the one case where NIXL's word is not enough: it speaks for the side that posted. What the
connection had delivered by then may wait in the other side's sockets or shared memory until that side's next call of
UCX, which copies it into place. So its memory counts as touched for ``FAILED_WRITE_LANDS_WITHIN_S`` more.

Known weakness of UCX 1.5.1's READ where the holder's CPU answers it (TCP; shared memory without CMA): when the reader
dies or closes in the middle of one while the holder is not polling, UCX may abort the holder's process (docs/decisions,
0005). Reads over RDMA and CMA do not involve the holder, and WRITE fails cleanly at the side that posted it.
"""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvshuttle import clock
from kvshuttle.errors import ConfigError, LocalProtocolError, PeerUnreachable, TransferFailed, TransportError
from kvshuttle.transport import Operation, PeerName, Transfer, TransferStatus
from kvshuttle.transport.posted import PostedTransfer
from kvshuttle.transport.spans import check_pairs, check_spans

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableMapping, Sequence

    from numpy.typing import NDArray

_MODULES = ("nixl_cu12._api", "nixl._api")
_STATUS = {"DONE": TransferStatus.DONE, "PROC": TransferStatus.PENDING}
"""Everything else NIXL may say, "ERR" included, is a failure."""

_LOST = "nixlNotFoundError"
"""What NIXL raises for a transfer whose peer was removed or loaded anew: it may well be alive."""

FAILED_WRITE_LANDS_WITHIN_S = 1.0
"""After a write has failed here. The other side polls at least five times a second (``comm_thread``), far more often
while it expects a push. Less than ``confirm_timeout_s``, so that its load can still fall back to a read."""

_ENVIRONMENT = {
    # A peer whose host or network vanishes is found by TCP alone, and with the kernel's defaults that takes more than
    # 150 s (measured by cutting the link). With this it took 9 to 10 s: during a read, before it, and while connecting.
    # A killed process is noticed in milliseconds anyway. The price: an end that reads nothing for 10 s in the middle of
    # a transfer loses its connection.
    "UCX_TCP_USER_TIMEOUT": "10s",
}


def prepare_environment(environ: MutableMapping[str, str]) -> None:
    """Set the UCX defaults that failure detection needs, where the operator has not set them.

    Call it before the first ``NixlTransport`` of the process: UCX reads its environment once. An operator who sets
    ``UCX_TLS`` has to leave a transport with peer failure handling in it, e.g. ``tcp``, or agents do not start.
    """
    for key, value in _ENVIRONMENT.items():
        environ.setdefault(key, value)


class NixlTransfer(PostedTransfer):
    """A posted NIXL transfer.

    ``handle``: NIXL's own. ``is_lost``: NIXL cannot say any more how it stands. ``lands_until_s``: until when its bytes
    may still land although it has ended.
    """

    __slots__ = ("handle", "is_lost", "lands_until_s")

    handle: Any
    is_lost: bool
    lands_until_s: float


@dataclass(slots=True)
class _Peer:
    metadata: bytes
    is_removed: bool = False


class NixlTransport:
    """A NIXL agent behind the ``Transport`` protocol.

    ``backends``: NIXL plugin names, e.g. ("UCX",) or ("LIBFABRIC",) for EFA. ``backend_params``: init parameters
    per backend. ``num_threads``: worker threads of backends that have them; 0 leaves NIXL's default.
    Raises ``ConfigError`` when NIXL is not installed or a backend is missing or does not start.
    """

    def __init__(
        self,
        *,
        name: str,
        backends: Sequence[str] = ("UCX",),
        backend_params: Mapping[str, Mapping[str, str]] | None = None,
        has_progress_thread: bool = False,
        num_threads: int = 0,
        now_s: Callable[[], float] = clock.now_s,
    ) -> None:
        self._name = name
        self._now_s = now_s
        self._agent: Any = _create_agent(name, has_progress_thread=has_progress_thread, num_threads=num_threads)
        self._registrations: list[Any] = []
        self._peers: dict[PeerName, _Peer] = {}
        self._unreleased: dict[int, NixlTransfer] = {}
        _create_backends(self._agent, backends, backend_params or {}, num_threads)

    def __repr__(self) -> str:
        if self._agent is None:
            return f"<NixlTransport {self._name} closed>"
        return f"<NixlTransport {self._name} peers={len(self._peers)} unreleased={len(self._unreleased)}>"

    @property
    def name(self) -> str:
        """The agent's own unique name, as it appears in peers' notifications."""
        return self._name

    def register(self, spans: NDArray[np.int64], *, device: str, device_id: int) -> None:
        """Make memory usable by transfers. Raises ``TransportError`` when the backend refuses it."""
        check_spans(spans)
        agent = self._open_agent()
        try:
            self._registrations.append(agent.register_memory(_descriptors(spans, device_id), device))
        except Exception as error:
            raise TransportError(f"registering {len(spans)} spans of {device}: {_text(error)}") from error

    def metadata(self) -> bytes:
        """What a peer needs for ``add_peer``; call after ``register``."""
        agent = self._open_agent()
        try:
            return bytes(agent.get_agent_metadata())
        except Exception as error:
            raise TransportError(f"agent metadata: {_text(error)}") from error

    def add_peer(self, metadata: bytes) -> PeerName:
        """Make a peer's registered memory addressable. Adding the same agent twice is harmless.

        Raises ``TransportError`` when NIXL cannot read the metadata.
        """
        agent = self._open_agent()
        for name, known in self._peers.items():
            if known.metadata == metadata:
                # Loading it again would make NIXL lose sight of transfers under way.
                known.is_removed = False
                return name
        try:
            loaded = agent.add_remote_agent(metadata)
        except Exception as error:
            raise TransportError(f"peer metadata of {len(metadata)} bytes: {_text(error)}") from error
        peer = PeerName(loaded.decode() if isinstance(loaded, bytes) else str(loaded))
        self._peers[peer] = _Peer(metadata)
        return peer

    def remove_peer(self, peer: PeerName) -> None:
        """Forget a peer. Transfers to it that are pending fail, but ``release`` keeps them until they have ended."""
        self._open_agent()
        known = self._peers.get(peer)
        if known is None:
            return
        known.is_removed = True
        for transfer in self._unreleased.values():
            if transfer.peer == peer:
                transfer.finish(TransferStatus.FAILED, self._now_s(), "the peer was removed")
        self._drop_if_unused(peer)

    def post(
        self,
        operation: Operation,
        peer: PeerName,
        local: NDArray[np.int64],
        remote: NDArray[np.int64],
        *,
        device: str,
        device_id: int,
        remote_device_id: int,
        notification: bytes = b"",
    ) -> NixlTransfer:
        """Start a transfer. Raises ``PeerUnreachable`` for an unknown peer, ``TransferFailed`` when NIXL refuses."""
        agent = self._open_agent()
        num_bytes = check_pairs(local, remote)
        self._require(peer)
        started_at_s = self._now_s()
        try:
            handle = agent.initialize_xfer(
                operation.value,
                agent.get_xfer_descs(_descriptors(local, device_id), device),
                agent.get_xfer_descs(_descriptors(remote, remote_device_id), device),
                peer,
                notification,
            )
        except Exception as error:
            raise TransferFailed(
                f"preparing {operation.value} of {len(local)} spans with {peer}: {_text(error)}"
            ) from error
        transfer = NixlTransfer(
            operation, peer, num_descriptors=len(local), num_bytes=num_bytes, posted_at_s=started_at_s
        )
        transfer.handle = handle
        transfer.is_lost = False
        transfer.lands_until_s = 0.0
        self._unreleased[id(transfer)] = transfer
        self._advance(transfer, lambda: agent.transfer(handle, notification))
        transfer.post_s = self._now_s() - started_at_s
        return transfer

    def poll(self, transfer: Transfer) -> TransferStatus:
        """Make progress and say how a transfer stands. A final status stays final."""
        assert isinstance(transfer, NixlTransfer), transfer
        if transfer.status is TransferStatus.PENDING:
            agent = self._open_agent()
            self._advance(transfer, lambda: agent.check_xfer_state(transfer.handle))
        return transfer.status

    def release(self, transfer: Transfer) -> bool:
        """Give a transfer's resources back; False while it may still touch memory, or NIXL keeps the handle.

        A failed transfer may stay so for as long as its peer is stopped but alive.
        """
        assert isinstance(transfer, NixlTransfer), transfer
        if id(transfer) not in self._unreleased:
            return True
        agent = self._open_agent()
        if not transfer.is_ended:
            self._advance(transfer, lambda: agent.check_xfer_state(transfer.handle))
        if not transfer.is_ended or self._now_s() < transfer.lands_until_s:
            return False
        try:
            transfer.handle.release()
        except Exception as error:  # noqa: BLE001 - the handle stays ours, and is tried again at the next call
            transfer.error = transfer.error or f"release: {_text(error)}"
            return False
        del self._unreleased[id(transfer)]
        self._drop_if_unused(transfer.peer)
        return True

    def notify(self, peer: PeerName, notification: bytes) -> None:
        """Send a small message to a peer, at most once."""
        agent = self._open_agent()
        self._require(peer)
        try:
            agent.send_notif(peer, notification)
        except Exception as error:
            raise PeerUnreachable(f"notifying {peer}: {_text(error)}") from error

    def take_notifications(self) -> list[tuple[str, bytes]]:
        """Make progress and return new (sender name, message) pairs, each exactly once."""
        agent = self._open_agent()
        try:
            by_sender = agent.get_new_notifs()
        except Exception as error:
            raise TransportError(f"notifications: {_text(error)}") from error
        return [(str(sender), bytes(message)) for sender, messages in by_sender.items() for message in messages]

    def close(self) -> None:
        """Destroy the agent and its connections; pending transfers fail, and nothing lands any more. Idempotent."""
        agent, self._agent = self._agent, None
        if agent is None:
            return
        for transfer in self._unreleased.values():
            transfer.finish(TransferStatus.FAILED, self._now_s(), "the transport was closed")
            transfer.is_ended = True
            with contextlib.suppress(Exception):
                transfer.handle.release()
            # Each handle keeps the agent alive, and the connections die with the agent.
            transfer.handle = None
        for registration in self._registrations:
            # What a broken device cannot deregister goes with the process.
            with contextlib.suppress(Exception):
                agent.deregister_memory(registration)
        self._unreleased.clear()
        self._registrations.clear()
        self._peers.clear()

    def _advance(self, transfer: NixlTransfer, ask: Callable[[], str]) -> None:
        if transfer.is_lost:
            return
        try:
            answer = ask()
        except Exception as error:  # noqa: BLE001 - NIXL reports a failed transfer by raising
            transfer.is_lost = type(error).__name__ == _LOST
            if transfer.is_lost:
                transfer.finish(TransferStatus.FAILED, self._now_s(), _text(error))
            else:
                self._end(transfer, TransferStatus.FAILED, _text(error))
            return
        status = _STATUS.get(answer, TransferStatus.FAILED)
        if status is not TransferStatus.PENDING:
            self._end(transfer, status, f"NIXL says {answer}" if status is TransferStatus.FAILED else "")

    def _end(self, transfer: NixlTransfer, status: TransferStatus, error: str) -> None:
        """NIXL is done with it."""
        at_s = self._now_s()
        transfer.is_ended = True
        transfer.finish(status, at_s, error)
        if status is TransferStatus.FAILED and transfer.operation is Operation.WRITE:
            transfer.lands_until_s = at_s + FAILED_WRITE_LANDS_WITHIN_S

    def _drop_if_unused(self, peer: PeerName) -> None:
        known = self._peers.get(peer)
        if known is None or not known.is_removed:
            return
        if any(transfer.peer == peer and not transfer.is_ended for transfer in self._unreleased.values()):
            return
        del self._peers[peer]
        # It may have disconnected itself already.
        with contextlib.suppress(Exception):
            self._agent.remove_remote_agent(peer)

    def _require(self, peer: PeerName) -> None:
        known = self._peers.get(peer)
        if known is None or known.is_removed:
            raise PeerUnreachable(f"peer {peer} was never added, or is removed")

    def _open_agent(self) -> Any:
        if self._agent is None:
            raise LocalProtocolError(f"transport {self._name} is closed")
        return self._agent


def plugin_names() -> list[str]:
    """Plugins that NIXL finds here; one that is found may still fail to start. Raises ``ConfigError`` without NIXL."""
    agent = _create_agent("plugins", has_progress_thread=False, num_threads=0)
    return sorted(agent.get_plugin_list())


def _descriptors(spans: NDArray[np.int64], device_id: int) -> NDArray[np.uint64]:
    rows = np.empty((len(spans), 3), dtype=np.uint64)
    rows[:, :2] = spans
    rows[:, 2] = device_id
    return rows


def _create_agent(name: str, *, has_progress_thread: bool, num_threads: int) -> Any:
    api = _import_nixl()
    config = api.nixl_agent_config(enable_prog_thread=has_progress_thread, num_threads=num_threads, backends=[])
    try:
        return api.nixl_agent(name, config)
    except Exception as error:
        raise ConfigError(f"NIXL agent {name} did not start: {_text(error)}") from error


def _import_nixl() -> Any:
    causes: list[str] = []
    for module in _MODULES:
        try:
            return importlib.import_module(module)
        except ImportError as error:
            causes.append(f"{module}: {error}")
    raise ConfigError(f"NIXL cannot be imported; install it with `pip install nixl-cu12` ({'; '.join(causes)})")


def _create_backends(
    agent: Any, backends: Sequence[str], params: Mapping[str, Mapping[str, str]], num_threads: int
) -> None:
    available = list(agent.get_plugin_list())
    for backend in backends:
        if backend not in available:
            raise ConfigError(f"nixl_backends: {backend!r} is not among NIXL's plugins {available}")
        settings = dict(params.get(backend, {}))
        if num_threads:
            settings.setdefault("num_threads", str(num_threads))
        try:
            agent.create_backend(backend, settings)
        except Exception as error:
            raise ConfigError(f"nixl_backends: {backend!r} did not start: {_text(error)}") from error


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
