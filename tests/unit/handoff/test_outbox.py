from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from kvshuttle.errors import LocalProtocolError
from kvshuttle.handoff import (
    OUTBOX_TRANSITIONS,
    BlockPlan,
    BlockRun,
    Commit,
    Fail,
    Notify,
    Outbox,
    OutboxState,
    OutboxTrigger,
    PostWrite,
    SourceBlocks,
    Written,
)
from kvshuttle.ids import Handle
from support.push_pair import PushPair
from support.push_values import BLOCKS, TOKENS, close_order, open_order, outbox

if TYPE_CHECKING:
    from collections.abc import Callable

REG = "reg-of-lease-1"
WORKER = open_order().worker
COMMIT = Notify("lease-1", WORKER, Commit(REG, 0, 1, 3))
FAILED = Notify("lease-1", WORKER, Fail(REG, "write_failed"))


def computed(**source: object) -> Outbox:
    return outbox(block_ids=list(BLOCKS), is_final=True, **source)


def submit(made: Outbox, max_blocks: int = 9) -> PostWrite:
    write = made.next_write(max_blocks)
    assert write is not None
    return write


def restart(made: Outbox, block_ids: tuple[int, ...] = ()) -> None:
    made.source.epoch += 1
    made.source.block_ids[:] = block_ids
    made.source.is_final = len(block_ids) == len(BLOCKS)
    made.on_restarted()


def under_way() -> Outbox:
    made = computed()
    submit(made)
    return made


def settling() -> Outbox:
    made = under_way()
    restart(made)
    return made


def committed() -> Outbox:
    made = computed()
    made.on_write_ended(submit(made), is_ok=True)
    return made


def failed() -> Outbox:
    made = computed()
    made.on_write_failed(submit(made))
    return made


def closed() -> Outbox:
    made = under_way()
    made.close(close_order())
    return made


def ended() -> Outbox:
    made = computed()
    made.close(close_order())
    return made


IN_STATE: dict[OutboxState, Callable[[], Outbox]] = {
    OutboxState.WRITING: under_way,
    OutboxState.SETTLING: settling,
    OutboxState.COMMITTED: committed,
    OutboxState.FAILED: failed,
    OutboxState.CLOSED: closed,
    OutboxState.ENDED: ended,
}
PLAN = BlockPlan(0, 3, (BlockRun(5, 21, 2), BlockRun(9, 23, 1)))
WRITE = PostWrite("lease-1", "req-1", PLAN, WORKER, Written(REG, 0, 0, 3))


# -- the happy path ----------------------------------------------------------------------------------


def test_chunks_are_written_as_they_get_computed_through_the_pair() -> None:
    pair = PushPair()
    request = pair.decode(Handle("x"), TOKENS)
    pair.admit(request, 0, request.intake.offer(0))
    prefill = pair.holder.begin(Handle("x"), TOKENS, 0.0)
    pair.exchange()
    pair.reader_step()
    (rank,) = pair.holder.ranks
    for num_tokens, num_blocks in [(5, 1), (4, 2), (1, 3)]:
        pair.holder.step(prefill, num_tokens, 0.0, rolls_back=False, waits=True)
        pair.pump()
        (box,) = rank.writer._outboxes.values()
        assert f" {num_blocks}/3 " in repr(box)
    assert repr(box) == "<Outbox life-1-push-lease-1 COMMITTED 3/3 under_way=0>"
    pair.drain()
    assert request.reports == [True]


def test_a_commit_names_the_writes_that_have_ended() -> None:
    made = outbox(block_ids=[5])
    first = submit(made)
    assert first.plan == BlockPlan(0, 1, (BlockRun(5, 21, 1),))
    assert first.notification == Written(REG, 0, 0, 1)
    assert not made.has_work
    assert made.next_write(9) is None
    made.source.block_ids += [6, 9]
    made.source.is_final = True
    assert made.on_progress() == ()
    second = submit(made)
    assert second.notification == Written(REG, 0, 1, 2)
    assert made.on_write_ended(second, is_ok=True) == ()
    assert made.on_write_ended(first, is_ok=True) == (Notify("lease-1", WORKER, Commit(REG, 0, 2, 3)),)
    assert made.state is OutboxState.COMMITTED


