from __future__ import annotations

import math

import msgspec
import pytest

from kvshuttle.errors import LocalProtocolError, RemoteProtocolError
from kvshuttle.handoff import Acquired, Denied, DenyReason, EndReason, LeaseLedger, Release, Renew
from kvshuttle.ids import Handle, LeaseId
from support.handoff_values import FINGERPRINT, HANDLE, acquire, chain_of, ledger
from support.pair import HandoffPair

TOKENS = tuple(range(10))
BLOCKS = (5, 3, 9)


def holding_ledger(duration_s: float = 30.0, **options: float) -> LeaseLedger:
    made = ledger(**options)
    assert made.hold(HANDLE, block_ids=BLOCKS, chain=chain_of(TOKENS), duration_s=duration_s, now_s=0.0)
    return made


def lend(made: LeaseLedger, now_s: float = 0.0, **changes: object) -> Acquired:
    answer = made.acquire(acquire(TOKENS, **changes), now_s=now_s)
    assert isinstance(answer, Acquired)
    return answer


def drop(made: LeaseLedger, *lease_ids: str, now_s: float = 1.0) -> None:
    made.release(Release(lease_ids=lease_ids), now_s=now_s)


def test_a_hand_off_is_lent_read_and_released_through_the_pair() -> None:
    pair = HandoffPair()
    assert pair.hold(HANDLE, TOKENS)
    request = pair.begin(HANDLE, TOKENS)
    pair.pump()
    assert repr(pair.holder.ledger) == "<LeaseLedger holdings=1 leases=1 held_blocks=3>"
    assert pair.admit(request, 0, request.fetch.offer(0))
    pair.end_read(request)
    pair.pump()
    assert repr(pair.holder.ledger) == "<LeaseLedger holdings=0 leases=0 held_blocks=0>"
    pair.collect()
    assert pair.holder.pool.num_free == pair.holder.pool.num_blocks
    counters = pair.holder.ledger.counters
    assert (counters.granted, counters.acquired, counters.released) == (1, 1, 1)
    assert counters.holding_ended == {EndReason.RELEASED: 1}


def test_what_is_lent_is_the_verified_prefix_by_absolute_index() -> None:
    made = holding_ledger()
    answer = made.acquire(acquire((*TOKENS[:9], 99)), now_s=0.0)
    assert answer == Acquired("life-1-lease-1", "life-1", 8, (5, 3), 30.0)
    assert made.acquire(acquire(TOKENS), now_s=0.0) == Acquired("life-1-lease-2", "life-1", 10, BLOCKS, 30.0)


def test_spare_blocks_are_held_but_not_lent() -> None:
    made = ledger()
    made.hold(HANDLE, block_ids=(1, 2, 3, 4), chain=chain_of(TOKENS), duration_s=1.0, now_s=0.0)
    assert lend(made).block_ids == (1, 2, 3)
    assert made.num_held_blocks == 4


def test_a_doubled_release_frees_once() -> None:
    made = holding_ledger()
    lease_id = lend(made).lease_id
    drop(made, lease_id, lease_id)
    drop(made, lease_id)
    assert made.take_freed() == [BLOCKS]
    assert made.take_freed() == []
    assert made.counters.released == 1
    assert made.is_drained


def test_a_doubled_acquire_is_a_second_lease_that_ends_by_itself() -> None:
    made = holding_ledger()
    first, second = lend(made), lend(made)
    assert first.lease_id != second.lease_id
    drop(made, first.lease_id)
    assert made.take_freed() == []
    made.expire(30.0)
    assert made.take_freed() == [BLOCKS]
    assert made.counters.lease_expired == 1


def test_unknown_ids_are_ignored_since_a_release_may_arrive_late() -> None:
    made = holding_ledger()
    made.release(Release(lease_ids=("never",), handles=("nor-this",)), now_s=0.0)
    assert made.num_holdings == 1


