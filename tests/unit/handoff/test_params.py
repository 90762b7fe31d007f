from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshuttle.handoff import (
    DecodeLeg,
    History,
    Keep,
    Leg,
    LocalLeg,
    Mode,
    Peer,
    PrefillLeg,
    PrefillResult,
    parse_leg,
    parse_result,
    to_params,
)
from kvshuttle.handoff.params import history_of, keep_of

PEER = Peer(address="10.0.0.1:14579", engine_id="prefill-1", incarnation="inc-1")
DECODE = {
    "leg": "decode",
    "transfer_id": "xfer-1",
    "source": {"address": "10.0.0.1:14579", "engine_id": "prefill-1", "incarnation": "inc-1"},
    "mode": "pull",
}


@pytest.mark.parametrize(
    "leg",
    [
        PrefillLeg("xfer-1"),
        PrefillLeg("xfer-1", Mode.PUSH, History("turn-1", PEER)),
        DecodeLeg("xfer-1", PEER),
        DecodeLeg("xfer-1", PEER, Mode.PUSH),
        DecodeLeg("xfer-1", PEER, keep=Keep("turn-2")),
        DecodeLeg("xfer-1", PEER, keep=Keep("turn-2", supersedes="turn-1")),
        LocalLeg(),
        LocalLeg(History("turn-1", PEER), Keep("turn-2")),
    ],
)
def test_a_leg_survives_json(leg: Leg) -> None:
    assert parse_leg(json.loads(json.dumps(to_params(leg)))) == leg


def test_a_result_survives_json() -> None:
    result = PrefillResult("xfer-1", num_tokens=300, lease_s=30.0, num_cached_tokens=200)
    assert parse_result(json.loads(json.dumps(to_params(result)))) == result


def test_the_wire_form_is_what_other_routers_may_write() -> None:
    assert to_params(DecodeLeg("xfer-1", PEER)) == {"kvshuttle": DECODE}
    assert parse_leg({"kvshuttle": {"leg": "prefill", "transfer_id": "xfer-1"}}) == PrefillLeg("xfer-1", Mode.PULL)
    assert to_params(LocalLeg(keep=Keep("turn-2"))) == {"kvshuttle": {"leg": "local", "keep": {"handle": "turn-2"}}}


def test_what_is_kept_and_what_is_read_is_found_in_every_leg_that_can_say_it() -> None:
    keep, history = Keep("turn-2"), History("turn-1", PEER)
    assert [keep_of(leg) for leg in (DecodeLeg("x", PEER, keep=keep), LocalLeg(keep=keep))] == [keep, keep]
    assert [history_of(leg) for leg in (PrefillLeg("x", history=history), LocalLeg(history))] == [history, history]
    assert (keep_of(PrefillLeg("x")), keep_of(None), history_of(DecodeLeg("x", PEER)), history_of(None)) == (None,) * 4


@pytest.mark.parametrize("params", [None, {}, [], "kvshuttle", 3, {"do_remote_prefill": True}])
def test_params_without_our_key_are_not_ours(params: object) -> None:
    assert parse_leg(params) is None
    assert parse_result(params) is None


@pytest.mark.parametrize(
    ("ours", "named"),
    [
        (None, "object"),
        ([], "object"),
        ({}, "leg"),
        ({"leg": "decode"}, "transfer_id"),
        ({"leg": "sideways", "transfer_id": "x"}, "sideways"),
        ({"leg": "prefill", "transfer_id": 7}, "transfer_id"),
        ({"leg": "prefill", "transfer_id": ""}, "transfer_id"),
        ({"leg": "prefill", "transfer_id": "x" * 129}, "transfer_id"),
        ({"leg": "prefill", "transfer_id": "x", "mode": "teleport"}, "mode"),
        ({"leg": "prefill", "transfer_id": "x", "extra": 1}, "extra"),
        ({**DECODE, "source": None}, "source"),
        ({**DECODE, "source": {**DECODE["source"], "port": 1}}, "port"),
        ({**DECODE, "source": {"address": "a"}}, "engine_id"),
        ({**DECODE, "keep": {}}, "handle"),
        ({**DECODE, "keep": {"handle": ""}}, "keep.handle"),
        ({**DECODE, "keep": {"handle": "x" * 129}}, "keep.handle"),
        ({**DECODE, "keep": {"handle": "x", "supersedes": ""}}, "keep.supersedes"),
        ({**DECODE, "keep": {"handle": "x", "supersedes": "x" * 129}}, "keep.supersedes"),
        ({**DECODE, "keep": {"handle": "x", "ttl": 3}}, "ttl"),
        ({**DECODE, "history": {"handle": "x", "source": DECODE["source"]}}, "history"),
        ({"leg": "prefill", "transfer_id": "x", "history": {"handle": "x"}}, "source"),
        ({"leg": "local", "history": {"handle": "", "source": DECODE["source"]}}, "history.handle"),
        ({"leg": "prefill", "transfer_id": "x", "keep": {"handle": "x"}}, "keep"),
        ({"leg": "local", "keep": {"handle": "x" * 129}}, "keep.handle"),
        ({"leg": "local", "transfer_id": "x"}, "transfer_id"),
        ({"leg": "prefilled", "transfer_id": "x", "num_tokens": 1, "lease_s": 1.0}, "prefilled"),
    ],
)
def test_a_malformed_leg_is_refused_and_the_field_is_named(ours: object, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        parse_leg({"kvshuttle": ours})


@pytest.mark.parametrize("ours", [None, {}, {"leg": "prefill", "transfer_id": "x"}, {"leg": "prefilled"}])
def test_a_malformed_result_holds_nothing(ours: object) -> None:
    assert parse_result({"kvshuttle": ours}) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(list(DECODE)), inner),
    max_leaves=10,
)


@given(JSON | st.dictionaries(st.sampled_from(["kvshuttle", "leg"]), JSON))
def test_any_json_parses_or_is_refused_with_a_value_error(params: object) -> None:
    with contextlib.suppress(ValueError):
        parse_leg(params)
    parse_result(params)
