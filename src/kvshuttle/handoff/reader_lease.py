"""A lease as its reader sees it: what may be read, until when it is safe, and when to renew.

The holder counts a granted duration from when it granted; the reader from when it *sent*, and a little less of
it, so the reader's end comes first although the clocks share neither origin nor exact rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvshuttle.blocks import TokenChain, num_blocks_for
from kvshuttle.errors import RemoteProtocolError
from kvshuttle.handoff.block_plan import NULL_BLOCK_ID
from kvshuttle.handoff.fetch_protocol import RenewAnswered, SendRenew
from kvshuttle.handoff.messages import Acquired, Renew

MAX_CLOCK_RATE_SKEW = 0.002
"""Largest relative difference of two hosts' monotonic clocks. Linux slews each by at most 0.0005."""

RENEWALS_PER_LEASE = 3
"""Two renewals in a row may be lost before the lease is."""


@dataclass(slots=True, eq=False)
class ReaderLease:
    """Made by ``granted``. ``ends_at_s`` and ``renew_at_s`` are instants of this process's clock."""

    lease_id: str
    num_verified_tokens: int
    block_ids: tuple[int, ...]
    duration_s: float
    ends_at_s: float
    renew_at_s: float
    is_lost: bool = False
    ordinal: int = 0
    renew_sent_at_s: float | None = None

    @classmethod
    def granted(cls, answer: Acquired, *, duration_s: float, sent_at_s: float) -> ReaderLease:
        """The lease that ``answer`` grants, when its acquire for ``duration_s`` was sent at ``sent_at_s``."""
        granted_s = min(answer.remaining_s, duration_s)
        return cls(
            lease_id=answer.lease_id,
            num_verified_tokens=answer.num_verified_tokens,
            block_ids=answer.block_ids,
            duration_s=duration_s,
            ends_at_s=sent_at_s + granted_s * (1 - MAX_CLOCK_RATE_SKEW),
            renew_at_s=sent_at_s + granted_s / RENEWALS_PER_LEASE,
        )

    def is_live(self, now_s: float) -> bool:
        """Whether the holder certainly still keeps the blocks."""
        return not self.is_lost and now_s < self.ends_at_s

    def renewal(self, now_s: float) -> SendRenew:
        """The renew to send now; an answer to an earlier one no longer counts."""
        interval_s = self.duration_s / RENEWALS_PER_LEASE
        self.ordinal += 1
        self.renew_sent_at_s = now_s
        self.renew_at_s = now_s + interval_s
        return SendRenew(Renew((self.lease_id,), self.duration_s), self.ordinal, interval_s)

    def renew(self, fact: RenewAnswered) -> None:
        """Take in an answer. Nonsense, and answers to superseded or answered renewals, count as no answer."""
        if len(fact.answer.remaining_s) != 1 or not math.isfinite(fact.answer.remaining_s[0]):
            return
        remaining_s = min(fact.answer.remaining_s[0], self.duration_s)
        if remaining_s <= 0:
            self.is_lost = True
        elif fact.ordinal == self.ordinal and self.renew_sent_at_s is not None:
            self.ends_at_s = max(self.ends_at_s, self.renew_sent_at_s + remaining_s * (1 - MAX_CLOCK_RATE_SKEW))
            self.renew_at_s = min(self.renew_at_s, self.renew_sent_at_s + remaining_s / RENEWALS_PER_LEASE)
            self.renew_sent_at_s = None


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
    needed = answer.block_ids[: num_blocks_for(num_tokens, wanted.block_size_tokens)]
    if len(needed) * wanted.block_size_tokens < num_tokens:
        raise RemoteProtocolError(f"acquired.block_ids: {len(needed)} blocks for {num_tokens} tokens")
    if min(needed) <= NULL_BLOCK_ID or len(set(needed)) != len(needed):
        raise RemoteProtocolError("acquired.block_ids: a block is null, negative or named twice")
    if not (math.isfinite(answer.remaining_s) and answer.remaining_s > 0):
        raise RemoteProtocolError(f"acquired.remaining_s: {answer.remaining_s}")