def test_a_holding_that_cannot_contain_its_tokens_is_refused() -> None:
    made = ledger()
    with pytest.raises(LocalProtocolError, match="2 blocks cannot hold 10 tokens"):
        made.hold(HANDLE, block_ids=(1, 2), chain=chain_of(TOKENS), duration_s=1.0, now_s=0.0)
    with pytest.raises(LocalProtocolError, match="cannot hold 0 tokens"):
        made.hold(HANDLE, block_ids=(1,), chain=chain_of(()), duration_s=1.0, now_s=0.0)
    assert made.is_drained


@pytest.mark.parametrize("duration_s", [0.0, -1.0, math.inf, math.nan])
def test_a_holding_without_an_end_is_refused(duration_s: float) -> None:
    with pytest.raises(LocalProtocolError, match="cannot be held"):
        ledger().hold(HANDLE, block_ids=BLOCKS, chain=chain_of(TOKENS), duration_s=duration_s, now_s=0.0)


def test_a_lease_id_minted_twice_is_a_bug() -> None:
    made = LeaseLedger(incarnation="life-1", fingerprint=FINGERPRINT, mint=lambda: LeaseId("same"))
    made.hold(HANDLE, block_ids=BLOCKS, chain=chain_of(TOKENS), duration_s=1.0, now_s=0.0)
    lend(made)
    with pytest.raises(LocalProtocolError, match="minted twice"):
        lend(made)


@pytest.mark.parametrize(
    ("changes", "reason", "detail"),
    [
        ({"handle": "other"}, DenyReason.UNKNOWN_HANDLE, ""),
        ({"incarnation": "life-0"}, DenyReason.OTHER_INCARNATION, "this is life-1"),
        (
            {"fingerprint": msgspec.structs.replace(FINGERPRINT, kv_dtype="fp8", head_size=64)},
            DenyReason.INCOMPATIBLE,
            "kv_dtype: 'bfloat16' != 'fp8'; head_size: 8 != 64",
        ),
        ({"links": (b"x" * 16, b"y" * 16)}, DenyReason.NO_COMMON_PREFIX, ""),
    ],
)
def test_a_denial_says_why_and_is_counted(changes: dict[str, object], reason: DenyReason, detail: str) -> None:
    made = holding_ledger()
    assert made.acquire(acquire(TOKENS, **changes), now_s=0.0) == Denied(reason, detail)
    assert made.counters.denied == {reason: 1}
    assert made.num_leases == 0


def test_an_acquire_that_means_any_incarnation_is_served() -> None:
    assert lend(holding_ledger(), incarnation="").incarnation == "life-1"


@pytest.mark.parametrize(
    "changes",
    [
        {"num_tokens": 11, "links": ()},
        {"num_tokens": 0, "links": (), "tail": b""},
        {"num_tokens": -4},
        {"block_size_tokens": 0},
        {"block_size_tokens": -4},
        {"tail": b""},
        {"duration_s": 0.0},
        {"duration_s": -1.0},
        {"duration_s": math.nan},
        {"duration_s": math.inf},
    ],
)
def test_an_acquire_that_contradicts_itself_is_the_peers_fault(changes: dict[str, object]) -> None:
    made = holding_ledger()
    with pytest.raises(RemoteProtocolError):
        made.acquire(acquire(TOKENS, **changes), now_s=0.0)
    assert made.num_leases == 0


def test_a_renew_without_a_duration_is_the_peers_fault() -> None:
    with pytest.raises(RemoteProtocolError, match="duration_s"):
        holding_ledger().renew(Renew((), -1.0), now_s=0.0)


def test_of_several_holdings_the_longest_verified_prefix_is_lent() -> None:
    made = ledger()
    made.hold(HANDLE, block_ids=(1, 2), chain=chain_of((*TOKENS[:4], 7, 7, 7, 7)), duration_s=9.0, now_s=0.0)
    made.hold(HANDLE, block_ids=(3, 4, 5), chain=chain_of(TOKENS), duration_s=9.0, now_s=0.0)
    made.hold(HANDLE, block_ids=(6,), chain=chain_of(TOKENS[:4]), duration_s=9.0, now_s=0.0)
    assert lend(made).block_ids == (3, 4, 5)
    answer = made.acquire(acquire((*TOKENS[:4], 7, 7, 7, 7)), now_s=0.0)
    assert isinstance(answer, Acquired)
    assert answer.block_ids == (1, 2)


