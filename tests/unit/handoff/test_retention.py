from __future__ import annotations

import math

import pytest

from kvshuttle.errors import RemoteProtocolError
from kvshuttle.handoff import (
    Acquired,
    Denied,
    DenyReason,
    EndReason,
    Keep,
    KeepOutcome,
    LeaseLedger,
    Release,
    Renew,
    Retention,
)
from kvshuttle.handoff.holdings import FIRST_LEASE_S, LAST_LEASE_S
from support.handoff_values import BLOCK_SIZE_TOKENS, acquire, chain_of, ledger
from support.pair import HandoffPair

TTL_S = 480.0


class Kept:
    """A ledger that keeps turns of ``num_blocks`` blocks each, numbered from 0."""

    def __init__(self, max_blocks: int = 1000, **options: bool) -> None:
        self.ledger: LeaseLedger = ledger()
        self.retention = Retention(self.ledger, duration_s=TTL_S, max_blocks=max_blocks, **options)

    def keep(self, number: int, *, num_blocks: int = 2, now_s: float = 0.0, supersedes: str | None = None) -> bool:
        tokens = self.tokens(number, num_blocks)
        block_ids = tuple(1 + number * 10 + index for index in range(num_blocks))
        wish = Keep(f"h-{number}", supersedes)
        return self.retention.keep(wish, block_ids=block_ids, chain=chain_of(tokens), now_s=now_s)

    def tokens(self, number: int, num_blocks: int = 2) -> list[int]:
        return [number * 100 + index for index in range(num_blocks * BLOCK_SIZE_TOKENS)]

    def acquire(self, number: int, *, now_s: float = 0.0, duration_s: float = 30.0) -> Acquired | Denied:
        message = acquire(self.tokens(number), handle=f"h-{number}", duration_s=duration_s)
        return self.ledger.acquire(message, now_s=now_s)

    def lend(self, number: int, *, now_s: float = 0.0, duration_s: float = 30.0) -> Acquired:
        answer = self.acquire(number, now_s=now_s, duration_s=duration_s)
        assert isinstance(answer, Acquired)
        return answer

    def give_back(self, answer: Acquired, now_s: float) -> None:
        self.ledger.release(Release(lease_ids=(answer.lease_id,), drop=False), now_s=now_s)

    @property
    def handles(self) -> tuple[str, ...]:
        return self.ledger.handles()


def test_a_handle_is_kept_for_its_time_however_often_it_is_read() -> None:
    kept = Kept()
    kept.keep(0)
    for now_s in (1.0, 100.0, 479.0):
        kept.give_back(kept.lend(0, now_s=now_s), now_s + 0.5)
    kept.ledger.expire(479.99)
    assert kept.handles == ("h-0",)
    kept.ledger.expire(480.0)
    assert kept.ledger.take_freed() == [(1, 2)]
    assert kept.ledger.counters.retained_ended == {EndReason.EXPIRED: 1}


@pytest.mark.parametrize(("asked_at_s", "granted_s"), [(0.0, 30.0), (452.0, 30.0), (460.0, 22.0), (479.875, 2.125)])
def test_a_lease_is_granted_until_little_after_the_time_of_what_it_reads(asked_at_s: float, granted_s: float) -> None:
    kept = Kept()
    kept.keep(0)
    assert kept.lend(0, now_s=asked_at_s).remaining_s == granted_s
    kept.ledger.expire(max(480.0, asked_at_s + granted_s) - 0.001)
    assert kept.ledger.take_freed() == []
    kept.ledger.expire(TTL_S + FIRST_LEASE_S)
    assert kept.ledger.take_freed() == [(1, 2)]
    assert kept.ledger.is_drained


def test_a_lease_on_what_is_kept_lasts_beyond_that_only_while_its_reader_renews_it() -> None:
    kept = Kept()
    kept.keep(0)
    lent = kept.lend(0, now_s=479.0)
    assert lent.remaining_s == 1.0 + FIRST_LEASE_S
    assert kept.acquire(0, now_s=480.0) == Denied(DenyReason.UNKNOWN_HANDLE)
    for now_s in (481.0, 485.0, 489.0):
        renewed = kept.ledger.renew(Renew((lent.lease_id,), 30.0), now_s=now_s)
        assert renewed.remaining_s == (LAST_LEASE_S,)
    kept.ledger.expire(493.9)
    assert kept.ledger.take_freed() == []
    kept.ledger.expire(494.0)
    assert kept.ledger.take_freed() == [(1, 2)]
    assert kept.ledger.is_drained


