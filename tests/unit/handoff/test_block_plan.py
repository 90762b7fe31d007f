from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshuttle.errors import LocalProtocolError
from kvshuttle.handoff import BlockPlan, BlockRun, ReadDecision, ReadReason, plan_blocks, span_to_read


def plan(source: list[int], destination: list[int], first_index: int, end_index: int) -> BlockPlan:
    return plan_blocks(
        source_block_ids=source, destination_block_ids=destination, first_index=first_index, end_index=end_index
    )


def test_neighbours_on_both_sides_are_one_run() -> None:
    made = plan([5, 6, 7], [11, 12, 13], 0, 3)
    assert made == BlockPlan(first_index=0, num_blocks=3, runs=(BlockRun(5, 11, 3),))


def test_a_gap_on_either_side_starts_a_run() -> None:
    assert plan([5, 6, 8, 9], [11, 12, 13, 20], 0, 4).runs == (
        BlockRun(5, 11, 2),
        BlockRun(8, 13, 1),
        BlockRun(9, 20, 1),
    )


def test_descending_blocks_are_runs_of_one() -> None:
    assert plan([3, 2, 1], [7, 6, 5], 0, 3).runs == (BlockRun(3, 7, 1), BlockRun(2, 6, 1), BlockRun(1, 5, 1))


def test_a_local_prefix_shifts_both_sides_by_the_same_index() -> None:
    made = plan([5, 6, 7], [21, 22, 23], 2, 3)
    assert made == BlockPlan(first_index=2, num_blocks=1, runs=(BlockRun(7, 23, 1),))


def test_lists_of_different_lengths_are_not_trimmed_from_the_end() -> None:
    assert plan([5, 6, 7], [11, 12, 13, 14, 15], 0, 3).runs == (BlockRun(5, 11, 3),)
    assert plan([5, 6, 7, 8], [11, 12], 0, 2).runs == (BlockRun(5, 11, 2),)


@pytest.mark.parametrize(("first_index", "end_index"), [(-1, 2), (0, 0), (2, 1), (0, 4), (3, 4)])
def test_an_index_out_of_range_is_refused(first_index: int, end_index: int) -> None:
    with pytest.raises(LocalProtocolError):
        plan([5, 6, 7], [11, 12, 13], first_index, end_index)


def test_an_index_that_only_one_side_has_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="2 source or 3 destination"):
        plan([5, 6], [11, 12, 13], 0, 3)
    with pytest.raises(LocalProtocolError, match="3 source or 2 destination"):
        plan([5, 6, 7], [11, 12], 0, 3)


def test_a_destination_written_twice_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="twice"):
        plan([5, 6, 7], [11, 12, 11], 0, 3)


def test_a_shared_block_outside_the_span_does_not_matter() -> None:
    assert plan([5, 6, 7], [11, 12, 11], 1, 3).num_blocks == 2


def test_the_null_block_is_no_destination() -> None:
    with pytest.raises(LocalProtocolError, match="null block"):
        plan([5, 6], [11, 0], 0, 2)
    assert plan([5, 6], [0, 12], 1, 2).runs == (BlockRun(6, 12, 1),)


@given(st.data())
def test_a_plan_moves_every_index_of_its_span_exactly_once_and_to_its_own_place(data: st.DataObject) -> None:
    ids = st.lists(st.integers(1, 40), min_size=1, max_size=20, unique=True)
    source, destination = data.draw(ids), data.draw(ids)
    end_index = data.draw(st.integers(1, min(len(source), len(destination))))
    first_index = data.draw(st.integers(0, end_index - 1))
    made = plan(source, destination, first_index, end_index)
    moved = [
        (run.source_first + step, run.destination_first + step) for run in made.runs for step in range(run.num_blocks)
    ]
    assert moved == list(zip(source, destination, strict=False))[first_index:end_index]
    assert made.num_blocks == len(moved)
    for before, after in zip(made.runs, made.runs[1:], strict=False):
        assert (before.source_first + before.num_blocks, before.destination_first + before.num_blocks) != (
            after.source_first,
            after.destination_first,
        ), "two runs could have been one"


@pytest.mark.parametrize(
    ("local", "verified", "prompt", "threshold", "expected"),
    [
        (0, 10, 10, 0, ReadDecision(10, ReadReason.READ)),
        (4, 10, 10, 0, ReadDecision(6, ReadReason.READ)),
        (0, 8, 10, 0, ReadDecision(8, ReadReason.READ)),
        (0, 12, 10, 0, ReadDecision(10, ReadReason.READ)),
        (0, 1, 10, 0, ReadDecision(1, ReadReason.READ)),
        # The last token is computed here anyway.
        (8, 9, 9, 0, ReadDecision(0, ReadReason.FULL_LOCAL_HIT)),
        (8, 8, 8, 0, ReadDecision(0, ReadReason.FULL_LOCAL_HIT)),
        (12, 12, 9, 0, ReadDecision(0, ReadReason.FULL_LOCAL_HIT)),
        (0, 1, 1, 0, ReadDecision(0, ReadReason.FULL_LOCAL_HIT)),
        (8, 10, 10, 0, ReadDecision(2, ReadReason.READ)),
        (8, 8, 10, 0, ReadDecision(0, ReadReason.LOCAL_COVERS_VERIFIED)),
        (8, 4, 10, 0, ReadDecision(0, ReadReason.LOCAL_COVERS_VERIFIED)),
        (0, 0, 10, 0, ReadDecision(0, ReadReason.LOCAL_COVERS_VERIFIED)),
        (4, 10, 10, 6, ReadDecision(6, ReadReason.READ)),
        (4, 10, 10, 7, ReadDecision(0, ReadReason.BELOW_THRESHOLD)),
    ],
)
def test_the_span_to_read(local: int, verified: int, prompt: int, threshold: int, expected: ReadDecision) -> None:
    decision = span_to_read(
        num_local_tokens=local,
        num_verified_tokens=verified,
        num_prompt_tokens=prompt,
        block_size_tokens=4,
        recompute_threshold_tokens=threshold,
    )
    assert decision == expected


def test_a_local_prefix_that_is_not_block_aligned_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="block aligned"):
        span_to_read(num_local_tokens=5, num_verified_tokens=8, num_prompt_tokens=9, block_size_tokens=4)
