from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshuttle.errors import ConfigError, RemoteProtocolError
from kvshuttle.transport.framing import Frame, Kind, MalformedFrameError, ReplayWindow, Sealer, WrongTagError
from kvshuttle.transport.links import is_address

SECRET = b"sixteen bytes ok"
FRAME = Frame(1, Kind.REQUEST, b"i" * 16, b"payload")

frames = st.builds(
    Frame,
    version=st.integers(0, 255),
    kind=st.sampled_from(Kind),
    correlation_id=st.binary(min_size=16, max_size=16),
    payload=st.binary(max_size=200),
)
secrets = st.none() | st.binary(min_size=16, max_size=100)


@given(frames, secrets)
def test_what_was_sealed_opens_again(frame: Frame, secret: bytes | None) -> None:
    assert Sealer(secret).open(Sealer(secret).seal(frame)) == frame


@given(frames, secrets, secrets)
def test_another_secret_does_not_open_it(frame: Frame, ours: bytes | None, theirs: bytes | None) -> None:
    if ours == theirs:
        return
    with pytest.raises(WrongTagError):
        Sealer(theirs).open(Sealer(ours).seal(frame))


@given(frames, st.data())
def test_no_bit_of_a_sealed_frame_can_be_changed(frame: Frame, data: st.DataObject) -> None:
    sealed = bytearray(Sealer(SECRET).seal(frame))
    bit = data.draw(st.integers(0, len(sealed) * 8 - 1))
    sealed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(RemoteProtocolError):
        Sealer(SECRET).open(bytes(sealed))


@given(st.binary(max_size=100), secrets)
def test_arbitrary_bytes_are_never_a_frame_and_never_a_crash(data: bytes, secret: bytes | None) -> None:
    with pytest.raises(RemoteProtocolError):
        Sealer(secret).open(data)


def test_every_truncation_is_refused() -> None:
    sealed = Sealer(SECRET).seal(FRAME)
    for length in range(len(sealed)):
        with pytest.raises(RemoteProtocolError):
            Sealer(SECRET).open(sealed[:length])


def test_the_tag_depends_on_every_field() -> None:
    def tag(frame: Frame) -> bytes:
        return Sealer(SECRET).seal(frame)[22:38]

    others = [
        dataclasses.replace(FRAME, version=2),
        dataclasses.replace(FRAME, kind=Kind.REPLY),
        dataclasses.replace(FRAME, correlation_id=b"j" * 16),
        dataclasses.replace(FRAME, payload=b"Payload"),
    ]
    assert len({tag(frame) for frame in (FRAME, *others)}) == 5


def test_an_unknown_kind_is_malformed_even_when_authentic() -> None:
    sealed = bytearray(Sealer(None).seal(FRAME))
    sealed[5] = 77
    with pytest.raises(MalformedFrameError, match="kind 77"):
        Sealer(None).open(bytes(sealed))


def test_a_short_secret_is_a_setting_to_fix_and_is_not_shown() -> None:
    with pytest.raises(ConfigError, match="KVSHUTTLE_SECRET: 15 bytes") as caught:
        Sealer(b"fifteen bytes !")
    assert "fifteen bytes !" not in str(caught.value)
    with pytest.raises(ConfigError, match="KVSHUTTLE_SECRET: 0 bytes"):
        Sealer(b"")


def test_the_secret_is_in_no_repr() -> None:
    assert repr(Sealer(SECRET)) == "<Sealer keyed>"
    assert repr(Sealer(None)) == "<Sealer open>"


@given(st.lists(st.integers(0, 30), max_size=200), st.integers(1, 10))
def test_the_replay_window_remembers_exactly_the_last_ids(ids: list[int], size: int) -> None:
    window = ReplayWindow(size)
    remembered: list[int] = []
    for number in ids:
        assert window.is_replay(bytes([number])) is (number in remembered)
        if number not in remembered:
            remembered = [*remembered, number][-size:]


@pytest.mark.parametrize("address", ["127.0.0.1:1", "localhost:65535", "[::1]:80", "[fe80::1%eth0]:80", "a-b.c_d.e:5"])
def test_a_host_and_port_is_an_address(address: str) -> None:
    assert is_address(address)


@pytest.mark.parametrize(
    "address",
    ["", ":1", "host", "host:", "host:0", "host:65536", "host:1:2", "::1:80", "h;i:1", "h/i:1", "h:1\n", "é:1"],
)
def test_anything_else_is_none(address: str) -> None:
    assert not is_address(address)