def test_a_renewal_takes_nothing_away_from_a_grant() -> None:
    kept = Kept()
    kept.keep(0)
    lent = kept.lend(0, now_s=470.0)
    assert kept.ledger.renew(Renew((lent.lease_id,), 1.0), now_s=471.0).remaining_s == (TTL_S + FIRST_LEASE_S - 471.0,)


def test_the_time_of_what_cannot_be_read_any_more_does_not_start_again() -> None:
    kept = Kept(is_renewed_on_use=True)
    kept.keep(0)
    lent = kept.lend(0, duration_s=120.0)
    kept.keep(1, supersedes="h-0")
    for now_s in (100.0, 200.0, 300.0, 400.0):
        kept.ledger.renew(Renew((lent.lease_id,), 120.0), now_s=now_s)
    assert kept.ledger.renew(Renew((lent.lease_id,), 120.0), now_s=479.0).remaining_s == (LAST_LEASE_S,)


def test_each_use_starts_the_time_again_where_that_is_wanted() -> None:
    kept = Kept(is_renewed_on_use=True)
    kept.keep(0)
    kept.give_back(kept.lend(0, now_s=400.0), 401.0)
    kept.ledger.expire(879.9)
    assert kept.handles == ("h-0",)
    kept.ledger.expire(880.0)
    assert kept.handles == ()


def test_the_routers_heartbeat_extends_what_is_kept_and_no_hand_off() -> None:
    kept = Kept()
    kept.keep(0)
    kept.ledger.hold("x", block_ids=(90,), chain=chain_of((1,)), duration_s=30.0, now_s=0.0)
    renewed = kept.retention.renew(Renew((), 100.0, handles=("h-0", "x", "gone")), now_s=470.0)
    assert renewed.handles_remaining_s == (100.0, -1.0, -1.0)
    assert kept.retention.renew(Renew((), 1e9, handles=("h-0",)), now_s=500.0).handles_remaining_s == (TTL_S,)
    assert kept.retention.renew(Renew((), 1.0, handles=("h-0",)), now_s=500.0).handles_remaining_s == (TTL_S,)
    with pytest.raises(RemoteProtocolError, match="duration_s"):
        kept.retention.renew(Renew((), math.nan, handles=("h-0",)), now_s=500.0)


def test_the_earlier_handle_goes_with_the_arrival_of_the_next() -> None:
    kept = Kept()
    kept.keep(0)
    assert kept.keep(1, supersedes="h-0")
    assert kept.handles == ("h-1",)
    assert kept.ledger.take_freed() == [(1, 2)]
    assert kept.ledger.counters.retained_ended == {EndReason.SUPERSEDED: 1}


def test_a_superseded_handle_that_is_being_read_stays_until_its_reader_is_done() -> None:
    kept = Kept()
    kept.keep(0)
    lent = kept.lend(0)
    kept.keep(1, supersedes="h-0")
    assert kept.ledger.take_freed() == []
    kept.give_back(lent, 1.0)
    assert kept.ledger.take_freed() == [(1, 2)]


def test_what_cannot_be_kept_supersedes_nothing() -> None:
    kept = Kept(max_blocks=3)
    kept.keep(0)
    assert not kept.keep(1, num_blocks=4, supersedes="h-0")
    kept.retention.note_released(("h-2",))
    assert not kept.keep(2, supersedes="h-0")
    assert kept.handles == ("h-0",)
    assert kept.retention.outcomes == {KeepOutcome.KEPT: 1, KeepOutcome.OVER_BUDGET: 1, KeepOutcome.NOT_WANTED: 1}


def test_a_full_ledger_keeps_nothing() -> None:
    kept = Kept()
    kept.ledger._max_holdings = 1
    kept.keep(0)
    assert not kept.keep(1, supersedes="h-0")
    assert kept.handles == ("h-0",)
    assert kept.ledger.take_freed() == []
    assert kept.retention.outcomes[KeepOutcome.LEDGER_FULL] == 1


