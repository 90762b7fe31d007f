import pytest
from msgspec.structs import replace

from kvshuttle.config import ModeChoice
from kvshuttle.policy import EngineView, ModeReason, able_decodes, choose_mode

AUTO, PUSH, PULL = ModeChoice.AUTO, ModeChoice.PUSH, ModeChoice.PULL
FREE = EngineView(
    "d0", is_up=True, num_slots=4, num_blocks=100, num_free_blocks=100, block_size_tokens=16, peers=frozenset({"p0"})
)
QUEUES = replace(FREE, num_queued=1)
SLOTS = replace(FREE, reported_requests=4)
MEMORY = replace(FREE, num_free_blocks=9)
UNKNOWN = EngineView("d0", is_up=True)
NUM_TOKENS = 160
"""Ten blocks."""


@pytest.mark.parametrize("decodes", [[], [FREE], [QUEUES], [QUEUES, SLOTS]])
@pytest.mark.parametrize(
    ("knob", "asked", "mode", "reason"),
    [
        (PUSH, None, PUSH, ModeReason.CONFIGURED),
        (PULL, None, PULL, ModeReason.CONFIGURED),
        (AUTO, PUSH, PUSH, ModeReason.REQUESTED),
        (PUSH, PULL, PULL, ModeReason.REQUESTED),
        (PULL, PULL, PULL, ModeReason.REQUESTED),
    ],
)
def test_a_fixed_mode_holds_whatever_the_load(decodes, knob, asked, mode, reason):
    decision = choose_mode(knob, asked, decodes, num_tokens=NUM_TOKENS)
    assert (decision.mode, decision.reason, decision.decodes) == (mode, reason, tuple(decodes))


@pytest.mark.parametrize(
    ("decodes", "mode", "reason"),
    [
        ([], PUSH, ModeReason.DECODE_FREE),
        ([FREE], PUSH, ModeReason.DECODE_FREE),
        ([UNKNOWN], PUSH, ModeReason.DECODE_FREE),
        ([QUEUES], PULL, ModeReason.DECODE_QUEUES),
        ([SLOTS], PULL, ModeReason.DECODE_SLOTS),
        ([MEMORY], PULL, ModeReason.DECODE_MEMORY),
        ([QUEUES, QUEUES], PULL, ModeReason.DECODE_QUEUES),
        ([QUEUES, SLOTS], PULL, ModeReason.DECODE_BUSY),
        ([QUEUES, SLOTS, MEMORY], PULL, ModeReason.DECODE_BUSY),
        ([QUEUES, FREE], PUSH, ModeReason.DECODE_FREE),
        ([replace(QUEUES, num_free_blocks=0, reported_requests=9)], PULL, ModeReason.DECODE_QUEUES),
        ([replace(FREE, reported_requests=3)], PUSH, ModeReason.DECODE_FREE),
        ([replace(FREE, outstanding_requests=4)], PULL, ModeReason.DECODE_SLOTS),
        ([replace(FREE, num_slots=0, outstanding_requests=400)], PUSH, ModeReason.DECODE_FREE),
        ([replace(FREE, num_free_blocks=10)], PUSH, ModeReason.DECODE_FREE),
        ([replace(FREE, outstanding_tokens=90 * 16)], PUSH, ModeReason.DECODE_FREE),
        ([replace(FREE, outstanding_tokens=90 * 16 + 1)], PULL, ModeReason.DECODE_MEMORY),
        # What was sent has arrived, and is not counted again on top of the report.
        ([replace(FREE, outstanding_tokens=50 * 16, num_free_blocks=50)], PUSH, ModeReason.DECODE_FREE),
    ],
)
def test_auto_pushes_while_any_decode_engine_can_take_the_request(decodes, mode, reason):
    decision = choose_mode(AUTO, None, decodes, num_tokens=NUM_TOKENS)
    assert (decision.mode, decision.reason) == (mode, reason)


def test_auto_asked_for_by_a_request_looks_at_the_load_even_where_the_router_has_a_fixed_mode():
    assert choose_mode(PUSH, AUTO, [QUEUES], num_tokens=1).reason is ModeReason.DECODE_QUEUES


def test_a_push_is_placed_among_the_free_ones_only():
    other = replace(FREE, name="d1")
    assert choose_mode(AUTO, None, [QUEUES, other], num_tokens=NUM_TOKENS).decodes == (other,)


def test_engines_that_could_not_serve_the_request_do_not_count_as_free():
    def able(*views, avoid=()):
        return [view.name for view in able_decodes(views, model="m", source="p0", avoid=avoid)]

    other = replace(FREE, name="d1")
    assert able(FREE, replace(other, is_up=False)) == ["d0"]
    assert able(FREE, replace(other, models=frozenset({"n"}))) == ["d0"]
    assert able(FREE, replace(other, peers=frozenset({"p1"}))) == ["d0"]
    assert able(FREE, replace(other, is_quarantined=True)) == ["d0"]
    assert able(FREE, other, avoid=("d1",)) == ["d0"]
    assert able(FREE, avoid=("d0",)) == ["d0"]
    assert able() == []
