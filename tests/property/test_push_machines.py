"""Both sides of a push through hostile links, with stopped, killed and preempting engines.

No wrong commit, no block reused too early on either side, one report for each load, and nothing left behind.

``PushPair`` checks at every step; see there for what it compares with what.
"""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvshuttle.handoff import IntakeState, Offer, PushOutcome
from kvshuttle.ids import Handle
from support.handoff_values import BLOCK_SIZE_TOKENS
from support.holder_engine import Clock
from support.push_pair import PUSH_LIMITS, PushPair

if TYPE_CHECKING:
    from collections.abc import Sequence

    from support.push_decode import Decode, DecodeRank
    from support.push_prefill import Prefill, PrefillRank, Write

T = TypeVar("T")

CLOCKS = st.builds(Clock, offset_s=st.sampled_from([0.0, -1e6, 12345.678]), rate=st.sampled_from([1.0, 0.9991, 1.0009]))
HISTORY = tuple(range(100, 114))
PROMPTS = st.sampled_from([HISTORY[:3], HISTORY[:4], HISTORY[:9], HISTORY, HISTORY])
DURATIONS_S = st.sampled_from([0.01, 0.5, 1.0, 5.0, 9.0, 31.0])
CHUNKS = st.sampled_from([1, 4, 5, 8, 20])
INDEX = st.integers(0, 7)
# What would end every story early happens seldom.
SELDOM = st.sampled_from([False] * 7 + [True])


@dataclasses.dataclass
class Dispatch:
    """What the router sends out: two legs with one handle, which may arrive in any order, or never."""

    handle: Handle
    prompt: tuple[int, ...]
    has_prefill: bool = False


