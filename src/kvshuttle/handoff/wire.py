"""Messages as bytes: msgpack of tagged structs, for whoever carries them."""

from __future__ import annotations

import msgspec

from kvshuttle.errors import RemoteProtocolError
from kvshuttle.handoff.messages import PROTOCOL_VERSION, Message, Refused


class MessageCodec:
    """Encodes and decodes ``Message``; the side channel is given one, since it knows no protocol itself."""

    __slots__ = ("_decoder", "_encoder")

    version = PROTOCOL_VERSION

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)

    def encode(self, message: Message) -> bytes:
        """The bytes of a message."""
        return self._encoder.encode(message)

    def decode(self, payload: bytes) -> Message:
        """The message in ``payload``. Raises ``RemoteProtocolError`` saying which field is wrong."""
        try:
            return self._decoder.decode(payload)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise RemoteProtocolError(f"undecodable message: {error}") from error

    def refusal(self, reason: str) -> Message:
        """What to answer when a request cannot be handled at all."""
        return Refused(reason)

    def refusal_reason(self, message: Message) -> str | None:
        """Why the peer refused, or None when ``message`` is a proper answer."""
        return message.reason if isinstance(message, Refused) else None
