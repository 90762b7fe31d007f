"""Incidents that users of disaggregated serving have reported, each as a story through the pair.

The numbers are those of ``field_failures.md`` in the project's reference notes: what must not happen here again.
"""

from __future__ import annotations

import dataclasses

from kvshuttle.handoff import Offer, Outcome
from kvshuttle.ids import Handle
from support.handoff_values import HANDLE, LIMITS
from support.holder_engine import Clock
from support.pair import HandoffPair

TOKENS = tuple(range(10))


def test_an_abort_while_the_peer_never_answers_leaves_nothing_waiting() -> None:
    # 40: blocks of an aborted remote load were never reclaimed when the producer never reported.
    pair = HandoffPair()
    pair.hold(HANDLE, TOKENS)
    request = pair.begin(HANDLE, TOKENS)
    pair.end_request(request)
    pair.advance(LIMITS.acquire_timeout_s)
    pair.tick()
    assert request.fetch.is_drained
    pair.advance(30.0)
    pair.collect()
    assert pair.holder.ledger.is_drained


def test_a_request_that_is_never_sent_costs_the_holder_one_lease() -> None:
    # 1, 2: a decode leg that was rejected, or lost in the router, stranded the prefill engine's blocks for 480 s.
    pair = HandoffPair()
    pair.hold(HANDLE, TOKENS, duration_s=30.0)
    pair.advance(30.0)
    pair.collect()
    assert pair.holder.pool.num_free == pair.holder.pool.num_blocks


def test_blocks_that_were_let_go_are_never_believed_however_well_the_read_went() -> None:
    # 13: 8 of 42 requests decoded from released blocks, all with HTTP 200.
    pair = HandoffPair()
    pair.hold(HANDLE, TOKENS)
    request = pair.begin(HANDLE, TOKENS)
    pair.pump()
    pair.admit(request, 0, request.fetch.offer(0))
    pair.advance(31.0)
    pair.collect()
    pair.end_read(request, is_ok=True)
    assert request.fetch.outcome is Outcome.READ_TOO_LATE


def test_a_waiting_request_keeps_its_lease_however_long_the_queue_is() -> None:
    # 11, 12: short leases expired while the decode engine's queue was long, long ones pinned memory for nothing.
    pair = HandoffPair()
    pair.hold(HANDLE, TOKENS)
    request = pair.begin(HANDLE, TOKENS)
    pair.pump()
    for _ in range(200):
        pair.advance(1.0)
        pair.tick()
        pair.pump()
        pair.collect()
    pair.admit(request, 0, request.fetch.offer(0))
    pair.end_read(request)
    assert request.fetch.outcome is Outcome.READ_OK


def test_a_long_holding_does_not_hide_an_ended_one_behind_it() -> None:
    # 10: expired leases were not reclaimed behind an older entry with a longer life.
    pair = HandoffPair(num_blocks=6)
    pair.hold(Handle("kept-for-the-next-turn"), TOKENS, duration_s=480.0)
    pair.hold(HANDLE, TOKENS, duration_s=30.0)
    assert not pair.hold(Handle("more"), TOKENS)
    pair.advance(30.0)
    pair.collect()
    assert pair.hold(Handle("more"), TOKENS)


def test_clocks_that_share_neither_origin_nor_rate_do_not_matter() -> None:
    # 14: the second turn's answer was garbage after one engine's blocks had expired by its own clock only.
    pair = HandoffPair(holder_clock=Clock(5e5, 1.0009), reader_clock=Clock(-3.0, 0.9991))
    pair.hold(HANDLE, TOKENS)
    request = pair.begin(HANDLE, TOKENS)
    pair.pump()
    pair.admit(request, 0, request.fetch.offer(0))
    pair.world_s = pair.lease_end_s(request) + 1e-6
    assert pair.reader_now_s - (-3.0) < LIMITS.lease_s, "by the reader's watch the lease duration is not over"
    pair.collect()
    pair.end_read(request, is_ok=True)
    assert request.fetch.outcome is Outcome.READ_TOO_LATE


def test_a_rewritten_history_is_reused_only_as_far_as_it_is_the_same() -> None:
    # 15, 16: a stripped reasoning block or an edited turn answered from the old context.
    pair = HandoffPair()
    pair.hold(HANDLE, TOKENS)
    request = pair.begin(HANDLE, (*TOKENS[:6], 99, *TOKENS[7:]))
    pair.pump()
    offer = request.fetch.offer(0)
    assert offer.num_tokens == 4
    pair.admit(request, 0, offer)
    pair.end_read(request)
    assert request.fetch.outcome is Outcome.READ_OK