class PushMachine(RuleBasedStateMachine):
    @initialize(
        holder=CLOCKS,
        reader=CLOCKS,
        num_ranks=st.sampled_from([1, 1, 2]),
        confirm_timeout_s=st.sampled_from([2.0, 2.0, math.inf]),
        stays_stopped=st.booleans(),
    )
    def start(
        self, holder: Clock, reader: Clock, num_ranks: int, confirm_timeout_s: float, stays_stopped: bool
    ) -> None:
        limits = dataclasses.replace(PUSH_LIMITS, confirm_timeout_s=confirm_timeout_s)
        self.pair = PushPair(num_ranks=num_ranks, holder_clock=holder, reader_clock=reader, limits=limits)
        # Where a load cannot be failed before it is drained, a holder that stays stopped is waited for.
        self.stays_stopped = stays_stopped and math.isfinite(confirm_timeout_s)
        self.dispatches: list[Dispatch] = []

    def pick(self, things: Sequence[T], index: int) -> T:
        return things[index % len(things)]

    @property
    def running(self) -> list[Prefill]:
        holder = self.pair.running_holder
        return [each for each in holder.requests if not each.is_over] if holder else []

    @property
    def holder_ranks(self) -> list[PrefillRank]:
        return self.pair.running_holder.ranks if self.pair.running_holder else []

    @property
    def writes(self) -> list[tuple[PrefillRank, Write]]:
        ranks = self.pair.holder.ranks if self.pair.holder else []
        return [(rank, write) for rank in ranks for write in rank.writes]

    @property
    def asking(self) -> list[Decode]:
        if self.pair.is_reader_stopped:
            return []
        requests = self.pair.reader.requests
        return [each for each in requests if each.intake.state is IntakeState.NEW and not each.is_over]

    @property
    def decoding(self) -> list[Decode]:
        return [] if self.pair.is_reader_stopped else self.pair.reader.requests

    @property
    def reading(self) -> list[tuple[DecodeRank, Decode]]:
        ranks = [] if self.pair.is_reader_stopped else self.pair.reader.ranks
        return [(rank, request) for rank in ranks for request in rank.reads]

    # -- time ----------------------------------------------------------------------------------------

    @rule(duration_s=DURATIONS_S, ticks=st.booleans())
    def time_passes(self, duration_s: float, ticks: bool) -> None:
        self.pair.advance(duration_s)
        if ticks:
            self.pair.tick()

    @precondition(lambda self: self.pair.next_deadlines())
    @rule(index=INDEX, early_s=st.sampled_from([-1e-6, 0.0, 1e-3]), ticks=st.booleans())
    def a_deadline_comes(self, index: int, early_s: float, ticks: bool) -> None:
        at_s = self.pick(self.pair.next_deadlines(), index)
        if math.isfinite(at_s):
            self.pair.world_s = max(self.pair.world_s, at_s - early_s)
        if ticks:
            self.pair.tick()

    @rule()
    def both_tick(self) -> None:
        self.pair.tick()

    # -- the router ----------------------------------------------------------------------------------

    @rule(prompt=PROMPTS)
    def a_request_is_dispatched(self, prompt: tuple[int, ...]) -> None:
        self.dispatches.append(Dispatch(Handle(f"xfer-{len(self.dispatches)}"), prompt))

    @precondition(lambda self: self.dispatches and self.pair.running_holder)
    @rule(index=INDEX)
    def the_prefill_leg_arrives(self, index: int) -> None:
        dispatch = self.pick(self.dispatches, index)
        if not dispatch.has_prefill:
            dispatch.has_prefill = True
            self.pair.running_holder.begin(dispatch.handle, dispatch.prompt, self.pair.holder_now_s)

    @precondition(lambda self: self.dispatches and not self.pair.is_reader_stopped)
    @rule(index=INDEX, is_mixed_up=SELDOM, is_stale=SELDOM)
    def the_decode_leg_arrives(self, index: int, is_mixed_up: bool, is_stale: bool) -> None:
        dispatch = self.pick(self.dispatches, index)
        prompt = (7, *dispatch.prompt) if is_mixed_up else dispatch.prompt
        life = self.pair.holder_life - 1 if is_stale and self.pair.holder_life > 1 else None
        self.pair.decode(dispatch.handle, prompt, life)

    @precondition(lambda self: self.pair.running_holder and not self.pair.is_reader_stopped)
    @rule(
        prompt=PROMPTS,
        num_local_blocks=st.sampled_from([0, 0, 0, 1]),
        chunk=CHUNKS,
        is_opened=st.sampled_from([True, True, True, False]),
        num_posts=st.integers(0, 4),
        is_answered=st.booleans(),
    )
    def a_push_starts_well(
        self,
        prompt: tuple[int, ...],
        num_local_blocks: int,
        chunk: int,
        is_opened: bool,
        num_posts: int,
        is_answered: bool,
    ) -> None:
        """The way to where it gets interesting: both legs are here, registered, computed, written in part."""
        dispatch = Dispatch(Handle(f"xfer-{len(self.dispatches)}"), prompt, has_prefill=True)
        self.dispatches.append(dispatch)
        request = self.pair.decode(dispatch.handle, prompt)
        self.take(request, num_local_blocks)
        self.pair.reader_step()
        prefill = self.pair.running_holder.begin(dispatch.handle, prompt, self.pair.holder_now_s)
        if is_opened:
            self.pair.exchange()
        self.compute(prefill, chunk)
        for index in range(num_posts):
            rank = self.pick(self.holder_ranks, index)
            while rank.facts:
                rank.take_fact()
            rank.post()
        if is_answered and prefill.is_computed:
            self.pair.running_holder.finish(prefill, 30.0, self.pair.holder_now_s)

    # -- the prefill engine --------------------------------------------------------------------------

    def compute(self, request: Prefill, chunk: int, *, rolls_back: bool = False, waits: bool = True) -> None:
        if rolls_back or not request.is_computed:
            now_s = self.pair.holder_now_s
            self.pair.running_holder.step(request, chunk, now_s, rolls_back=rolls_back, waits=waits)

    @precondition(lambda self: self.running)
    @rule(index=INDEX, chunk=CHUNKS, rolls_back=SELDOM, waits=st.booleans())
    def a_chunk_is_computed(self, index: int, chunk: int, rolls_back: bool, waits: bool) -> None:
        self.compute(self.pick(self.running, index), chunk, rolls_back=rolls_back, waits=waits)

    @precondition(lambda self: self.running)
    @rule(index=INDEX, waits=st.booleans())
    def a_prefill_is_preempted(self, index: int, waits: bool) -> None:
        self.pair.running_holder.preempt(self.pick(self.running, index), self.pair.holder_now_s, waits=waits)

    @precondition(lambda self: self.pair.running_holder and self.writes)
    @rule(index=INDEX, num_landing=st.integers(0, 2), chunk=CHUNKS)
    def a_prefill_is_preempted_while_it_is_written_from(self, index: int, num_landing: int, chunk: int) -> None:
        """And nobody waits: the rest of the write reads what others compute into its blocks."""
        rank, write = self.pick(self.writes, index)
        for request in [each for each in self.running if each.source_id == write.source_id]:
            self.pair.running_holder.preempt(request, self.pair.holder_now_s, waits=False)
            for _ in range(num_landing):
                self.pair.land(rank, write)
            self.compute(request, chunk)

    @precondition(lambda self: self.running)
    @rule(index=INDEX, hold_s=st.sampled_from([0.5, 30.0]))
    def a_prefill_is_answered(self, index: int, hold_s: float) -> None:
        request = self.pick(self.running, index)
        if request.is_computed:
            self.pair.running_holder.finish(request, hold_s, self.pair.holder_now_s)

    @precondition(lambda self: self.running)
    @rule(index=INDEX, happens=SELDOM)
    def a_prefill_is_aborted(self, index: int, happens: bool) -> None:
        request = self.pick(self.running, index)
        if happens and not request.is_computed:
            self.pair.running_holder.finish(request, 30.0, self.pair.holder_now_s)

    @precondition(lambda self: self.pair.running_holder)
    @rule()
    def the_prefill_engine_steps(self) -> None:
        self.pair.running_holder.collect(self.pair.holder_now_s)

    # -- its workers ---------------------------------------------------------------------------------

    @precondition(lambda self: any(rank.facts for rank in self.holder_ranks))
    @rule(index=INDEX)
    def a_worker_takes_progress_in(self, index: int) -> None:
        self.pick([rank for rank in self.holder_ranks if rank.facts], index).take_fact()

    @precondition(lambda self: self.holder_ranks)
    @rule(index=INDEX)
    def a_worker_posts(self, index: int) -> None:
        self.pick(self.holder_ranks, index).post()

    @precondition(lambda self: self.writes)
    @rule(index=INDEX)
    def a_block_lands(self, index: int) -> None:
        self.pair.land(*self.pick(self.writes, index))

    @precondition(lambda self: self.writes and self.holder_ranks and not self.pair.is_reader_stopped)
    @rule(index=INDEX)
    def a_write_ends(self, index: int) -> None:
        self.pair.complete(*self.pick(self.writes, index))

    @precondition(lambda self: self.writes and self.holder_ranks)
    @rule(index=INDEX, how=st.sampled_from([""] * 5 + ["failed", "ended", "failed and ended"]))
    def a_write_fails(self, index: int, how: str) -> None:
        """Half-written, perhaps; and what the transport calls failed, but not ended, may still land."""
        rank, write = self.pick(self.writes, index)
        if "failed" in how:
            rank.fail(write)
        if "ended" in how:
            rank.end(write, is_ok=False)

    # -- the links -----------------------------------------------------------------------------------

    @precondition(lambda self: any(map(self.pair.can_deliver, self.pair.link)))
    @rule(index=INDEX, keeps_copy=SELDOM)
    def a_message_arrives(self, index: int, keeps_copy: bool) -> None:
        possible = [i for i, envelope in enumerate(self.pair.link) if self.pair.can_deliver(envelope)]
        self.pair.deliver(self.pick(possible, index), keeps_copy=keeps_copy)

    @precondition(lambda self: self.pair.link)
    @rule(index=INDEX, happens=SELDOM)
    def a_message_is_lost(self, index: int, happens: bool) -> None:
        if happens:
            self.pair.link.pop(index % len(self.pair.link))

    @rule()
    def all_messages_arrive(self) -> None:
        self.pair.exchange()

    @precondition(lambda self: self.decoding)
    @rule(index=INDEX, happens=SELDOM)
    def the_side_channel_gives_up(self, index: int, happens: bool) -> None:
        if happens:
            self.pair.reader.fail_side_channel(self.pick(self.decoding, index), self.pair.reader_now_s)

    @precondition(lambda self: self.pair.order_link and not self.pair.is_holder_stopped)
    @rule(index=INDEX, keeps_copy=st.booleans())
    def an_order_arrives(self, index: int, keeps_copy: bool) -> None:
        self.pair.deliver_order(index % len(self.pair.order_link), keeps_copy=keeps_copy)

    @precondition(lambda self: self.pair.order_link)
    @rule(index=INDEX, happens=SELDOM)
    def an_order_is_lost(self, index: int, happens: bool) -> None:
        if happens:
            self.pair.order_link.pop(index % len(self.pair.order_link))

    @precondition(lambda self: self.pair.notes and not self.pair.is_reader_stopped)
    @rule(index=INDEX, keeps_copy=SELDOM)
    def a_notification_arrives(self, index: int, keeps_copy: bool) -> None:
        self.pair.deliver_note(index % len(self.pair.notes), keeps_copy=keeps_copy)

    @precondition(lambda self: self.pair.notes)
    @rule(index=INDEX, happens=SELDOM)
    def a_notification_is_lost(self, index: int, happens: bool) -> None:
        if happens:
            self.pair.notes.pop(index % len(self.pair.notes))

    @rule()
    def everything_arrives_and_works(self) -> None:
        self.pair.pump()

    # -- the decode engine ---------------------------------------------------------------------------

    def take(self, request: Decode, num_local_blocks: int) -> None:
        num_local_tokens = min(num_local_blocks, len(request.chain.links)) * BLOCK_SIZE_TOKENS
        offer = request.intake.offer(num_local_tokens)
        assert request.intake.offer(num_local_tokens) == offer
        if not offer.num_tokens:
            self.pair.reader.decline(request, offer, self.pair.reader_now_s)
        else:
            self.pair.admit(request, num_local_tokens, offer)

    @precondition(lambda self: self.asking)
    @rule(index=INDEX, num_local_blocks=st.sampled_from([0, 0, 1, 2, 3]))
    def the_engine_asks(self, index: int, num_local_blocks: int) -> None:
        self.take(self.pick(self.asking, index), num_local_blocks)

    @precondition(lambda self: self.asking)
    @rule(index=INDEX, happens=SELDOM)
    def the_engine_declines(self, index: int, happens: bool) -> None:
        if happens:
            self.pair.reader.decline(self.pick(self.asking, index), Offer(0), self.pair.reader_now_s)

    @precondition(lambda self: any(each.intake.state is IntakeState.STOPPING for each in self.decoding))
    @rule(late_s=st.sampled_from([-1e-3, 1e-6]), num_arriving=st.integers(0, 6), is_step_between=st.booleans())
    def the_engine_stops_waiting(self, late_s: float, num_arriving: int, is_step_between: bool) -> None:
        """And just before or after that the holder's last words arrive."""
        stopping = [each for each in self.decoding if each.intake.state is IntakeState.STOPPING]
        at_s = stopping[0].intake._confirm_by_s
        if math.isfinite(at_s):
            self.pair.world_s = max(self.pair.world_s, self.pair.reader_clock.world(at_s) + late_s)
        self.pair.tick()
        if is_step_between:
            self.pair.reader_step()
        for _ in range(min(num_arriving, len(self.pair.notes))):
            self.pair.deliver_note()
        self.pair.reader_step()

    @precondition(lambda self: any(each.intake.state is IntakeState.FALLING_BACK for each in self.decoding))
    @rule(is_ok=st.sampled_from([True, True, False]))
    def a_fallback_gets_its_way(self, is_ok: bool) -> None:
        for request in self.running:
            if request.is_computed:
                self.pair.running_holder.finish(request, 30.0, self.pair.holder_now_s)
        self.pair.exchange()
        self.pair.reader_step()
        for rank, request in self.reading:
            rank.end_read(request, is_ok=is_ok)
        self.pair.reader_step()

    @rule()
    def the_decode_engine_steps(self) -> None:
        self.pair.reader_step()

    @precondition(lambda self: self.reading)
    @rule(index=INDEX)
    def a_block_is_read(self, index: int) -> None:
        rank, request = self.pick(self.reading, index)
        rank.read_block(request)

    @precondition(lambda self: self.reading)
    @rule(index=INDEX, is_ok=st.sampled_from([True, True, False]))
    def a_read_ends(self, index: int, is_ok: bool) -> None:
        rank, request = self.pick(self.reading, index)
        rank.end_read(request, is_ok=is_ok)

    @precondition(lambda self: self.decoding)
    @rule(index=INDEX, happens=SELDOM)
    def a_request_ends(self, index: int, happens: bool) -> None:
        if happens:
            self.pair.reader.end_request(self.pick(self.decoding, index), self.pair.reader_now_s)

    @precondition(lambda self: self.decoding)
    @rule(index=INDEX, happens=SELDOM)
    def a_worker_breaks_a_load(self, index: int, happens: bool) -> None:
        """Its comm thread is dead, say: it reports a failure that nobody ordered."""
        request = self.pick(self.decoding, index)
        for rank in self.pair.reader.ranks if happens else ():
            if request in rank.owed and request not in rank.reads:
                rank.inboxes.abandon(rank.owed[request])
                rank.report(request, is_ok=False)

    # -- lives ---------------------------------------------------------------------------------------

    @rule(happens=SELDOM)
    def the_holder_restarts(self, happens: bool) -> None:
        if happens:
            self.pair.restart_holder()

    @rule(happens=SELDOM)
    def the_holder_dies(self, happens: bool) -> None:
        if happens:
            self.pair.kill_holder()

    @precondition(lambda self: self.pair.holder is None)
    @rule()
    def the_holder_comes_back(self) -> None:
        self.pair.restart_holder()

    @rule(happens=SELDOM)
    def the_holder_is_stopped(self, happens: bool) -> None:
        if happens and self.pair.holder is not None:
            self.pair.is_holder_stopped = True

    @precondition(lambda self: self.pair.is_holder_stopped)
    @rule()
    def the_holder_goes_on(self) -> None:
        self.pair.is_holder_stopped = False

    @rule(happens=SELDOM)
    def the_reader_is_stopped(self, happens: bool) -> None:
        self.pair.is_reader_stopped |= happens

    @precondition(lambda self: self.pair.is_reader_stopped)
    @rule()
    def the_reader_goes_on(self) -> None:
        self.pair.is_reader_stopped = False

    @rule(happens=SELDOM)
    def the_reader_restarts(self, happens: bool) -> None:
        if happens:
            self.note_outcomes()
            self.pair.restart_reader()

    @precondition(lambda self: self.decoding)
    @rule(index=INDEX)
    def a_death_becomes_known(self, index: int) -> None:
        request = self.pick(self.decoding, index)
        if self.pair.holder is None or self.pair.holder_life != request.holder_life:
            self.pair.declare_dead(request)

    # -- what must hold ------------------------------------------------------------------------------

    @invariant()
    def nothing_is_wrong_now(self) -> None:
        if hasattr(self, "pair"):
            self.pair.check()

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.pair.drain(holder_stays_stopped=self.stays_stopped)
            self.note_outcomes()

    def note_outcomes(self) -> None:
        for request in self.pair.reader.requests:
            event(f"outcome: {request.intake.outcome}")


