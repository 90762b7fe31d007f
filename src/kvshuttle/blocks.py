"""Blocks of tokens: counting them, and naming their content by a chained hash.

A *token chain* names a token sequence block by block. Link ``i`` covers everything from token 0 to the
end of block ``i``, so two sequences share a prefix of ``k`` full blocks exactly when their first ``k``
links are equal. We hash token ids ourselves: vLLM's block hashes are comparable between processes
only from 0.29 on, and only with equal seeds and hash functions.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

DIGEST_LEN_BYTES = 16
"""128 bits of BLAKE2b: a collision needs 2**64 sequences, found on purpose or by accident."""

CHAIN_SCHEME = "kvshuttle-token-chain-v1"
"""Names the way links are made; it is part of every root and of every engine's fingerprint."""


def num_blocks_for(num_tokens: int, block_size_tokens: int) -> int:
    """Blocks needed for ``num_tokens`` (ceiling division)."""
    return -(-num_tokens // block_size_tokens)


@dataclass(frozen=True, slots=True)
class MultimodalSpan:
    """Placeholder tokens whose meaning is an image or sound: position, length, and what it is."""

    offset_tokens: int
    num_tokens: int
    identity: str


@dataclass(frozen=True, slots=True)
class ContentIdentity:
    """What else decides a block's KV besides token ids.

    ``lora``: adapter identity or "". ``salt``: vLLM's ``cache_salt`` or "". ``multimodal``: spans in order.
    """

    lora: str = ""
    salt: str = ""
    multimodal: tuple[MultimodalSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenChain:
    """The named content of a token sequence.

    ``links``: one digest for each *full* block. ``tail``: digest of the whole sequence when its last block
    is partial, else ``b""``. ``num_tokens``: length of the sequence.
    """

    block_size_tokens: int
    num_tokens: int
    links: tuple[bytes, ...]
    tail: bytes

    def __post_init__(self) -> None:
        full, rest = divmod(self.num_tokens, self.block_size_tokens)
        if len(self.links) != full or bool(self.tail) != bool(rest):
            raise ValueError(
                f"a chain of {self.num_tokens} tokens at {self.block_size_tokens} a block has {full} links"
                f" and {'a' if rest else 'no'} tail, not {len(self.links)} and {'one' if self.tail else 'none'}"
            )


def token_chain(
    token_ids: Sequence[int], block_size_tokens: int, identity: ContentIdentity, *, known: TokenChain | None = None
) -> TokenChain:
    """Hash ``token_ids`` into a chain. The identity goes into the root, multimodal spans into their blocks.

    ``known``: the chain of a beginning of the same sequence, whose full blocks are not hashed again.
    """
    num_tokens = len(token_ids)
    num_full = num_tokens // block_size_tokens
    links = list(known.links[:num_full]) if known is not None else []
    digest = links[-1] if links else _root(block_size_tokens, identity)
    for index in range(len(links), num_full):
        start = index * block_size_tokens
        digest = _link(digest, token_ids[start : start + block_size_tokens], start, identity)
        links.append(digest)
    start = num_full * block_size_tokens
    tail = _link(digest, token_ids[start:], start, identity) if start < num_tokens else b""
    return TokenChain(block_size_tokens, num_tokens, tuple(links), tail)


def num_common_tokens(held: TokenChain, wanted: TokenChain) -> int:
    """Length of the verified common prefix of two chains, in tokens.

    Whole blocks, plus the partial last block when both sequences are equal to the last token.
    Chains of different block sizes share nothing that can be verified.
    """
    if held.block_size_tokens != wanted.block_size_tokens:
        return 0
    if held == wanted:
        return wanted.num_tokens
    num_blocks = 0
    for ours, theirs in zip(held.links, wanted.links, strict=False):
        if ours != theirs:
            break
        num_blocks += 1
    return num_blocks * held.block_size_tokens


def _root(block_size_tokens: int, identity: ContentIdentity) -> bytes:
    root = hashlib.blake2b(digest_size=DIGEST_LEN_BYTES)
    # Length prefixes keep ("ab", "c") and ("a", "bc") apart.
    for part in (CHAIN_SCHEME, str(block_size_tokens), identity.lora, identity.salt):
        text = part.encode()
        root.update(len(text).to_bytes(8, "little"))
        root.update(text)
    return root.digest()


def _link(parent: bytes, token_ids: Sequence[int], start: int, identity: ContentIdentity) -> bytes:
    link = hashlib.blake2b(parent, digest_size=DIGEST_LEN_BYTES)
    link.update(len(token_ids).to_bytes(8, "little"))
    link.update(array("q", token_ids).tobytes())
    end = start + len(token_ids)
    for span in identity.multimodal:
        if span.offset_tokens < end and span.offset_tokens + span.num_tokens > start:
            name = span.identity.encode()
            # The offset is relative to the sequence, so the same image shifted by a token differs.
            link.update(b"mm" + span.offset_tokens.to_bytes(8, "little") + len(name).to_bytes(8, "little") + name)
    return link.digest()
