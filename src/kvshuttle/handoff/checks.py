"""Whether what a peer sent can be true at all. Types are checked when bytes are decoded; this is about meaning."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvshuttle.blocks import TokenChain, num_blocks_for
from kvshuttle.errors import RemoteProtocolError
from kvshuttle.handoff.block_plan import NULL_BLOCK_ID
from kvshuttle.handoff.messages import DenyReason

if TYPE_CHECKING:
    from kvshuttle.handoff.cards import Fingerprint
    from kvshuttle.handoff.messages import Acquire, Acquired, Register


def check_duration(duration_s: float) -> float:
    """Return ``duration_s``; raise ``RemoteProtocolError`` unless it is a positive number."""
    if not (math.isfinite(duration_s) and duration_s > 0):
        raise RemoteProtocolError(f"duration_s: {duration_s} is not a positive number of seconds")
    return duration_s


def wanted_chain(message: Acquire | Register) -> TokenChain:
    """Return the token chain that ``message`` asks for; raise ``RemoteProtocolError`` when it contradicts itself."""
    if message.block_size_tokens <= 0 or message.num_tokens <= 0:
        raise RemoteProtocolError(f"a wish for {message.num_tokens} tokens, {message.block_size_tokens} a block")
    try:
        return TokenChain(message.block_size_tokens, message.num_tokens, message.links, message.tail)
    except ValueError as error:
        raise RemoteProtocolError(f"the wanted chain: {error}") from error


def acquire_refusal(message: Acquire, incarnation: str, fingerprint: Fingerprint) -> tuple[DenyReason, str] | None:
    """Why an engine of this life and kind cannot serve ``message``, whatever it holds; None when it can."""
    if message.incarnation and message.incarnation != incarnation:
        return DenyReason.OTHER_INCARNATION, f"this is {incarnation}"
    differences = fingerprint.differences(message.fingerprint)
    return (DenyReason.INCOMPATIBLE, "; ".join(differences)) if differences else None


def check_registration(message: Register) -> TokenChain:
    """Return the token chain that ``message`` is about; raise ``RemoteProtocolError`` when it contradicts itself."""
    chain = wanted_chain(message)
    destinations = message.destination_block_ids
    num_blocks = num_blocks_for(chain.num_tokens, chain.block_size_tokens)
    if message.first_index < 0 or message.first_index + len(destinations) != num_blocks or not destinations:
        raise RemoteProtocolError(
            f"register.destination_block_ids: {len(destinations)} from index {message.first_index} of {num_blocks}"
        )
    _check_block_ids("register.destination_block_ids", destinations)
    if not message.registration_id:
        raise RemoteProtocolError("register.registration_id is empty")
    return chain


def check_grant(answer: Acquired, *, wanted: TokenChain, incarnation: str) -> None:
    """Raise ``RemoteProtocolError`` unless ``answer`` can be true for an acquire of ``wanted``.

    ``incarnation``: the holder's life that was meant, "" for any.
    """
    num_tokens = answer.num_verified_tokens
    if not answer.lease_id:
        raise RemoteProtocolError("acquired.lease_id is empty")
    if incarnation and answer.incarnation != incarnation:
        raise RemoteProtocolError(f"acquired.incarnation: {answer.incarnation!r} was not asked")
    is_whole = num_tokens == wanted.num_tokens or num_tokens % wanted.block_size_tokens == 0
    if not (0 < num_tokens <= wanted.num_tokens and is_whole):
        raise RemoteProtocolError(f"acquired.num_verified_tokens: {num_tokens} of {wanted.num_tokens} wanted")
    num_blocks = num_blocks_for(num_tokens, wanted.block_size_tokens)
    if len(answer.block_ids) < num_blocks:
        raise RemoteProtocolError(f"acquired.block_ids: {len(answer.block_ids)} blocks for {num_tokens} tokens")
    _check_block_ids("acquired.block_ids", answer.block_ids)
    if not (math.isfinite(answer.remaining_s) and answer.remaining_s > 0):
        raise RemoteProtocolError(f"acquired.remaining_s: {answer.remaining_s} is not a positive number of seconds")


def _check_block_ids(field: str, block_ids: tuple[int, ...]) -> None:
    if min(block_ids) <= NULL_BLOCK_ID or len(set(block_ids)) != len(block_ids):
        raise RemoteProtocolError(f"{field}: a block is null, negative or named twice")
