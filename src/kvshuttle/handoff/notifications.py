"""What a holder's worker tells a reader's worker through the transport itself, beside its writes.

A notification that is attached to a write arrives after the bytes of that write; between notifications there is no
order, and each may be lost or come twice.
"""

from __future__ import annotations

import msgspec

from kvshuttle.errors import RemoteProtocolError


class Written(msgspec.Struct, frozen=True, tag="written", array_like=True):
    """Attached to a write: its ``num_blocks`` blocks are in place. ``sequence`` counts from 0 in each epoch."""

    registration_id: str
    epoch: int
    sequence: int
    num_blocks: int


class Commit(msgspec.Struct, frozen=True, tag="commit", array_like=True):
    """Everything is in place: this epoch's ``num_writes`` writes with ``num_blocks`` blocks altogether have ended.

    Nothing is written under this registration after it.
    """

    registration_id: str
    epoch: int
    num_writes: int
    num_blocks: int


class Fail(msgspec.Struct, frozen=True, tag="fail", array_like=True):
    """There will be no commit. Writes may still be under way."""

    registration_id: str
    reason: str


Notification = Written | Commit | Fail

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Notification] = msgspec.msgpack.Decoder(Notification)


def encode_notification(notification: Notification) -> bytes:
    """The bytes of a notification."""
    return _encoder.encode(notification)


def decode_notification(payload: bytes) -> Notification:
    """The notification in ``payload``. Raises ``RemoteProtocolError`` when it is none."""
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"undecodable notification: {error}") from error