def test_a_handle_may_supersede_itself_without_going() -> None:
    kept = Kept()
    kept.keep(0, supersedes="h-0")
    assert kept.handles == ("h-0",)


def test_released_handles_are_remembered_in_bounds() -> None:
    kept = Kept()
    kept.retention.note_released(tuple(f"h-{number}" for number in range(5000)))
    assert kept.keep(0)
    assert not kept.keep(4999)


def test_beyond_the_budget_those_used_longest_ago_go_first() -> None:
    kept = Kept(max_blocks=6)
    for number in range(3):
        kept.keep(number)
    kept.give_back(kept.lend(0), 1.0)
    kept.keep(3)
    assert kept.handles == ("h-0", "h-2", "h-3")
    assert kept.retention.num_blocks == 6
    assert kept.ledger.counters.retained_ended == {EndReason.BUDGET: 1}


def test_the_budget_is_exceeded_rather_than_a_lease_broken_or_the_newest_lost() -> None:
    kept = Kept(max_blocks=2)
    kept.keep(0)
    lent = kept.lend(0)
    assert kept.keep(1)
    assert kept.handles == ("h-0", "h-1")
    assert kept.retention.num_blocks == 4
    kept.give_back(lent, 1.0)
    kept.keep(2)
    assert kept.handles == ("h-2",)


def test_shared_blocks_count_once_and_are_let_go_of_once_for_each_handle() -> None:
    kept = Kept()
    chain = chain_of(kept.tokens(0))
    for name in ("a", "b"):
        kept.retention.keep(Keep(name), block_ids=(1, 2), chain=chain, now_s=0.0)
    assert (kept.retention.num_handles, kept.retention.num_blocks) == (2, 2)
    assert kept.retention.idle_pins() == {1: 2, 2: 2}
    assert kept.retention.give_way(1.0)
    assert (kept.retention.num_handles, kept.retention.num_blocks) == (1, 2)
    assert kept.ledger.take_freed() == [(1, 2)]


def test_under_pressure_what_is_lent_stays() -> None:
    kept = Kept()
    kept.keep(0)
    kept.keep(1)
    kept.lend(0)
    assert kept.retention.idle_pins() == {11: 1, 12: 1}
    assert kept.retention.give_way(1.0)
    assert not kept.retention.give_way(1.0)
    assert kept.handles == ("h-0",)
    assert kept.retention.give_way(31.0)  # its reader is gone
    assert kept.handles == ()


def test_several_prompts_of_one_request_are_kept_under_one_handle() -> None:
    kept = Kept()
    for number in (1, 2):
        wish, chain = Keep("both"), chain_of(kept.tokens(number))
        kept.retention.keep(wish, block_ids=(number * 10, number * 10 + 1), chain=chain, now_s=0.0)
    for number in (1, 2):
        answer = kept.ledger.acquire(acquire(kept.tokens(number), handle="both"), now_s=1.0)
        assert isinstance(answer, Acquired)
        assert answer.block_ids == (number * 10, number * 10 + 1)


def test_it_says_how_much_is_kept() -> None:
    kept = Kept()
    kept.keep(0)
    assert repr(kept.retention) == "<Retention handles=1 blocks=2 of 1000>"


@pytest.mark.parametrize("skew", [-1e6, 0.0, 4321.5])
@pytest.mark.parametrize("rate", [0.9991, 1.0009])
def test_clocks_of_two_engines_may_differ(skew: float, rate: float) -> None:
    from support.holder_engine import RETENTION_S, Clock

    pair = HandoffPair(holder_clock=Clock(), reader_clock=Clock(offset_s=skew, rate=rate))
    history = tuple(range(8))
    assert pair.holder.keep("h", history, None, pair.holder_now_s)
    pair.advance(RETENTION_S - 1.0)
    request = pair.begin("h", (*history, 9), is_read_once=False)
    pair.pump()
    assert pair.admit(request, 0, request.fetch.offer(0))
    pair.advance(2.0)  # the handle's end passes during the read, whose lease is renewed
    pair.tick()
    pair.pump()
    pair.collect()
    pair.end_read(request)
    assert request.outcomes == ["read_ok"]
    pair.advance(1.0)
    late = pair.begin("h", (*history, 9), is_read_once=False)
    pair.pump()
    assert late.outcomes == ["denied_unknown_handle"]
    pair.drain()
