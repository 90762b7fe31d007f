import pytest
from vllm.v1.core.block_pool import BlockPool

from kvshuttle.blocks import ContentIdentity, token_chain
from kvshuttle.connector.holder import Holder
from kvshuttle.handoff.messages import Release
from kvshuttle.handoff.params import PrefillLeg, parse_result
from support.handoff_values import acquire, ledger

NUM_BLOCKS = 20
CHAIN = token_chain(range(40), 16, ContentIdentity())


class Case:
    def __init__(self, **options):
        self.pool = BlockPool(NUM_BLOCKS, enable_caching=True, hash_block_size=16)
        self.holder = Holder(ledger(**options), lease_s=10.0)
        self.holder.bind_pool(self.pool)

    @property
    def num_free(self):
        return self.pool.get_num_free_blocks()

    def request(self, num_blocks):
        """A finished request's blocks; ``end`` is what vLLM does after the hook."""
        return self.pool.get_new_blocks(num_blocks)

    def hold(self, blocks, *, transfer_id="x", now_s=0.0):
        params = self.holder.hold(
            PrefillLeg(transfer_id), chain=CHAIN, block_ids=[block.block_id for block in blocks], now_s=now_s
        )
        self.pool.free_blocks(reversed(blocks))
        return parse_result(params)


@pytest.fixture
def case():
    return Case()


def test_held_blocks_leave_the_pool_until_they_are_let_go(case):
    result = case.hold(case.request(5))
    assert (result.transfer_id, result.num_tokens, result.lease_s) == ("x", 40, 10.0)
    assert case.num_free == NUM_BLOCKS - 1 - 3  # the fourth and fifth block are the answer's
    assert case.holder.return_freed(9.9) == 0
    assert case.holder.return_freed(10.0) == 3
    assert case.num_free == NUM_BLOCKS - 1
    assert case.holder.return_freed(11.0) == 0


def test_what_was_not_computed_whole_is_not_held(case):
    assert case.hold(case.request(2)) is None
    assert case.hold([]) is None
    assert case.num_free == NUM_BLOCKS - 1
    assert case.holder.ledger.is_drained


def test_a_full_ledger_holds_nothing_and_keeps_no_block():
    case = Case(max_holdings=1)
    case.hold(case.request(3))
    assert case.hold(case.request(3), transfer_id="y") is None
    case.holder.return_freed(0.0)
    assert case.num_free == NUM_BLOCKS - 1 - 3


def test_blocks_let_go_while_the_engine_idles_count_as_returnable_until_they_are_returned(case):
    case.hold(case.request(3))
    assert case.holder.num_returnable_blocks() == 0
    case.holder.expire(10.0)
    assert case.num_free == NUM_BLOCKS - 1 - 3
    assert case.holder.num_returnable_blocks() == 3
    case.holder.return_freed(10.0)
    assert case.holder.num_returnable_blocks() == 0


def test_a_block_that_a_request_still_uses_is_not_returnable(case):
    blocks = case.request(3)
    case.pool.touch(blocks[:1])
    case.hold(blocks)
    case.holder.expire(10.0)
    assert case.holder.num_returnable_blocks() == 2


def test_a_block_that_was_pinned_twice_is_returnable_once_both_are_over(case):
    blocks = case.request(3)
    case.pool.touch(blocks)
    case.hold(blocks, now_s=0.0)
    case.hold(blocks, transfer_id="y", now_s=5.0)
    case.holder.expire(10.0)
    assert case.holder.num_returnable_blocks() == 0
    case.holder.expire(15.0)
    assert case.holder.num_returnable_blocks() == 3


def test_everything_can_be_dropped_at_once(case):
    case.hold(case.request(3))
    case.hold(case.request(3), transfer_id="y")
    assert case.holder.drop_all(1.0)
    assert case.num_free == NUM_BLOCKS - 1
    assert case.holder.drop_all(1.0)


def test_what_is_being_read_is_dropped_when_the_reader_is_done(case):
    case.hold(case.request(3))
    lease = case.holder.ledger.acquire(acquire(CHAIN, "x"), now_s=1.0)
    assert not case.holder.drop_all(2.0)
    case.holder.ledger.release(Release(lease_ids=(lease.lease_id,)), now_s=3.0)
    assert case.holder.drop_all(3.0)
    assert case.num_free == NUM_BLOCKS - 1


def test_quarantined_blocks_come_back_when_every_rank_has_drained(case):
    blocks = case.request(3)
    ids = tuple(block.block_id for block in blocks)
    case.holder.quarantine("r", ids)
    case.holder.quarantine("r", ids)
    case.pool.free_blocks(reversed(blocks))
    assert case.holder.num_quarantined_blocks == 6
    case.holder.lift_quarantine("r", 1)
    assert case.num_free == NUM_BLOCKS - 1 - 3
    assert not case.holder.drop_all(0.0)
    case.holder.lift_quarantine("r", 5)
    assert (case.num_free, case.holder.num_quarantined_blocks) == (NUM_BLOCKS - 1, 0)
    case.holder.lift_quarantine("r", 1)
    assert case.num_free == NUM_BLOCKS - 1


def test_without_a_pool_nothing_is_held_and_nothing_breaks():
    case = Case()
    case.holder._pool = None
    assert case.hold(case.request(3)) is None
    case.holder.quarantine("r", (1, 2))
    case.holder.lift_quarantine("r", 1)
    assert (case.holder.return_freed(99.0), case.holder.num_returnable_blocks()) == (0, 0)


def test_blocks_of_a_push_are_quarantined_from_the_next_hook_on_and_given_back_at_one(case):
    blocks = case.request(3)
    ids = tuple(block.block_id for block in blocks)
    case.holder.quarantine_soon("r", ids)
    case.holder.return_freed(0.0)
    case.pool.free_blocks(reversed(blocks))
    assert case.num_free == NUM_BLOCKS - 1 - 3
    assert case.holder.num_quarantined_blocks == 3
    assert not case.holder.drop_all(0.0)
    case.holder.lift_soon("r")
    assert case.num_free == NUM_BLOCKS - 1 - 3
    assert case.holder.return_freed(0.0) == 3
    assert case.num_free == NUM_BLOCKS - 1


def test_a_quarantine_that_is_lifted_before_the_next_hook_never_begins(case):
    blocks = case.request(3)
    case.holder.quarantine_soon("r", tuple(block.block_id for block in blocks))
    case.holder.lift_soon("r")
    case.holder.return_freed(0.0)
    case.pool.free_blocks(reversed(blocks))
    assert case.num_free == NUM_BLOCKS - 1
    case.holder.lift_soon("r")
