from __future__ import annotations

import pytest

from kvshuttle.errors import LocalProtocolError
from kvshuttle.handoff import Progress, Publisher, Restarted

BLOCKS = (5, 6, 9)


def publisher(num_tokens: int = 10) -> Publisher:
    return Publisher("req-1", num_prompt_tokens=num_tokens, block_size_tokens=4)


def step(made: Publisher, before: int, after: int, block_ids: tuple[int, ...] = BLOCKS) -> tuple[object, ...]:
    return made.on_step(num_before_tokens=before, num_after_tokens=after, block_ids=block_ids)


def test_each_block_is_published_once_when_it_is_full_and_the_last_one_at_the_end() -> None:
    made = publisher()
    assert step(made, 0, 3) == ()
    assert step(made, 3, 6) == (Progress("req-1", 0, 0, (5,), is_final=False),)
    assert step(made, 6, 7) == ()
    assert step(made, 7, 10) == (Progress("req-1", 0, 1, (6, 9), is_final=True),)
    assert repr(made) == "<Publisher req-1 epoch=0 published=3>"


def test_tokens_of_the_answer_are_not_the_prompts() -> None:
    made = publisher()
    assert step(made, 0, 12) == (Progress("req-1", 0, 0, BLOCKS, is_final=True),)
    assert step(made, 12, 13, (5, 6, 9, 11)) == ()


def test_a_prompt_of_whole_blocks_ends_with_its_last_block() -> None:
    made = publisher(8)
    assert step(made, 0, 8) == (Progress("req-1", 0, 0, (5, 6), is_final=True),)


def test_cached_blocks_are_published_with_the_first_chunk() -> None:
    assert step(publisher(), 8, 9) == (Progress("req-1", 0, 0, (5, 6), is_final=False),)


def test_after_a_preemption_everything_is_published_again_in_a_new_epoch() -> None:
    made = publisher()
    step(made, 0, 10)
    assert made.on_preempted() == Restarted("req-1", 1)
    assert step(made, 0, 10, (7, 8, 9)) == (Progress("req-1", 1, 0, (7, 8, 9), is_final=True),)


def test_a_preemption_before_anything_was_published_is_nothing_to_tell() -> None:
    made = publisher()
    step(made, 0, 3)
    assert made.on_preempted() is None
    assert made.epoch == 0


@pytest.mark.parametrize("before", [0, 3])
def test_tokens_that_are_computed_again_restart_the_source(before: int) -> None:
    made = publisher()
    step(made, 0, 9)
    facts = step(made, before, 9)
    assert facts == (Restarted("req-1", 1), Progress("req-1", 1, 0, (5, 6), is_final=False))


def test_a_step_back_within_what_was_never_published_is_no_restart() -> None:
    made = publisher()
    step(made, 0, 7)
    assert step(made, 4, 7) == ()


def test_a_block_table_that_cannot_hold_the_tokens_is_a_bug() -> None:
    with pytest.raises(LocalProtocolError, match="2 blocks for 10 tokens"):
        step(publisher(), 0, 10, (5, 6))
