"""The error tree, split by whose fault it is.

::

    KvshuttleError
    ├── ConfigError            the operator's: a knob is wrong; names the field and the fix
    ├── LaunchFailed           a process that we started did not come up; says which, and shows the end of its log
    ├── RequestError           the client's: the HTTP request cannot be served as asked
    ├── LocalProtocolError     ours: this process broke the hand-off protocol (a bug)
    ├── RemoteProtocolError    the peer's: a message that cannot be decoded, trusted or accepted
    │   └── IncompatiblePeer   the peer is sound but its KV cannot be used here
    └── TransportError         the weather: a peer died, a link broke, a deadline passed
        ├── PeerUnreachable
        └── TransferFailed

Foreign exceptions (NIXL, ZMQ, msgspec) are mapped to this tree in ``transport/`` and nowhere else.
"""

from __future__ import annotations


class KvshuttleError(Exception):
    """Root of everything this project raises on purpose."""


class ConfigError(KvshuttleError):
    """A setting is wrong. The message names the field, the value and what to put instead."""


class LaunchFailed(KvshuttleError):
    """Something the launcher needs could not be fetched or started. The message names it, its log and what to do."""


class RequestError(KvshuttleError):
    """The client's request cannot be served.

    ``status`` is the HTTP status; ``param`` the offending field, or None; ``code`` OpenAI's error code, or None.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


class LocalProtocolError(KvshuttleError):
    """This process used a machine in a way its transition table does not allow: a bug of ours."""


class RemoteProtocolError(KvshuttleError):
    """A peer sent something that cannot be decoded, authenticated or accepted."""


class IncompatiblePeer(RemoteProtocolError):
    """A peer's KV cannot be used here; the message lists each differing field with both values."""


class TransportError(KvshuttleError):
    """Bytes did not arrive: the outside world failed, not the code."""


class PeerUnreachable(TransportError):
    """No answer from a peer within the deadline."""


class TransferFailed(TransportError):
    """A read or write ended in failure; the destination's content is undefined."""
