from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshuttle.blocks import (
    DIGEST_LEN_BYTES,
    ContentIdentity,
    MultimodalSpan,
    TokenChain,
    num_blocks_for,
    num_common_tokens,
    token_chain,
)

PLAIN = ContentIdentity()
TOKENS = list(range(10))


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2)])
def test_a_started_block_is_a_block(num_tokens: int, num_blocks: int) -> None:
    assert num_blocks_for(num_tokens, 4) == num_blocks


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 5, 8, 9])
def test_a_chain_has_a_link_for_each_full_block_and_a_tail_for_the_rest(num_tokens: int) -> None:
    chain = token_chain(list(range(num_tokens)), 4, PLAIN)
    assert chain.num_tokens == num_tokens
    assert len(chain.links) == num_tokens // 4
    assert bool(chain.tail) == bool(num_tokens % 4)
    assert all(len(link) == DIGEST_LEN_BYTES for link in chain.links)


def test_the_same_tokens_make_the_same_chain_whatever_sequence_carries_them() -> None:
    assert token_chain(TOKENS, 4, PLAIN) == token_chain(tuple(TOKENS), 4, PLAIN)


def test_a_link_covers_everything_before_it() -> None:
    first_differs = token_chain([99, *TOKENS[1:]], 4, PLAIN)
    assert not set(first_differs.links) & set(token_chain(TOKENS, 4, PLAIN).links)


@pytest.mark.parametrize(
    ("other", "num_common"),
    [
        (TOKENS, 10),
        (TOKENS[:9], 8),
        (TOKENS[:8], 8),
        ([*TOKENS, 10], 8),
        ([*TOKENS[:4], 99, *TOKENS[5:]], 4),
        ([99, *TOKENS[1:]], 0),
        (TOKENS[:3], 0),
        ([], 0),
    ],
)
def test_the_common_prefix_is_whole_blocks_unless_all_is_equal(other: list[int], num_common: int) -> None:
    held, wanted = token_chain(TOKENS, 4, PLAIN), token_chain(other, 4, PLAIN)
    assert num_common_tokens(held, wanted) == num_common
    assert num_common_tokens(wanted, held) == num_common


def test_a_partial_block_counts_only_when_both_sequences_end_with_it() -> None:
    short = token_chain([1, 2, 3], 4, PLAIN)
    assert num_common_tokens(short, token_chain([1, 2, 3], 4, PLAIN)) == 3
    assert num_common_tokens(short, token_chain([1, 2, 4], 4, PLAIN)) == 0


def test_chains_of_different_block_sizes_share_nothing() -> None:
    assert num_common_tokens(token_chain(TOKENS, 4, PLAIN), token_chain(TOKENS, 2, PLAIN)) == 0


@pytest.mark.parametrize(
    "identity",
    [
        ContentIdentity(lora="a"),
        ContentIdentity(salt="a"),
        ContentIdentity(lora="a", salt="b"),
        ContentIdentity(lora="ab"),
        ContentIdentity(salt="ab"),
        ContentIdentity(multimodal=(MultimodalSpan(0, 2, "cat"),)),
        ContentIdentity(multimodal=(MultimodalSpan(0, 2, "dog"),)),
        ContentIdentity(multimodal=(MultimodalSpan(1, 2, "cat"),)),
    ],
)
def test_what_decides_the_content_besides_tokens_decides_the_chain(identity: ContentIdentity) -> None:
    assert num_common_tokens(token_chain(TOKENS, 4, PLAIN), token_chain(TOKENS, 4, identity)) == 0
    assert num_common_tokens(token_chain(TOKENS, 4, identity), token_chain(TOKENS, 4, identity)) == 10


def test_identity_parts_do_not_run_into_each_other() -> None:
    one = token_chain(TOKENS, 4, ContentIdentity(lora="ab", salt="c"))
    other = token_chain(TOKENS, 4, ContentIdentity(lora="a", salt="bc"))
    assert num_common_tokens(one, other) == 0


def test_an_image_changes_its_own_block_and_all_after_it_but_none_before() -> None:
    cat = token_chain(TOKENS, 4, ContentIdentity(multimodal=(MultimodalSpan(5, 1, "cat"),)))
    assert num_common_tokens(cat, token_chain(TOKENS, 4, PLAIN)) == 4
    dog = token_chain(TOKENS, 4, ContentIdentity(multimodal=(MultimodalSpan(5, 1, "dog"),)))
    assert num_common_tokens(cat, dog) == 4


def test_an_image_over_two_blocks_counts_in_both() -> None:
    cat = token_chain(TOKENS, 4, ContentIdentity(multimodal=(MultimodalSpan(3, 4, "cat"),)))
    dog = token_chain(TOKENS, 4, ContentIdentity(multimodal=(MultimodalSpan(3, 4, "dog"),)))
    assert num_common_tokens(cat, dog) == 0


def test_token_ids_beyond_32_bits_and_negative_ones_are_told_apart() -> None:
    chains = [token_chain([value] * 4, 4, PLAIN) for value in (0, 1, -1, 2**32, 2**40)]
    assert len({chain.links for chain in chains}) == len(chains)


@pytest.mark.parametrize(
    ("num_tokens", "links", "tail"), [(4, (), b""), (4, (b"x",), b"t"), (5, (b"x",), b""), (3, (b"x",), b"t")]
)
def test_a_chain_that_contradicts_its_length_cannot_be_made(
    num_tokens: int, links: tuple[bytes, ...], tail: bytes
) -> None:
    with pytest.raises(ValueError, match="links"):
        TokenChain(4, num_tokens, links, tail)


def test_the_scheme_does_not_change_unnoticed() -> None:
    # Engines of different releases compare these: a change needs a new scheme name.
    chain = token_chain(TOKENS, 4, ContentIdentity(lora="l", salt="s", multimodal=(MultimodalSpan(1, 2, "cat"),)))
    assert [link.hex() for link in (*chain.links, chain.tail)] == [
        "f1c98e2543a2073e73387b269d3ed795",
        "7d004d0fd2565c3043d8b000ea1f0154",
        "83d53bec48dbb1bcc327e859dbdb8e36",
    ]


@given(
    tokens=st.lists(st.integers(0, 9), max_size=40),
    num_known=st.integers(0, 50),
    salt=st.sampled_from(["", "s"]),
)
def test_a_known_beginning_changes_no_link(tokens: list[int], num_known: int, salt: str) -> None:
    identity = ContentIdentity(salt=salt, multimodal=(MultimodalSpan(5, 9, "image"),))
    known = token_chain([*tokens, *range(50)][:num_known], 4, identity)
    if num_known <= len(tokens):
        assert token_chain(tokens, 4, identity, known=known) == token_chain(tokens, 4, identity)
    beginning = token_chain(tokens, 4, identity)
    assert token_chain(tokens[:num_known], 4, identity, known=beginning) == token_chain(tokens[:num_known], 4, identity)