def test_equal_prompts_of_one_request_get_a_holding_each() -> None:
    made = holding_ledger()
    made.hold(HANDLE, block_ids=(11, 12, 13), chain=chain_of(TOKENS), duration_s=30.0, now_s=0.0)
    answers = [lend(made), lend(made)]
    assert [answer.block_ids for answer in answers] == [BLOCKS, (11, 12, 13)]
    drop(made, *(answer.lease_id for answer in answers))
    assert made.take_freed() == [BLOCKS, (11, 12, 13)]


def test_a_drop_under_another_lease_hides_the_holding_and_frees_it_with_the_last_lease() -> None:
    made = holding_ledger()
    first, second = lend(made), lend(made)
    drop(made, first.lease_id)
    assert made.take_freed() == []
    assert made.num_held_blocks == 3
    assert made.acquire(acquire(TOKENS), now_s=1.0) == Denied(DenyReason.UNKNOWN_HANDLE)
    drop(made, second.lease_id)
    assert made.take_freed() == [BLOCKS]


def test_a_release_without_drop_keeps_the_holding_for_the_next_reader() -> None:
    made = holding_ledger()
    made.release(Release(lease_ids=(lend(made).lease_id,), drop=False), now_s=1.0)
    assert made.take_freed() == []
    assert lend(made, now_s=2.0).block_ids == BLOCKS


def test_the_router_drops_a_handle_but_never_under_a_lease() -> None:
    made = holding_ledger()
    made.hold(Handle("idle"), block_ids=(1,), chain=chain_of((1,)), duration_s=30.0, now_s=0.0)
    lease_id = lend(made).lease_id
    made.release(Release(handles=(HANDLE, "idle")), now_s=1.0)
    assert made.take_freed() == [(1,)]
    drop(made, lease_id)
    assert made.take_freed() == [BLOCKS]


def test_handles_are_listed_while_something_can_be_acquired_under_them() -> None:
    made = holding_ledger()
    made.hold(HANDLE, block_ids=(1,), chain=chain_of((1,)), duration_s=60.0, now_s=0.0)
    made.hold(Handle("other"), block_ids=(2,), chain=chain_of((2,)), duration_s=60.0, now_s=0.0)
    assert made.handles() == (HANDLE, "other")
    lend(made)
    made.release(Release(handles=(HANDLE,)), now_s=1.0)
    assert made.handles() == ("other",)
    made.expire(60.0)
    assert made.handles() == ()


def test_a_release_of_handles_without_drop_does_nothing() -> None:
    made = holding_ledger()
    made.release(Release(handles=(HANDLE,), drop=False), now_s=1.0)
    assert made.num_holdings == 1


def test_an_unread_holding_expires_at_its_end_and_not_before() -> None:
    made = holding_ledger(duration_s=10.0)
    assert made.next_deadline_at_s() == 10.0
    made.expire(9.999)
    assert made.take_freed() == []
    made.expire(10.0)
    assert made.take_freed() == [BLOCKS]
    assert made.counters.holding_ended == {EndReason.EXPIRED: 1}
    assert made.next_deadline_at_s() is None


def test_a_lease_extends_the_life_of_its_holding() -> None:
    made = holding_ledger(duration_s=10.0)
    lease_id = lend(made, now_s=9.0).lease_id
    made.expire(38.9)
    assert made.take_freed() == []
    assert made.next_deadline_at_s() == 39.0
    made.expire(39.0)
    assert made.take_freed() == [BLOCKS]
    assert made.counters.lease_expired == 1
    assert made.counters.holding_ended == {EndReason.EXPIRED: 1}
    assert made.renew(Renew((lease_id,), 30.0), now_s=39.0).remaining_s[0] < 0


def test_a_holding_outlives_a_lease_that_is_shorter() -> None:
    made = holding_ledger(duration_s=60.0)
    lend(made, duration_s=5.0)
    made.expire(5.0)
    assert made.num_leases == 0
    assert made.take_freed() == []
    made.expire(60.0)
    assert made.take_freed() == [BLOCKS]


