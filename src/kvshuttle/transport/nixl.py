"""The NIXL transport: the one file that names NIXL.

NIXL is driven without its progress thread, which would burn a core per agent: bytes then move only inside
``poll`` and ``take_notifications``, on *both* ends. Status strings become ``TransferStatus`` and NIXL's
exceptions become ours here, at this edge.

NIXL's own cancel is never used. On UCX it gives the handle back while the peer may still answer the
read, so bytes could land in memory that somebody else owns by then. A pending transfer ends in one of
three ways only: it completes, it fails, or ``remove_peer`` tears the connection down under it.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import TYPE_CHECKING, Any

import numpy as np

from kvshuttle import clock
from kvshuttle.errors import ConfigError, LocalProtocolError, PeerUnreachable, TransferFailed, TransportError
from kvshuttle.transport import Operation, PeerName, TransferStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableMapping, Sequence

    from numpy.typing import NDArray

_MODULES = ("nixl_cu12._api", "nixl._api")
_STATUS = {"DONE": TransferStatus.DONE, "PROC": TransferStatus.PENDING}
"""Everything else NIXL may say, "ERR" included, is a failure."""

_ENVIRONMENT: Mapping[str, str] = {}


def prepare_environment(environ: MutableMapping[str, str]) -> None:
    """Set the UCX defaults that failure detection needs, where the operator has not set them.

    Call it before anything in the process imports NIXL: UCX reads its environment once.
    """
    for key, value in _ENVIRONMENT.items():
        environ.setdefault(key, value)


class NixlTransfer:
    """One posted NIXL transfer and what it cost.

    ``post_s``: seconds spent posting. ``posted_at_s``: instant just before. ``wire_s``: seconds from then until
    a final status was seen, or None while pending. ``error``: why it failed, or "".
    """

    __slots__ = (
        "_handle",
        "error",
        "num_bytes",
        "num_descriptors",
        "operation",
        "peer",
        "post_s",
        "posted_at_s",
        "status",
        "wire_s",
    )

    def __init__(self, operation: Operation, peer: PeerName, handle: Any, num_descriptors: int, num_bytes: int) -> None:
        self._handle = handle
        self.operation = operation
        self.peer = peer
        self.num_descriptors = num_descriptors
        self.num_bytes = num_bytes
        self.posted_at_s = 0.0
        self.post_s = 0.0
        self.wire_s: float | None = None
        self.status = TransferStatus.PENDING
        self.error = ""

    def __repr__(self) -> str:
        return (
            f"<NixlTransfer {self.operation.value} {self.peer} descriptors={self.num_descriptors}"
            f" bytes={self.num_bytes} {self.status.value}>"
        )


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
        self._peers: set[PeerName] = set()
        self._pending: dict[int, NixlTransfer] = {}
        _create_backends(self._agent, backends, backend_params or {}, num_threads)

    def __repr__(self) -> str:
        if self._agent is None:
            return f"<NixlTransport {self._name} closed>"
        return f"<NixlTransport {self._name} peers={len(self._peers)} unreleased={len(self._pending)}>"

    @property
    def name(self) -> str:
        """The agent's own unique name, as it appears in peers' notifications."""
        return self._name

    def register(self, spans: NDArray[np.int64], *, device: str, device_id: int) -> None:
        """Make memory usable by transfers. Raises ``TransportError`` when the backend refuses it."""
        _check_spans(spans)
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
        """Make a peer's registered memory addressable. Adding the same agent twice is harmless."""
        agent = self._open_agent()
        try:
            name = agent.add_remote_agent(metadata)
        except Exception as error:
            raise TransportError(f"peer metadata of {len(metadata)} bytes: {_text(error)}") from error
        peer = PeerName(name.decode() if isinstance(name, bytes) else str(name))
        self._peers.add(peer)
        return peer

    def remove_peer(self, peer: PeerName) -> None:
        """Forget a peer and tear its connection down, so that pending transfers to it fail."""
        agent = self._open_agent()
        if peer not in self._peers:
            return
        self._peers.discard(peer)
        try:
            agent.remove_remote_agent(peer)
        except Exception as error:
            raise TransportError(f"removing peer {peer}: {_text(error)}") from error

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
        if peer not in self._peers:
            raise PeerUnreachable(f"peer {peer} was never added, or is removed")
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
        transfer = NixlTransfer(operation, peer, handle, len(local), num_bytes)
        transfer.posted_at_s = started_at_s
        self._pending[id(transfer)] = transfer
        self._settle(transfer, lambda: agent.transfer(handle, notification))
        transfer.post_s = self._now_s() - started_at_s
        return transfer

    def poll(self, transfer: NixlTransfer) -> TransferStatus:
        """Make progress and say how a transfer stands. A final status stays final."""
        if transfer.status is TransferStatus.PENDING:
            agent = self._open_agent()
            self._settle(transfer, lambda: agent.check_xfer_state(transfer._handle))  # noqa: SLF001
        return transfer.status

    def release(self, transfer: NixlTransfer) -> bool:
        """Give a transfer's resources back; False while it may still touch memory, or NIXL keeps the handle."""
        if id(transfer) not in self._pending:
            return True
        if self.poll(transfer) is TransferStatus.PENDING:
            return False
        try:
            transfer._handle.release()  # noqa: SLF001
        except Exception as error:  # noqa: BLE001
            transfer.error = transfer.error or f"release: {_text(error)}"
            return False
        del self._pending[id(transfer)]
        return True

    def notify(self, peer: PeerName, notification: bytes) -> None:
        """Send a small message to a peer, at most once."""
        agent = self._open_agent()
        if peer not in self._peers:
            raise PeerUnreachable(f"peer {peer} was never added, or is removed")
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
        """Deregister and forget everything. Pending transfers fail first, with their connections. Idempotent."""
        if self._agent is None:
            return
        for peer in tuple(self._peers):
            with contextlib.suppress(TransportError):
                self.remove_peer(peer)
        for transfer in tuple(self._pending.values()):
            self.release(transfer)
        for registration in self._registrations:
            # A backend that lost its device cannot deregister; the process is about to let go of it anyway.
            with contextlib.suppress(Exception):
                self._agent.deregister_memory(registration)
        self._registrations.clear()
        self._pending.clear()
        self._agent = None

    def _settle(self, transfer: NixlTransfer, ask: Callable[[], str]) -> None:
        try:
            status = _STATUS.get(ask(), TransferStatus.FAILED)
        except Exception as error:  # noqa: BLE001 - NIXL reports a failed transfer by raising
            status = TransferStatus.FAILED
            transfer.error = _text(error)
        transfer.status = status
        if status is not TransferStatus.PENDING:
            transfer.wire_s = self._now_s() - transfer.posted_at_s

    def _open_agent(self) -> Any:
        if self._agent is None:
            raise LocalProtocolError(f"transport {self._name} is closed")
        return self._agent


def check_pairs(local: NDArray[np.int64], remote: NDArray[np.int64]) -> int:
    """Total bytes of a transfer; raises ``LocalProtocolError`` unless local[i] and remote[i] pair up."""
    _check_spans(local)
    _check_spans(remote)
    if local.shape != remote.shape or not np.array_equal(local[:, 1], remote[:, 1]):
        raise LocalProtocolError(f"local {local.shape} and remote {remote.shape} spans do not pair up by length")
    return int(local[:, 1].sum())


def _check_spans(spans: NDArray[np.int64]) -> None:
    if spans.dtype != np.int64 or spans.ndim != 2 or spans.shape[1] != 2 or not len(spans):
        raise LocalProtocolError(f"spans are int64 (n >= 1, 2), not {spans.dtype} {spans.shape}")
    if spans.min() <= 0:
        raise LocalProtocolError("a span has a positive address and a positive length")


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