TestPush = PushMachine.TestCase


NUM_STORIES = 20_000
NUM_PARTS = 10


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_push_through_twenty_thousand_stories() -> None:
    """In parts, each in a process of its own: Hypothesis keeps all examples of a run in memory, gigabytes of them."""
    with ProcessPoolExecutor(
        len(os.sched_getaffinity(0)), mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        parts = [pool.submit(tell_stories, NUM_STORIES // NUM_PARTS) for _ in range(NUM_PARTS)]
        assert sum(part.result() for part in parts) >= NUM_STORIES


def tell_stories(num_examples: int) -> int:
    """Returns how many were told to their end."""

    class Counted(PushMachine):
        num_stories = 0

        def teardown(self) -> None:
            super().teardown()
            Counted.num_stories += 1

    # Stories are not longer than in the short run: more of them find more. Each process tells others, also in CI.
    stories = settings(
        max_examples=num_examples,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        print_blob=True,
        derandomize=False,
    )
    run_state_machine_as_test(Counted, settings=stories)
    return Counted.num_stories


WORK = ["chunk", "chunk", "preempt", "roll back", "messages", "message", "order", "note", "fact", "post", "land", "end"]


@given(
    prompt=PROMPTS,
    num_ranks=st.sampled_from([1, 2]),
    num_local_blocks=st.sampled_from([0, 0, 1]),
    comes_late_by=st.integers(0, 12),
    story=st.lists(st.tuples(st.sampled_from([*WORK, "decode step"]), INDEX), max_size=60),
)
def test_without_faults_every_push_is_received(
    prompt: tuple[int, ...], num_ranks: int, num_local_blocks: int, comes_late_by: int, story: list[tuple[str, int]]
) -> None:
    """In whatever order things happen, preemptions included, and with nothing left to do for a fetch."""
    pair = PushPair(num_ranks=num_ranks)
    request = pair.decode(Handle("x"), prompt)
    num_local_tokens = min(num_local_blocks, (len(prompt) - 1) // BLOCK_SIZE_TOKENS) * BLOCK_SIZE_TOKENS
    prefill = pair.holder.begin(Handle("x"), prompt, 0.0)
    for what, index in story[:comes_late_by]:
        work_on(pair, prefill, what, index)
    pair.admit(request, num_local_tokens, request.intake.offer(num_local_tokens))
    for what, index in story[comes_late_by:]:
        work_on(pair, prefill, what, index)
    while not prefill.is_computed:
        work_on(pair, prefill, "chunk", 0)
    assert pair.holder.finish(prefill, 30.0, 0.0)
    for _ in range(3):
        pair.pump()
        pair.reader_step()
    assert request.intake.outcome is PushOutcome.RECEIVED
    assert pair.holder.ledger.counters.acquired == 0
    pair.drain()


def work_on(pair: PushPair, prefill: Prefill, what: str, index: int) -> None:
    rank = pair.holder.ranks[index % pair.num_ranks]
    compute_on(pair, prefill, what, index)
    match what:
        case "messages":
            pair.exchange()
        case "message" if pair.link:
            pair.deliver(index % len(pair.link))
        case "order" if pair.order_link:
            pair.deliver_order(index % len(pair.order_link))
        case "note" if pair.notes:
            pair.deliver_note(index % len(pair.notes))
        case "decode step":
            pair.reader_step()
        case "fact" if rank.facts:
            rank.take_fact()
        case "post":
            rank.post()
        case "land" if rank.writes:
            pair.land(rank, rank.writes[index % len(rank.writes)])
        case "end" if rank.writes:
            pair.complete(rank, rank.writes[index % len(rank.writes)])


def compute_on(pair: PushPair, prefill: Prefill, what: str, index: int) -> None:
    if what == "chunk" and not prefill.is_computed:
        pair.holder.step(prefill, 1 + index, 0.0, rolls_back=False, waits=True)
    elif what == "preempt":
        pair.holder.preempt(prefill, 0.0, waits=index > 3)
    elif what == "roll back" and prefill.table:
        pair.holder.step(prefill, 1 + index, 0.0, rolls_back=True, waits=index > 3)