def test_a_write_is_no_longer_than_a_turn() -> None:
    made = computed()
    assert [submit(made, 2).plan.num_blocks for _ in range(2)] == [2, 1]


def test_what_the_reader_has_is_not_written() -> None:
    source = SourceBlocks("req-1", block_ids=list(BLOCKS), is_final=True)
    made = Outbox(open_order(first_index=2), source)
    write = submit(made)
    assert write.plan == BlockPlan(2, 1, (BlockRun(9, 23, 1),))
    assert made.on_write_ended(write, is_ok=True)[0].notification == Commit(REG, 0, 1, 1)


def test_nothing_is_committed_before_the_prompt_is_computed() -> None:
    made = outbox(block_ids=list(BLOCKS))
    assert made.on_write_ended(submit(made), is_ok=True) == ()
    made.source.is_final = True
    assert made.on_progress() == (COMMIT,)
    assert made.on_progress() == ()


# -- the table ---------------------------------------------------------------------------------------


def trigger_it(made: Outbox, trigger: OutboxTrigger) -> None:
    match trigger:
        case OutboxTrigger.SUBMITTED:
            submit(made)
        case OutboxTrigger.WRITE_FAILED:
            made.on_write_failed(WRITE)
        case OutboxTrigger.RESTARTED | OutboxTrigger.RESTARTED_UNDER_WAY:
            restart(made)
        case OutboxTrigger.CLOSED:
            made.close(close_order())
        case OutboxTrigger.WRITE_ENDED | OutboxTrigger.ALL_WRITTEN | OutboxTrigger.SETTLED | OutboxTrigger.DRAINED:
            made.on_write_ended(WRITE, is_ok=True)


def start_of(state: OutboxState, trigger: OutboxTrigger) -> Outbox:
    if trigger is OutboxTrigger.SUBMITTED:
        return computed()
    if trigger is OutboxTrigger.RESTARTED and state is OutboxState.WRITING:
        return outbox()
    if trigger is OutboxTrigger.RESTARTED and state is OutboxState.FAILED:
        made = failed()
        made.on_write_ended(WRITE, is_ok=False)
        return made
    return IN_STATE[state]()