def test_a_renewal_never_shortens_and_says_what_is_left() -> None:
    made = holding_ledger()
    lease_id = lend(made).lease_id
    assert made.renew(Renew((lease_id, "gone"), 5.0), now_s=10.0).remaining_s == (20.0, -1.0)
    assert made.renew(Renew((lease_id,), 30.0), now_s=10.0).remaining_s == (30.0,)
    made.expire(39.9)
    assert made.num_leases == 1
    made.expire(40.0)
    assert made.take_freed() == [BLOCKS]
    assert (made.counters.renewed, made.counters.renew_refused) == (2, 1)


def test_a_late_renewal_does_not_bring_a_lease_back_even_if_nobody_looked_at_the_clock_meanwhile() -> None:
    made = holding_ledger()
    lease_id = lend(made).lease_id
    assert made.renew(Renew((lease_id,), 30.0), now_s=30.0).remaining_s == (-1.0,)
    assert made.take_freed() == [BLOCKS]


def test_an_ended_holding_is_not_lent_even_if_nobody_looked_at_the_clock_meanwhile() -> None:
    made = holding_ledger(duration_s=10.0)
    assert made.acquire(acquire(TOKENS), now_s=10.0) == Denied(DenyReason.UNKNOWN_HANDLE)


def test_a_lease_is_no_longer_than_the_holder_allows() -> None:
    made = holding_ledger(max_lease_s=20.0)
    answer = lend(made, duration_s=1e9)
    assert answer.remaining_s == 20.0
    assert made.renew(Renew((answer.lease_id,), 1e9), now_s=5.0).remaining_s == (20.0,)


def test_a_full_ledger_gives_the_blocks_back_at_once() -> None:
    made = holding_ledger(max_holdings=1)
    assert not made.hold(Handle("more"), block_ids=(1, 2, 3), chain=chain_of(TOKENS), duration_s=9.0, now_s=0.0)
    assert made.take_freed() == [(1, 2, 3)]
    assert made.counters.refused_full == 1
    assert made.num_holdings == 1


def test_memory_pressure_takes_idle_evictable_holdings_oldest_first_and_nothing_else() -> None:
    made = holding_ledger()
    for index in range(3):
        made.hold(
            Handle(f"kept-{index}"),
            block_ids=(10 + index,),
            chain=chain_of((index,)),
            duration_s=480.0,
            now_s=float(index),
            is_evictable=True,
        )
    assert isinstance(made.acquire(acquire((0,), handle="kept-0"), now_s=3.0), Acquired)
    assert made.reclaim(EndReason.PRESSURE, now_s=3.0)
    assert made.take_freed() == [(11,)]
    assert made.reclaim(EndReason.PRESSURE, now_s=3.0)
    assert made.take_freed() == [(12,)]
    assert not made.reclaim(EndReason.PRESSURE, now_s=3.0)
    assert made.num_holdings == 2
    assert made.counters.retained_ended == {EndReason.PRESSURE: 2}


@pytest.mark.parametrize("ending", ["drop", "expire", "router", "restart of the reader"])
def test_every_way_out_ends_drained(ending: str) -> None:
    made = holding_ledger()
    lease_id = lend(made).lease_id
    if ending == "drop":
        drop(made, lease_id)
    elif ending == "router":
        made.release(Release(handles=(HANDLE,)), now_s=1.0)
        made.expire(30.0)
    else:
        made.expire(30.0)
    assert not made.is_drained
    made.take_freed()
    assert made.is_drained
    assert made.next_deadline_at_s() is None


def test_deadlines_of_what_is_over_do_not_wake_anyone() -> None:
    made = holding_ledger(duration_s=10.0)
    made.hold(Handle("long"), block_ids=(1,), chain=chain_of((1,)), duration_s=480.0, now_s=0.0)
    made.release(Release(handles=(HANDLE,)), now_s=1.0)
    assert made.next_deadline_at_s() == 480.0
