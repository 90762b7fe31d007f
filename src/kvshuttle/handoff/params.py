"""``kv_transfer_params`` as the router writes them and the connector reads them.

They travel through vLLM's OpenAI API as a JSON object, so an engine that is reachable by clients
directly sees arbitrary JSON here: parsing never raises anything but ``ParamsError``-like ``ValueError``
with the offending field in the text, and the caller treats a bad object as "no transfer".
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

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


class Keep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When the answer is done, keep the KV of prompt and answer under ``handle``, for the next turn to read.

    ``supersedes``: an earlier handle, let go of as soon as this one is held, and not before.
    """

    handle: str
    supersedes: str | None = None


class History(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """KV of a beginning of this prompt is kept under ``handle`` at ``source``; as much of it as matches is used."""

    handle: str
    source: Peer


class PrefillLeg(msgspec.Struct, frozen=True, tag="prefill", tag_field="leg", forbid_unknown_fields=True):
    """To the prefill engine: get what ``history`` has, compute the rest, and hold the KV under ``transfer_id``."""

    transfer_id: str
    mode: Mode = Mode.PULL
    history: History | None = None


class DecodeLeg(msgspec.Struct, frozen=True, tag="decode", tag_field="leg", forbid_unknown_fields=True):
    """To the decode engine: get the KV of ``transfer_id`` from ``source``."""

    transfer_id: str
    source: Peer
    mode: Mode = Mode.PULL
    keep: Keep | None = None


class LocalLeg(msgspec.Struct, frozen=True, tag="local", tag_field="leg", forbid_unknown_fields=True):
    """To an engine that serves the request alone: get what ``history`` has, compute the rest, answer, and keep."""

    history: History | None = None
    keep: Keep | None = None


class PrefillResult(msgspec.Struct, frozen=True, tag="prefilled", tag_field="leg"):
    """From the prefill engine, in its response: so many tokens are held for so long.

    ``num_tokens``: 0 after a push for which nothing needs to be held any more. ``num_cached_tokens``: how many of the
    prompt's tokens it never computed for this request, but had or read; None for an engine that does not say.
    """

    transfer_id: str
    num_tokens: int
    lease_s: float
    num_cached_tokens: int | None = None


Leg = PrefillLeg | DecodeLeg | LocalLeg

_MAX_LEN = 128


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
    for field, name in _names_in(leg):
        if not 0 < len(name) <= _MAX_LEN:
            raise ValueError(f"kv_transfer_params.{KEY}.{field}: 1 to {_MAX_LEN} characters, got {len(name)}")
    return leg


def keep_of(leg: Leg | None) -> Keep | None:
    """What is to be kept when the request of ``leg`` is done."""
    return leg.keep if isinstance(leg, DecodeLeg | LocalLeg) else None


def history_of(leg: Leg | None) -> History | None:
    """Where the request of ``leg`` may get a part of its prompt."""
    return leg.history if isinstance(leg, PrefillLeg | LocalLeg) else None


def to_params(leg: Leg | PrefillResult) -> dict[str, Any]:
    """The JSON-able ``kv_transfer_params`` that carries ``leg``; what it does not say is left out."""
    return {KEY: _without_none(msgspec.to_builtins(leg))}


def parse_result(params: object) -> PrefillResult | None:
    """What the prefill engine says it holds; None when it holds nothing (or is not ours)."""
    if not isinstance(params, dict) or KEY not in params:
        return None
    try:
        return msgspec.convert(params[KEY], type=PrefillResult)
    except msgspec.ValidationError:
        return None


def _names_in(leg: Leg) -> Iterator[tuple[str, str]]:
    if isinstance(leg, PrefillLeg | DecodeLeg):
        yield "transfer_id", leg.transfer_id
    if (keep := keep_of(leg)) is not None:
        yield "keep.handle", keep.handle
        if keep.supersedes is not None:
            yield "keep.supersedes", keep.supersedes
    if (history := history_of(leg)) is not None:
        yield "history.handle", history.handle


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    return value
