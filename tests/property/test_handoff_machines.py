"""Ledger and fetches through a hostile link: whatever happens, no wrong byte is believed and nothing stays held.

``HandoffPair`` checks after every step; see there for what it compares with what.
"""

from __future__ import annotations

import dataclasses
import math

from hypothesis import event, given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvshuttle.handoff import EndReason, Offer, Renew, Renewed, State
from kvshuttle.ids import Handle
from support.handoff_values import BLOCK_SIZE_TOKENS, LIMITS
from support.holder_engine import FIRST_LEASE_S, LAST_LEASE_S, RETENTION_S, Clock
from support.pair import HandoffPair, Request

# Two hosts' clocks differ by at most MAX_CLOCK_RATE_SKEW, so each is off by less than half of it.
CLOCKS = st.builds(Clock, offset_s=st.sampled_from([0.0, -1e6, 12345.678]), rate=st.sampled_from([1.0, 0.9991, 1.0009]))
HANDLES = st.sampled_from([Handle("a"), Handle("b")])
HISTORY = tuple(range(100, 110))
# Prompts with common prefixes: longer, shorter, forked, and not block aligned.
PROMPTS = st.sampled_from(
    [HISTORY[:3], HISTORY[:4], HISTORY[:9], HISTORY, (*HISTORY[:5], 7, 7, 7), (*HISTORY, 1, 2), (9, 9, 9, 9, 9)]
)
DURATIONS_S = st.sampled_from([0.01, 0.5, 1.0, 5.0, 9.99, 31.0])
INDEX = st.integers(0, 7)
# What would end every story early happens seldom.
SELDOM = st.sampled_from([False] * 5 + [True])


