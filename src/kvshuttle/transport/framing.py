"""How side-channel messages look on the wire, and what the shared secret proves.

One ZMQ frame holds a fixed header and the payload. The header keeps its shape in every protocol version, so that
two versions can at least refuse each other politely::

    magic "KVSH" | version: 1 byte | kind: 1 byte | correlation id: 16 bytes | tag: 16 bytes | payload

The tag is keyed BLAKE2b (128 bits) over everything else; without a secret it is all zeros. With one it proves:

- *Origin and integrity.* Whoever made the frame knew the secret, and nobody changed it since.
- *Replies answer their request.* The tag covers kind and correlation id, which is random and fresh for each
  request: a reply cannot be replayed for another request, nor turned into a request.
- *No quick replay.* A listener drops requests and one-way messages whose correlation id it has among the last
  ``REPLAY_WINDOW`` authentic ones.

It does not hide anything, and a recorded request still works after it has fallen out of that window, after the
listener restarts, or at another listener with the same secret. What that could do is bounded by the messages:
handles and lease ids are random and die with their use.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections import deque
from dataclasses import dataclass
from enum import IntEnum

from kvshuttle.errors import ConfigError, RemoteProtocolError

MAX_FRAME_BYTES = 8 * 1024 * 1024
"""An ACQUIRE of a million tokens in blocks of 16 needs 1 MiB; more than this is a mistake or an attack."""

MIN_SECRET_LEN_BYTES = 16
REPLAY_WINDOW = 16384
"""Ids remembered, about 2 MiB: a minute of a busy cluster's control messages on one engine."""

CORRELATION_LEN_BYTES = 16
_TAG_LEN_BYTES = 16
_MAGIC = b"KVSH"
_HEADER = struct.Struct(f"!4sBB{CORRELATION_LEN_BYTES}s")
_OVERHEAD_LEN_BYTES = _HEADER.size + _TAG_LEN_BYTES
_NO_TAG = bytes(_TAG_LEN_BYTES)

MAX_PAYLOAD_BYTES = MAX_FRAME_BYTES - _OVERHEAD_LEN_BYTES


class Kind(IntEnum):
    """What a frame is; part of what the tag covers."""

    REQUEST = 1
    REPLY = 2
    ONE_WAY = 3


class MalformedFrameError(RemoteProtocolError):
    """Not a frame of ours at all."""


class WrongTagError(RemoteProtocolError):
    """The sender does not know our secret, or one side has a secret and the other has none."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One authentic frame. ``version`` is the sender's and may differ from ours."""

    version: int
    kind: Kind
    correlation_id: bytes
    payload: bytes


class Sealer:
    """Turns payloads into frames and back, under one shared secret (None: no authentication).

    Raises ``ConfigError`` when the secret is shorter than 16 bytes.
    """

    __slots__ = ("_key",)

    def __init__(self, secret: bytes | None) -> None:
        if secret is not None and len(secret) < MIN_SECRET_LEN_BYTES:
            raise ConfigError(
                f"KVSHUTTLE_SECRET: {len(secret)} bytes are too few, use at least {MIN_SECRET_LEN_BYTES}"
                " (for instance the output of `openssl rand -hex 32`)"
            )
        # BLAKE2b takes keys of up to 64 bytes, an operator's secret may be longer.
        self._key = None if secret is None else hashlib.blake2b(secret, digest_size=64).digest()

    def __repr__(self) -> str:
        return f"<Sealer {'open' if self._key is None else 'keyed'}>"

    @property
    def is_keyed(self) -> bool:
        """Whether frames are authenticated."""
        return self._key is not None

    def seal(self, frame: Frame) -> bytes:
        """The bytes of a frame."""
        header = _HEADER.pack(_MAGIC, frame.version, frame.kind, frame.correlation_id)
        return b"".join((header, self._tag(header, frame.payload), frame.payload))

    def open(self, data: bytes) -> Frame:
        """The frame in ``data``; its tag is checked first. Raises ``WrongTagError`` or ``MalformedFrameError``."""
        if len(data) < _OVERHEAD_LEN_BYTES or data[: len(_MAGIC)] != _MAGIC:
            raise MalformedFrameError(f"{len(data)} bytes that do not start with our header")
        header, tag = data[: _HEADER.size], data[_HEADER.size : _OVERHEAD_LEN_BYTES]
        payload = data[_OVERHEAD_LEN_BYTES:]
        if not hmac.compare_digest(tag, self._tag(header, payload)):
            raise WrongTagError("the frame's tag does not fit our KVSHUTTLE_SECRET")
        _, version, kind, correlation_id = _HEADER.unpack(header)
        try:
            return Frame(version, Kind(kind), correlation_id, payload)
        except ValueError as error:
            raise MalformedFrameError(f"unknown frame kind {kind}") from error

    def _tag(self, header: bytes, payload: bytes) -> bytes:
        if self._key is None:
            return _NO_TAG
        tag = hashlib.blake2b(header, digest_size=_TAG_LEN_BYTES, key=self._key, person=b"kvshuttle-side")
        tag.update(payload)
        return tag.digest()


class ReplayWindow:
    """The last ``size`` correlation ids; says whether one was seen before."""

    __slots__ = ("_order", "_seen", "_size")

    def __init__(self, size: int = REPLAY_WINDOW) -> None:
        self._size = size
        self._order: deque[bytes] = deque()
        self._seen: set[bytes] = set()

    def is_replay(self, correlation_id: bytes) -> bool:
        """True when the id is in the window; otherwise remembers it, forgetting the oldest."""
        if correlation_id in self._seen:
            return True
        self._seen.add(correlation_id)
        self._order.append(correlation_id)
        if len(self._order) > self._size:
            self._seen.discard(self._order.popleft())
        return False
