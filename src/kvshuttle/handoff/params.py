"""``kv_transfer_params`` as the router writes them and the connector reads them.

They travel through vLLM's OpenAI API as a JSON object, so an engine that is reachable by clients
directly sees arbitrary JSON here: parsing never raises anything but ``ParamsError``-like ``ValueError``
with the offending field in the text, and the caller treats a bad object as "no transfer".
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

KEY = "kvshuttle"
"""Our object sits under this key, so that foreign routers' params are never mistaken for ours."""


class Mode(StrEnum):
    """How the KV of one request gets to the decode engine."""

    PULL = "pull"
    """The decode engine reads it when the prompt is computed."""
    PUSH = "push"
    """The prefill engine writes each chunk while the next one computes; both legs are sent at once."""


class Peer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where an engine's scheduler half listens, and which life of it is meant."""

    address: str
    """``host:port``"""
    engine_id: str
    incarnation: str


class PrefillLeg(msgspec.Struct, frozen=True, tag="prefill", tag_field="leg", forbid_unknown_fields=True):
    """To the prefill engine: compute, and hold the KV under ``transfer_id``."""

    transfer_id: str
    mode: Mode = Mode.PULL


class DecodeLeg(msgspec.Struct, frozen=True, tag="decode", tag_field="leg", forbid_unknown_fields=True):
    """To the decode engine: get the KV of ``transfer_id`` from ``source``."""

    transfer_id: str
    source: Peer
    mode: Mode = Mode.PULL


class PrefillResult(msgspec.Struct, frozen=True, tag="prefilled", tag_field="leg"):
    """From the prefill engine, in its response: so many tokens are held for so long."""

    transfer_id: str
    num_tokens: int
    lease_s: float


Leg = PrefillLeg | DecodeLeg

_MAX_ID_LEN = 128


def parse_leg(params: object) -> Leg | None:
    """Our leg in a request's ``kv_transfer_params``; None when it has none.

    Raises ``ValueError`` naming the field when our key is present but malformed.
    """
    if not isinstance(params, dict) or KEY not in params:
        return None
    try:
        leg: Leg = msgspec.convert(params[KEY], type=Leg)
    except msgspec.ValidationError as error:
        raise ValueError(f"kv_transfer_params.{KEY}: {error}") from error
    if not 0 < len(leg.transfer_id) <= _MAX_ID_LEN:
        raise ValueError(
            f"kv_transfer_params.{KEY}.transfer_id: 1 to {_MAX_ID_LEN} characters, got {len(leg.transfer_id)}"
        )
    return leg


def to_params(leg: Leg | PrefillResult) -> dict[str, Any]:
    """The JSON-able ``kv_transfer_params`` that carries ``leg``."""
    params: dict[str, Any] = {KEY: msgspec.to_builtins(leg)}
    return params


def parse_result(params: object) -> PrefillResult | None:
    """What the prefill engine says it holds; None when it holds nothing (or is not ours)."""
    if not isinstance(params, dict) or KEY not in params:
        return None
    try:
        return msgspec.convert(params[KEY], type=PrefillResult)
    except msgspec.ValidationError:
        return None