class HandoffMachine(RuleBasedStateMachine):
    @initialize(holder=CLOCKS, reader=CLOCKS, read_timeout_s=st.sampled_from([10.0, 100.0]))
    def start(self, holder: Clock, reader: Clock, read_timeout_s: float) -> None:
        limits = dataclasses.replace(LIMITS, read_timeout_s=read_timeout_s)
        self.pair = HandoffPair(holder_clock=holder, reader_clock=reader, limits=limits)
        self.kept: list[Handle] = []

    def pick(self, requests: list[Request], index: int) -> Request:
        return requests[index % len(requests)]

    @property
    def asking(self) -> list[Request]:
        return [each for each in self.pair.requests if not each.is_over and not each.num_loads_admitted]

    @property
    def waiting(self) -> list[Request]:
        return [each for each in self.asking if each.fetch.state is State.LEASED]

    @property
    def reading(self) -> list[Request]:
        return [each for each in self.pair.requests if each.read is not None]

    # -- time ----------------------------------------------------------------------------------------

    @rule(duration_s=DURATIONS_S, ticks=st.booleans())
    def time_passes(self, duration_s: float, ticks: bool) -> None:
        self.pair.advance(duration_s)
        if ticks:
            self.pair.tick()

    @precondition(lambda self: self.pair.next_deadlines())
    @rule(index=INDEX, early_s=st.sampled_from([-1e-6, 0.0, 1e-3, 0.03]), ticks=st.booleans())
    def a_deadline_comes(self, index: int, early_s: float, ticks: bool) -> None:
        deadlines = self.pair.next_deadlines()
        self.pair.world_s = max(self.pair.world_s, deadlines[index % len(deadlines)] - early_s)
        if ticks:
            self.pair.tick()

    @rule()
    def the_reader_ticks(self) -> None:
        self.pair.tick()

    # -- the holder ----------------------------------------------------------------------------------

    @rule(
        handle=HANDLES,
        prompt=PROMPTS,
        duration_s=st.sampled_from([0.5, 5.0, 30.0, 60.0]),
        is_shared=st.booleans(),
    )
    def the_holder_holds(self, handle: Handle, prompt: tuple[int, ...], duration_s: float, is_shared: bool) -> None:
        self.pair.hold(handle, prompt, duration_s, is_shared=is_shared)

    @rule()
    def the_holder_steps(self) -> None:
        self.pair.collect()

    @rule(num_blocks=st.integers(1, 4))
    def the_holder_needs_memory(self, num_blocks: int) -> None:
        while num_blocks > 0 and self.pair.holder.ledger.reclaim(EndReason.PRESSURE, now_s=self.pair.holder_now_s):
            num_blocks -= 1
        self.pair.collect()

    @rule(prompt=PROMPTS, supersedes=st.none() | st.integers(0, 7))
    def the_holder_keeps_a_turn(self, prompt: tuple[int, ...], supersedes: int | None) -> None:
        earlier = self.kept[supersedes % len(self.kept)] if self.kept and supersedes is not None else None
        handle = Handle(f"turn-{len(self.kept)}")
        now_s = self.pair.holder_now_s
        if len(prompt) >= BLOCK_SIZE_TOKENS and self.pair.holder.keep(handle, prompt, earlier, now_s):
            self.kept.append(handle)

    @precondition(lambda self: self.kept)
    @rule(index=INDEX, duration_s=st.sampled_from([0.5, 5.0, 1e6]))
    def the_router_renews_a_turn(self, index: int, duration_s: float) -> None:
        self.pair.holder.renew_kept(self.kept[index % len(self.kept)], duration_s, self.pair.holder_now_s)

    @precondition(lambda self: self.kept)
    @rule(index=INDEX, happens=SELDOM)
    def the_router_releases_a_turn(self, index: int, happens: bool) -> None:
        if happens:
            self.pair.release_by_router(self.kept[index % len(self.kept)])

    @precondition(lambda self: self.kept)
    @rule(index=INDEX, prompt=PROMPTS, arrives=st.booleans(), is_read_once=SELDOM)
    def a_later_turn_begins(self, index: int, prompt: tuple[int, ...], arrives: bool, is_read_once: bool) -> None:
        self.pair.begin(self.kept[index % len(self.kept)], prompt, is_read_once=is_read_once)
        if arrives:
            self.pair.pump()

    @precondition(lambda self: self.kept)
    @rule(index=INDEX, prompt=PROMPTS, num_readers=st.integers(1, 3))
    def later_turns_read_at_the_same_time(self, index: int, prompt: tuple[int, ...], num_readers: int) -> None:
        handle = self.kept[-1 - index % len(self.kept)]
        requests = [self.pair.begin(handle, prompt, is_read_once=False) for _ in range(num_readers)]
        self.pair.pump()
        for request in requests:
            if (offer := request.fetch.offer(0)).num_tokens:
                self.pair.admit(request, 0, offer)

    @precondition(lambda self: self.kept)
    @rule(
        index=INDEX,
        prompt=PROMPTS,
        early_s=st.sampled_from([1e-3, 0.1, 0.9, 1.5, 4.0]),
        num_renewals=st.integers(0, 3),
        is_read=st.booleans(),
    )
    def a_reader_comes_in_the_last_instant(
        self, index: int, prompt: tuple[int, ...], early_s: float, num_renewals: int, is_read: bool
    ) -> None:
        """It renews in time for a while, waiting or reading, and is not heard of again unless other rules say so."""
        handle = self.kept[index % len(self.kept)]
        end_s = self.pair.holder.clock.world(self.pair.holder.kept_until_s.get(handle, 0.0))
        self.pair.world_s = max(self.pair.world_s, end_s - early_s)
        request = self.pair.begin(handle, prompt, is_read_once=False)
        self.pair.pump()
        offer = request.fetch.offer(0)
        if is_read and offer.num_tokens:
            self.pair.admit(request, 0, offer)
        for _ in range(num_renewals):
            self.come_to_its_deadline(request)
            self.pair.deliver_newest(request, Renew)
            self.pair.deliver_newest(request, Renewed)
        self.pair.collect()

    @precondition(lambda self: self.kept)
    @rule(happens=SELDOM)
    def all_readers_die(self, happens: bool) -> None:
        """What they have leased of turns is free when it should be, although no reader gives anything back."""
        if happens:
            self.note_outcomes()
            self.pair.restart_reader()
            self.pair.link.clear()
            self.pair.world_s = max(self.pair.world_s, self.pair.holder.last_pin_s() + 1e-5)
            self.pair.collect()
            assert not self.pair.holder.kept_blocks

    @rule(handle=HANDLES)
    def the_router_releases(self, handle: Handle) -> None:
        self.pair.release_by_router(handle)

    @rule(happens=SELDOM)
    def the_holder_restarts(self, happens: bool) -> None:
        if happens:
            self.pair.restart_holder()

    # -- the link ------------------------------------------------------------------------------------

    @precondition(lambda self: self.pair.link)
    @rule(index=INDEX, keeps_copy=st.booleans())
    def a_message_arrives(self, index: int, keeps_copy: bool) -> None:
        self.pair.deliver(index % len(self.pair.link), keeps_copy=keeps_copy)

    @precondition(lambda self: self.pair.link)
    @rule()
    def all_messages_arrive(self) -> None:
        self.pair.pump()

    @precondition(lambda self: self.pair.link)
    @rule(index=INDEX)
    def a_message_is_lost(self, index: int) -> None:
        self.pair.lose(index % len(self.pair.link))

    @precondition(lambda self: self.pair.requests)
    @rule(index=INDEX)
    def the_side_channel_gives_up(self, index: int) -> None:
        self.pair.fail_peer(self.pick(self.pair.requests, index))

    # -- the reader ----------------------------------------------------------------------------------

    @rule(handle=HANDLES, prompt=PROMPTS, arrives=st.booleans())
    def a_request_begins(self, handle: Handle, prompt: tuple[int, ...], arrives: bool) -> None:
        self.pair.begin(handle, prompt)
        if arrives:
            self.pair.pump()

    @rule(
        handle=HANDLES,
        prompt=PROMPTS,
        duration_s=st.sampled_from([1.0, 30.0]),
        delay_s=st.sampled_from([0.0, 0.5]),
        is_admitted=st.booleans(),
    )
    def a_hand_off_starts_well(
        self, handle: Handle, prompt: tuple[int, ...], duration_s: float, delay_s: float, is_admitted: bool
    ) -> None:
        """The way to where it gets interesting: held, leased, perhaps reading."""
        if not self.pair.hold(handle, prompt, duration_s):
            return
        request = self.pair.begin(handle, prompt)
        self.pair.advance(delay_s)
        self.pair.pump()
        offer = request.fetch.offer(0)
        if is_admitted and offer.num_tokens:
            self.pair.admit(request, 0, offer)

    @precondition(lambda self: self.waiting)
    @rule(index=INDEX, is_answered=st.booleans())
    def a_waiting_request_renews(self, index: int, is_answered: bool) -> None:
        request = self.pick(self.waiting, index)
        self.come_to_its_deadline(request)
        if is_answered:
            self.pair.deliver_newest(request, Renew)
            self.pair.deliver_newest(request, Renewed)

    @precondition(lambda self: self.waiting)
    @rule(index=INDEX)
    def an_answer_comes_after_the_next_renewal(self, index: int) -> None:
        request = self.pick(self.waiting, index)
        self.come_to_its_deadline(request)
        self.pair.deliver_newest(request, Renew)
        self.come_to_its_deadline(request)
        self.pair.deliver_newest(request, Renewed)

    def come_to_its_deadline(self, request: Request) -> None:
        at_s = request.fetch.next_deadline_at_s()
        if at_s is not None:
            self.pair.world_s = max(self.pair.world_s, self.pair.reader_clock.world(at_s) + 1e-6)
            self.pair.tick()

    @precondition(lambda self: self.asking)
    @rule(index=INDEX, num_local_blocks=st.sampled_from([0, 0, 1, 2]), delay_s=st.sampled_from([0.0, 0.0, 1.5, 28.5]))
    def the_engine_asks(self, index: int, num_local_blocks: int, delay_s: float) -> None:
        request = self.pick(self.asking, index)
        num_local_tokens = min(num_local_blocks * BLOCK_SIZE_TOKENS, len(request.chain.links) * BLOCK_SIZE_TOKENS)
        offer = request.fetch.offer(num_local_tokens)
        assert request.fetch.offer(num_local_tokens) == offer
        if offer.num_tokens is None:
            return
        if delay_s and offer.num_tokens:
            # The side channel's thread gets in between the engine's question and its allocation.
            self.pair.advance(delay_s)
            self.pair.tick()
        self.take(request, num_local_tokens, offer)

    def take(self, request: Request, num_local_tokens: int, offer: Offer) -> None:
        if not offer.num_tokens:
            self.pair.decline(request, offer)
        else:
            self.pair.admit(request, num_local_tokens, offer)

    @precondition(lambda self: self.asking)
    @rule(index=INDEX, happens=SELDOM)
    def the_engine_declines(self, index: int, happens: bool) -> None:
        if happens:
            self.pair.decline(self.pick(self.asking, index), Offer(0))

    @precondition(lambda self: self.reading)
    @rule(index=INDEX)
    def a_block_lands(self, index: int) -> None:
        self.pair.copy_block(self.pick(self.reading, index))

    @precondition(lambda self: self.reading)
    @rule(index=INDEX, is_ok=st.sampled_from([True, True, False]))
    def a_read_ends(self, index: int, is_ok: bool) -> None:
        request = self.pick(self.reading, index)
        self.pair.end_read(request, is_ok=is_ok)

    @precondition(lambda self: self.reading)
    @rule(index=INDEX, late_s=st.sampled_from([-1e-3, 1e-6, 0.02, 1.0]), is_renewing=st.booleans())
    def a_slow_read_ends(self, index: int, late_s: float, is_renewing: bool) -> None:
        """The holder's memory moves on just when the last bytes are copied."""
        request = self.pick(self.reading, index)
        self.pair.world_s = max(self.pair.world_s, self.pair.lease_end_s(request) + late_s)
        if is_renewing:
            self.pair.tick()
            self.pair.pump()
        self.pair.collect()
        self.pair.end_read(request)

    @precondition(lambda self: self.pair.requests)
    @rule(index=INDEX)
    def a_request_ends(self, index: int) -> None:
        self.pair.end_request(self.pick(self.pair.requests, index))

    @rule(happens=SELDOM)
    def the_reader_restarts(self, happens: bool) -> None:
        if happens:
            self.note_outcomes()
            self.pair.restart_reader()

    # -- what must hold ------------------------------------------------------------------------------

    @invariant()
    def nothing_is_wrong_now(self) -> None:
        if hasattr(self, "pair"):
            self.pair.check()

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.pair.drain()
            self.note_outcomes()

    def note_outcomes(self) -> None:
        for request in self.pair.requests:
            event(f"outcome: {request.fetch.outcome}")