@pytest.mark.parametrize(("state", "trigger"), OUTBOX_TRANSITIONS)
def test_every_row_of_the_table_happens(
    state: OutboxState, trigger: OutboxTrigger, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = start_of(state, trigger)
    moves: list[tuple[OutboxState, OutboxTrigger, OutboxState]] = []
    move = Outbox._move

    def note(self: Outbox, trigger: OutboxTrigger) -> None:
        before = self.state
        move(self, trigger)
        moves.append((before, trigger, self.state))

    monkeypatch.setattr(Outbox, "_move", note)
    trigger_it(made, trigger)
    assert (state, trigger, OUTBOX_TRANSITIONS[state, trigger]) in moves


@pytest.mark.parametrize("state", [OutboxState.CLOSED, OutboxState.ENDED])
def test_closing_twice_is_a_bug(state: OutboxState) -> None:
    made = IN_STATE[state]()
    with pytest.raises(LocalProtocolError, match="closed"):
        made.close(close_order())
    assert made.state is state


# -- duplicates and conflicts ------------------------------------------------------------------------


@pytest.mark.parametrize("state", OutboxState)
def test_the_end_of_a_write_that_is_not_under_way_changes_nothing(state: OutboxState) -> None:
    made = IN_STATE[state]()
    stranger = PostWrite("lease-1", "req-1", WRITE.plan, WORKER, Written(REG, 7, 0, 3))
    before = repr(made)
    assert made.on_write_ended(stranger, is_ok=True) == ()
    assert made.on_write_failed(stranger) == ()
    assert repr(made) == before


def test_the_end_of_a_write_is_counted_once() -> None:
    made = computed()
    first, _second = submit(made, 2), submit(made, 2)
    assert made.on_write_ended(first, is_ok=True) == ()
    assert made.on_write_ended(first, is_ok=True) == ()
    assert made.state is OutboxState.WRITING


def test_a_failure_is_told_once_and_nothing_is_written_after_it() -> None:
    made = computed()
    first, second = submit(made, 1), submit(made, 1)
    assert made.on_write_failed(first) == (FAILED,)
    assert made.on_write_failed(second) == ()
    assert made.next_write(9) is None
    assert made.on_write_ended(first, is_ok=False) == ()
    assert made.on_write_ended(second, is_ok=True) == ()
    assert made.state is OutboxState.FAILED


def test_a_write_that_ends_badly_without_warning_is_a_failure_too() -> None:
    made = under_way()
    assert made.on_write_ended(WRITE, is_ok=False) == (FAILED,)
    assert made.state is OutboxState.FAILED


# -- epochs ------------------------------------------------------------------------------------------


def test_after_a_restart_everything_is_written_again_once_the_old_writes_have_ended() -> None:
    made = computed()
    old = submit(made, 2)
    restart(made, (7, 8, 9))
    assert not made.is_settled
    assert made.next_write(9) is None
    assert made.on_write_ended(old, is_ok=True) == ()
    assert made.is_settled
    write = submit(made)
    assert write.plan.first_index == 0
    assert write.notification == Written(REG, 1, 0, 3)
    assert made.on_write_ended(write, is_ok=True) == (Notify("lease-1", WORKER, Commit(REG, 1, 1, 3)),)


def test_a_restart_with_nothing_under_way_needs_no_settling() -> None:
    made = computed()
    made.on_write_ended(submit(made, 2), is_ok=True)
    restart(made, BLOCKS)
    assert submit(made).notification == Written(REG, 1, 0, 3)


def test_an_outbox_that_is_opened_late_begins_in_the_present_epoch() -> None:
    assert submit(computed(epoch=3)).notification == Written(REG, 3, 0, 3)


def test_a_commit_stands_although_the_source_restarts_afterwards() -> None:
    made = committed()
    restart(made, BLOCKS)
    assert made.next_write(9) is None
    assert made.on_progress() == ()
    assert made.state is OutboxState.COMMITTED


def test_the_last_old_write_of_two_epochs_settles() -> None:
    made = computed()
    writes = [submit(made, 1) for _ in range(2)]
    restart(made)
    restart(made, BLOCKS)
    made.on_write_ended(writes[0], is_ok=True)
    assert made.state is OutboxState.SETTLING
    made.on_write_ended(writes[1], is_ok=True)
    assert submit(made).notification.epoch == 2


# -- close in every state ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "is_told"),
    [
        (OutboxState.WRITING, True),
        (OutboxState.SETTLING, True),
        (OutboxState.COMMITTED, False),
        (OutboxState.FAILED, False),
    ],
)
def test_close_in_every_state_ends_drained_and_tells_whom_it_concerns(state: OutboxState, is_told: bool) -> None:
    made = IN_STATE[state]()
    actions = made.close(close_order("lease_expired"))
    assert [action.notification for action in actions] == ([Fail(REG, "lease_expired")] if is_told else [])
    if made.state is OutboxState.CLOSED:
        assert made.on_write_ended(WRITE, is_ok=True) == ()
    assert made.state is OutboxState.ENDED


def test_a_reader_that_wants_no_more_is_told_nothing() -> None:
    assert under_way().close(close_order()) == ()


@pytest.mark.parametrize("num_steps", range(14))
def test_an_abort_after_any_number_of_steps_leaves_nothing_behind_through_the_pair(num_steps: int) -> None:
    pair = PushPair(num_ranks=2)
    request = pair.decode(Handle("x"), TOKENS)
    pair.admit(request, 0, request.intake.offer(0))
    prefill = pair.holder.begin(Handle("x"), TOKENS, 0.0)
    story = itertools.cycle([pair.exchange, pair.reader_step])
    for number in range(num_steps):
        if number % 3 == 2 and not prefill.is_computed:
            pair.holder.step(prefill, 4, 0.0, rolls_back=False, waits=True)
        for rank in pair.holder.ranks:
            while rank.facts:
                rank.take_fact()
            if not rank.post() and rank.writes:
                pair.land(rank, rank.writes[0])
        next(story)()
    pair.holder.finish(prefill, 30.0, 0.0)
    pair.check()
    pair.drain()
    assert len(request.reports) == 1
