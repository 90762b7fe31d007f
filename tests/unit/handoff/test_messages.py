from __future__ import annotations

import contextlib
import dataclasses
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshuttle.errors import RemoteProtocolError
from kvshuttle.handoff import (
    PROTOCOL_VERSION,
    Acquired,
    Busy,
    Declined,
    DeclineReason,
    Denied,
    DenyReason,
    EngineCard,
    Hello,
    HelloAck,
    Message,
    MessageCodec,
    Orders,
    OrdersTaken,
    Proceeding,
    Refused,
    Region,
    Registered,
    Release,
    Released,
    Renew,
    Renewed,
    Stage,
    Status,
    StatusReport,
    Withdrawn,
    WorkerCard,
)
from kvshuttle.handoff.cards import FEATURES, Feature
from support.handoff_values import FINGERPRINT, acquire
from support.push_values import close_order, open_order, proceed, register, withdraw

CARD = EngineCard(
    engine_id="prefill-1",
    incarnation="inc-1",
    kv_role="kv_both",
    protocol_version=PROTOCOL_VERSION,
    vllm_version="0.32.0",
    fingerprint=FINGERPRINT,
    workers=(WorkerCard(0, "127.0.0.1:9", b"\x00agent\xff", "DRAM", 0, (Region(2**47, 64, 64, 10),)),),
    features=FEATURES,
)
EXAMPLES: list[Message] = [
    Hello(PROTOCOL_VERSION, "router"),
    HelloAck(CARD),
    acquire(range(10)),
    Acquired("lease-1", "inc-1", 10, (3, 1, 2), 29.5),
    Denied(DenyReason.INCOMPATIBLE, "kv_dtype: 'bf16' != 'fp8'"),
    Renew(("lease-1",), 30.0),
    Renewed((30.0, -1.0)),
    Release(("lease-1",), ("xfer-1",), drop=False),
    Released(),
    Status(),
    StatusReport("prefill-1", "inc-1", 1, 2, 100, 50, 7, 3, 1),
    register(),
    Registered("lease-1", "life-1", 30.0),
    Declined(DeclineReason.OTHER_TOKENS, "why"),
    proceed(),
    Proceeding(29.5, Stage.COMPUTING),
    withdraw(drop=True),
    Withdrawn(is_drained=False),
    Orders(7, (open_order(), close_order("lease_expired"))),
    OrdersTaken(9, ("lease-1",)),
    Busy("decode-1", 0.5),
    Refused("bad version"),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_survives_the_wire(message: Message) -> None:
    codec = MessageCodec()
    assert codec.decode(codec.encode(message)) == message


def test_the_card_of_an_engine_that_has_no_features_yet_is_read_and_says_none() -> None:
    codec = MessageCodec()
    fields = msgspec.msgpack.decode(codec.encode(HelloAck(CARD)))
    del fields["card"]["features"]
    read = codec.decode(msgspec.msgpack.encode(fields))
    assert read == HelloAck(msgspec.structs.replace(CARD, features=()))


def test_a_card_is_read_by_an_engine_that_does_not_know_its_newest_features() -> None:
    codec = MessageCodec()
    fields = msgspec.msgpack.decode(codec.encode(HelloAck(CARD)))
    fields["card"]["features"] = [*FEATURES, "of a later release"]
    fields["card"]["later"] = 1
    read = codec.decode(msgspec.msgpack.encode(fields))
    assert isinstance(read, HelloAck)
    assert Feature.TURNS in read.card.features


def test_every_message_has_an_example_here() -> None:
    assert {type(message) for message in EXAMPLES} == set(get_args(Message))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xff" * 8,
        msgspec.msgpack.encode({"type": "teleport"}),
        msgspec.msgpack.encode({"type": "renew", "lease_ids": ["a"]}),
        msgspec.msgpack.encode({"type": "renew", "lease_ids": "a", "duration_s": 1.0}),
        msgspec.msgpack.encode({"type": "denied", "reason": "because"}),
        msgspec.msgpack.encode([1, 2, 3]),
    ],
)
def test_an_undecodable_message_is_the_peers_fault(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        MessageCodec().decode(payload)


@given(st.binary(max_size=200))
def test_random_bytes_never_raise_anything_else(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        MessageCodec().decode(payload)


@given(st.sampled_from(EXAMPLES), st.integers(0, 2000), st.integers(0, 255))
def test_a_flipped_byte_decodes_or_is_the_peers_fault(message: Message, position: int, value: int) -> None:
    codec = MessageCodec()
    payload = bytearray(codec.encode(message))
    payload[position % len(payload)] = value
    with contextlib.suppress(RemoteProtocolError):
        codec.decode(bytes(payload))


def test_a_refusal_is_told_from_an_answer() -> None:
    codec = MessageCodec()
    assert codec.refusal_reason(codec.refusal("bad version")) == "bad version"
    assert codec.refusal_reason(Released()) is None


def test_equal_fingerprints_have_no_differences_and_each_difference_names_both_values() -> None:
    assert FINGERPRINT.differences(FINGERPRINT) == []
    other = msgspec.structs.replace(FINGERPRINT, kv_dtype="fp8", num_layers=3)
    assert FINGERPRINT.differences(other) == ["kv_dtype: 'bfloat16' != 'fp8'", "num_layers: 2 != 3"]


@pytest.mark.parametrize("field", [field.name for field in msgspec.structs.fields(FINGERPRINT)])
def test_every_field_of_a_fingerprint_counts(field: str) -> None:
    value = getattr(FINGERPRINT, field)
    changed = value + type(value)(1) if isinstance(value, int) else value * 2
    assert len(FINGERPRINT.differences(msgspec.structs.replace(FINGERPRINT, **{field: changed}))) == 1


def test_messages_are_frozen() -> None:
    with pytest.raises(AttributeError):
        EXAMPLES[0].sender = "someone"  # type: ignore[union-attr,misc]
    assert not any(dataclasses.is_dataclass(message) for message in EXAMPLES)