TestHandoff = HandoffMachine.TestCase


@given(
    clocks=st.tuples(CLOCKS, CLOCKS),
    early_s=st.floats(1e-3, RETENTION_S) | st.floats(1e-3, LAST_LEASE_S),
    num_renewals=st.integers(0, 6),
    is_read=st.booleans(),
)
def test_a_turn_that_a_reader_leased_and_died_is_free_soon_after_its_time(
    clocks: tuple[Clock, Clock], early_s: float, num_renewals: int, is_read: bool
) -> None:
    pair = HandoffPair(holder_clock=clocks[0], reader_clock=clocks[1])
    assert pair.holder.keep(Handle("turn"), HISTORY, None, pair.holder_now_s)
    pair.advance((RETENTION_S - early_s) / clocks[0].rate)
    request = pair.begin(Handle("turn"), HISTORY, is_read_once=False)
    pair.pump()
    if is_read:
        pair.admit(request, 0, request.fetch.offer(0))
    heard_at_s = -math.inf
    for _ in range(num_renewals):
        at_s = request.fetch.next_deadline_at_s()
        if at_s is not None:
            pair.world_s = max(pair.world_s, pair.reader_clock.world(at_s) + 1e-6)
            pair.tick()
            heard_at_s = pair.holder_now_s
            pair.pump()
    free_at_s = max(clocks[0].at(0.0) + RETENTION_S + FIRST_LEASE_S, heard_at_s + LAST_LEASE_S)
    pair.world_s = max(pair.world_s, clocks[0].world(free_at_s) + 1e-5)
    pair.collect()
    assert pair.holder.pool.num_free == pair.holder.pool.num_blocks
    assert not pair.holder.ledger.num_leases
