"""A lease as its reader sees it: what may be read, until when it is safe, and when to renew.

The holder counts a granted duration from when it granted; the reader from when it *sent*, and a little less of
it, so the reader's end comes first although the clocks share neither origin nor exact rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvshuttle.blocks import num_blocks_for
from kvshuttle.errors import LocalProtocolError
from kvshuttle.handoff.block_plan import BlockPlan, plan_blocks
from kvshuttle.handoff.fetch_protocol import SendRenew
from kvshuttle.handoff.messages import Renew

if TYPE_CHECKING:
    from kvshuttle.handoff.fetch_protocol import FetchLimits, LoadAdmitted, RenewAnswered
    from kvshuttle.handoff.messages import Acquired

MAX_CLOCK_RATE_SKEW = 0.002
"""Largest relative difference of two hosts' monotonic clocks. Linux slews each by at most 0.0005."""

RENEWALS_PER_LEASE = 3
"""Two renewals in a row may be lost before the lease is."""


@dataclass(slots=True, eq=False)
class ReaderLease:
    """Made by ``granted``. Instants (``_at_s``) are of this process's clock."""

    lease_id: str
    num_verified_tokens: int
    block_ids: tuple[int, ...]
    duration_s: float
    """What is asked for; grants may be shorter, and are renewed accordingly."""
    submit_margin_s: float
    ends_at_s: float
    renewal_interval_s: float
    renew_at_s: float
    is_lost: bool = False
    ordinal: int = 0
    renew_sent_at_s: float | None = None
    read_ends_at_s: float | None = None
    """When the budget of the read ends; None before it starts."""

    @classmethod
    def granted(cls, answer: Acquired, *, limits: FetchLimits, sent_at_s: float) -> ReaderLease:
        """The lease that ``answer`` grants, when its acquire was sent at ``sent_at_s``."""
        granted_s = min(answer.remaining_s, limits.lease_s)
        interval_s = granted_s / RENEWALS_PER_LEASE
        return cls(
            lease_id=answer.lease_id,
            num_verified_tokens=answer.num_verified_tokens,
            block_ids=answer.block_ids,
            duration_s=limits.lease_s,
            submit_margin_s=limits.submit_margin_s,
            ends_at_s=sent_at_s + granted_s * (1 - MAX_CLOCK_RATE_SKEW),
            renewal_interval_s=interval_s,
            renew_at_s=sent_at_s + interval_s,
        )

    @property
    def last_submit_at_s(self) -> float:
        """No read may start, or be submitted, from here on."""
        return self.ends_at_s - self.submit_margin_s

    @property
    def next_renewal_at_s(self) -> float | None:
        """When to renew next; None when renewing is of no use any more."""
        # A read that outlives its budget has failed: renewing for it would only pin the peer's memory.
        end_s = self.last_submit_at_s if self.read_ends_at_s is None else min(self.ends_at_s, self.read_ends_at_s)
        return self.renew_at_s if self.renew_at_s < end_s and not self.is_lost else None

    def is_live(self, now_s: float) -> bool:
        """Whether the holder certainly still keeps the blocks."""
        return not self.is_lost and now_s < self.ends_at_s

    def plan(self, load: LoadAdmitted, block_size_tokens: int) -> BlockPlan:
        """What to read for ``load``. Raises ``LocalProtocolError`` when the lease does not cover it."""
        first_index, rest = divmod(load.num_local_tokens, block_size_tokens)
        end_tokens = load.num_local_tokens + load.num_external_tokens
        if rest or not load.num_local_tokens < end_tokens <= self.num_verified_tokens:
            raise LocalProtocolError(
                f"tokens [{load.num_local_tokens}, {end_tokens}) were never offered,"
                f" {self.num_verified_tokens} are verified"
            )
        return plan_blocks(
            source_block_ids=self.block_ids,
            destination_block_ids=load.destination_block_ids,
            first_index=first_index,
            end_index=num_blocks_for(end_tokens, block_size_tokens),
        )

    def start_read(self, now_s: float, timeout_s: float) -> float:
        """A read starts that may take ``timeout_s``, for which the lease is renewed as long as it is short of that.

        Returns the seconds within which it has to be submitted; not positive when it is too late to start one.
        """
        self.read_ends_at_s = now_s + timeout_s
        return self.last_submit_at_s - now_s

    def start_renewal(self, now_s: float) -> SendRenew:
        """The renew to send now; an answer to an earlier one no longer counts."""
        self.ordinal += 1
        self.renew_sent_at_s = now_s
        self.renew_at_s = now_s + self.renewal_interval_s
        return SendRenew(Renew((self.lease_id,), self.duration_s), self.ordinal, self.renewal_interval_s)

    def take_renewal(self, fact: RenewAnswered) -> None:
        """Take in an answer. Nonsense, and answers to superseded or answered renewals, count as no answer."""
        if len(fact.answer.remaining_s) != 1 or not math.isfinite(fact.answer.remaining_s[0]):
            return
        remaining_s = min(fact.answer.remaining_s[0], self.duration_s)
        if remaining_s <= 0:
            self.is_lost = True
        elif fact.ordinal == self.ordinal and self.renew_sent_at_s is not None:
            self.ends_at_s = max(self.ends_at_s, self.renew_sent_at_s + remaining_s * (1 - MAX_CLOCK_RATE_SKEW))
            self.renewal_interval_s = remaining_s / RENEWALS_PER_LEASE
            self.renew_at_s = self.renew_sent_at_s + self.renewal_interval_s
            self.renew_sent_at_s = None