def test_another_conversation_under_the_same_handle_shares_nothing() -> None:
    # 15: a mixed-up conversation id answered from another user's context.
    pair = HandoffPair()
    pair.hold(HANDLE, TOKENS)
    request = pair.begin(HANDLE, (77, *TOKENS[1:]))
    pair.pump()
    assert request.fetch.outcome is Outcome.DENIED_NO_COMMON_PREFIX
    assert request.fetch.offer(0) == Offer(0)


def test_a_holder_that_restarts_at_the_same_address_is_another_holder() -> None:
    # 22 to 25: peers kept stale state of a restarted engine until they were restarted too.
    pair = HandoffPair()
    pair.hold(HANDLE, TOKENS)
    stale = pair.begin(HANDLE, TOKENS)
    pair.restart_holder()
    pair.hold(HANDLE, TOKENS)
    fresh = pair.begin(HANDLE, TOKENS)
    pair.pump()
    assert stale.fetch.outcome is Outcome.DENIED_OTHER_INCARNATION
    pair.admit(fresh, 0, fresh.fetch.offer(0))
    pair.end_read(fresh)
    assert fresh.fetch.outcome is Outcome.READ_OK


def test_a_reader_that_restarts_costs_the_holder_one_lease() -> None:
    # 11: a crashed decode engine pinned gigabytes for eight minutes.
    pair = HandoffPair()
    pair.hold(HANDLE, TOKENS)
    request = pair.begin(HANDLE, TOKENS)
    pair.pump()
    pair.admit(request, 0, request.fetch.offer(0))
    pair.restart_reader()
    pair.advance(30.0)
    pair.collect()
    assert pair.holder.ledger.is_drained


def test_siblings_of_one_prompt_are_served_until_the_first_drops_it_and_then_compute_themselves() -> None:
    # 8: with n > 1 the siblings' blocks stayed until the engine was full.
    pair = HandoffPair()
    pair.hold(HANDLE, TOKENS)
    early = [pair.begin(HANDLE, TOKENS) for _ in range(2)]
    pair.pump()
    late = pair.begin(HANDLE, TOKENS)
    for request in early:
        pair.admit(request, 0, request.fetch.offer(0))
        pair.end_read(request)
        pair.collect()
    pair.link.reverse()
    pair.pump()
    assert [each.fetch.outcome for each in early] == [Outcome.READ_OK, Outcome.READ_OK]
    assert late.fetch.outcome is Outcome.DENIED_UNKNOWN_HANDLE
    pair.drain()


def test_every_prompt_of_a_list_gets_its_own_blocks() -> None:
    # 72: the requests of a list of prompts shared one set of remote blocks.
    pair = HandoffPair()
    prompts = [TOKENS, (*TOKENS[:4], 5, 5, 5, 5, 5), (9, 9, 9, 9, 9)]
    for prompt in prompts:
        pair.hold(HANDLE, prompt)
    requests = [pair.begin(HANDLE, prompt) for prompt in prompts]
    pair.pump()
    for request in requests:
        pair.admit(request, 0, request.fetch.offer(0))
        pair.end_read(request)
    pair.pump()
    pair.collect()
    assert {each.fetch.outcome for each in requests} == {Outcome.READ_OK}
    assert pair.holder.ledger.is_drained


def test_a_prompt_that_ends_with_a_block_is_paired_by_index() -> None:
    # 27, 28: one side had a block more than the other, and lists trimmed at an end were paired wrongly.
    pair = HandoffPair()
    pair.hold(HANDLE, (*TOKENS[:8], 99))
    request = pair.begin(HANDLE, TOKENS[:8])
    pair.pump()
    pair.admit(request, 4, request.fetch.offer(4))
    pair.end_read(request)
    assert request.fetch.outcome is Outcome.READ_OK


def test_a_hit_that_is_not_worth_moving_is_given_back_at_once() -> None:
    # 18: tiny transfers paid a fixed cost; 33: a full prefix hit was read again.
    limits = dataclasses.replace(LIMITS, recompute_threshold_tokens=7)
    pair = HandoffPair(limits=limits)
    pair.hold(HANDLE, TOKENS)
    request = pair.begin(HANDLE, TOKENS)
    pair.pump()
    pair.decline(request, request.fetch.offer(4))
    pair.pump()
    pair.collect()
    assert request.fetch.outcome is Outcome.BELOW_THRESHOLD
    assert pair.holder.ledger.is_drained
