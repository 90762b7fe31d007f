"""The lending half of ``HandoffPair``: a clock, a pool whose blocks have content, a ledger, and a checker.

The checker keeps its own books of what is lent until when, and compares them with the pool after every step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from kvshuttle.blocks import TokenChain
from kvshuttle.handoff import Acquire, Acquired, Denied, Keep, Release, Renew, Renewed, Retention
from support.handoff_values import BLOCK_SIZE_TOKENS, block_contents, chain_of, ledger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvshuttle.ids import Handle


FIRST_LEASE_S, LAST_LEASE_S = 2.0, 5.0
"""What is promised of leases on kept turns: so much beyond the turn's time unrenewed, and from the last renewal."""
RETENTION_S = 20.0
RETENTION_BLOCKS = 8


@dataclass(frozen=True)
class Clock:
    """One host's monotonic clock: its origin and its rate are its own."""

    offset_s: float = 0.0
    rate: float = 1.0

    def at(self, world_s: float) -> float:
        return self.offset_s + self.rate * world_s

    def world(self, at_s: float) -> float:
        return (at_s - self.offset_s) / self.rate


class Pool:
    """Blocks 1 … ``num_blocks`` with reference counts, as vLLM's pool has them. The last freed is reused first."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.contents = [b"null"] + [b"scrap"] * num_blocks
        self._references = [0] * (num_blocks + 1)
        self._free = list(range(num_blocks, 0, -1))
        self._scraps = count()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, contents: Sequence[bytes]) -> tuple[int, ...] | None:
        if len(contents) > len(self._free):
            return None
        block_ids = tuple(self._free.pop() for _ in contents)
        for block_id, content in zip(block_ids, contents, strict=True):
            self.contents[block_id] = content
            self._references[block_id] = 1
        return block_ids

    def allocate_cached(self, contents: Sequence[bytes]) -> tuple[int, ...] | None:
        """As a prefix cache does it: blocks in use with the same content are shared."""
        cached = {self.contents[i]: i for i in range(1, self.num_blocks + 1) if self._references[i]}
        fresh = self.allocate([content for content in contents if content not in cached])
        if fresh is None:
            return None
        spare = iter(fresh)
        for content in contents:
            if content in cached:
                self._references[cached[content]] += 1
        return tuple(cached[content] if content in cached else next(spare) for content in contents)

    def give_back(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            assert self._references[block_id] > 0, f"block {block_id} was given back twice"
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                self.contents[block_id] = b"reused-%d" % next(self._scraps)
                self._free.append(block_id)


@dataclass
class LentBlocks:
    """What the checker knows of one lease: its end by the holder's clock, and what must stay readable until then."""

    ends_at_s: float
    contents: dict[int, bytes]
    handle: str


class HolderEngine:
    """The engine that lends: ledger, pool, and a checker that keeps its own books."""

    def __init__(self, clock: Clock, num_blocks: int) -> None:
        self.clock = clock
        self._num_blocks = num_blocks
        self.life = 0
        self.restart()

    def restart(self) -> None:
        self.life += 1
        self.ledger = ledger(self.incarnation)
        self.retention = Retention(self.ledger, duration_s=RETENTION_S, max_blocks=RETENTION_BLOCKS)
        self.kept_until_s: dict[Handle, float] = {}
        self.kept_blocks: dict[Handle, tuple[int, ...]] = {}
        self.heard_at_s: dict[str, float] = {}
        self.pool = Pool(self._num_blocks)
        self.lent: dict[str, LentBlocks] = {}

    @property
    def incarnation(self) -> str:
        return f"life-{self.life}"

    def hold(self, handle: Handle, tokens: Sequence[int], duration_s: float, now_s: float, **how: bool) -> bool:
        chain = chain_of(tokens)
        is_shared = how.pop("is_shared", False)
        contents = block_contents(chain)
        block_ids = self.pool.allocate_cached(contents) if is_shared else self.pool.allocate(contents)
        if block_ids is None:
            return False
        return self.ledger.hold(handle, block_ids=block_ids, chain=chain, duration_s=duration_s, now_s=now_s, **how)

    def keep(self, handle: Handle, tokens: Sequence[int], supersedes: Handle | None, now_s: float) -> bool:
        """A request that computed ``tokens`` is over, and its full blocks are kept."""
        chain = chain_of(tokens[: len(tokens) // BLOCK_SIZE_TOKENS * BLOCK_SIZE_TOKENS])
        block_ids = self.pool.allocate_cached(block_contents(chain))
        if block_ids is None:
            return False
        before = self.ledger.handles()
        is_kept = self.retention.keep(Keep(handle, supersedes), block_ids=block_ids, chain=chain, now_s=now_s)
        after = self.ledger.handles()
        if not is_kept:
            self.pool.give_back(block_ids)
            assert set(before) - self._ended(now_s) <= set(after), "something went for what is not kept"
            return False
        assert handle in after, f"{handle} is kept and cannot be found"
        assert supersedes not in after
        is_lent = bool(self.ledger.num_leases)
        assert is_lent or self.retention.num_blocks <= RETENTION_BLOCKS, "over the budget, and nothing is lent"
        self.kept_until_s[handle] = now_s + RETENTION_S
        self.kept_blocks[handle] = block_ids
        return True

    def renew_kept(self, handle: Handle, duration_s: float, now_s: float) -> None:
        """The router's heartbeat."""
        renewed = self.retention.renew(Renew((), duration_s, (handle,)), now_s=now_s)
        is_there = handle in self.ledger.handles() and handle in self.kept_until_s
        assert (renewed.handles_remaining_s[0] > 0) == is_there
        if is_there:
            self.kept_until_s[handle] = max(self.kept_until_s[handle], now_s + min(duration_s, RETENTION_S))

    def _ended(self, now_s: float) -> set[Handle]:
        return {handle for handle, until_s in self.kept_until_s.items() if until_s <= now_s}

    def answer(self, message: Acquire | Renew | Release, now_s: float) -> Acquired | Denied | Renewed | None:
        match message:
            case Acquire():
                answer = self.ledger.acquire(message, now_s=now_s)
                if isinstance(answer, Acquired):
                    self._note_lent(message, answer, now_s)
                return answer
            case Renew():
                renewed = self.ledger.renew(message, now_s=now_s)
                for lease_id, remaining_s in zip(message.lease_ids, renewed.remaining_s, strict=True):
                    self._note_renewed(lease_id, remaining_s, now_s)
                return renewed
            case Release():
                self.ledger.release(message, now_s=now_s)
                for lease_id in message.lease_ids:
                    self.lent.pop(lease_id, None)
                return None

    def collect(self, now_s: float) -> None:
        """The engine's next hook: blocks that were let go of return to the pool, and are scribbled over."""
        self.ledger.expire(now_s)
        freed = self.ledger.take_freed()
        for block_ids in freed:
            self.pool.give_back(block_ids)
        # The ledger hands back the very tuples that it was given.
        identities = {id(block_ids) for block_ids in freed}
        self.kept_blocks = {each: ids for each, ids in self.kept_blocks.items() if id(ids) not in identities}
        for handle in self.kept_blocks:
            assert now_s <= self._pinned_until_s(handle) + 1e-6, f"{handle} stays pinned after its time"

    def _pinned_until_s(self, handle: Handle) -> float:
        """Until when blocks kept under a handle may stay pinned, whoever has leased them."""
        heard_at_s = self.heard_at_s.get(handle, -math.inf)
        return max(self.kept_until_s[handle] + FIRST_LEASE_S, heard_at_s + LAST_LEASE_S)

    def last_pin_s(self) -> float:
        """World time from which on no kept turn of now may be pinned."""
        return max((self.clock.world(self._pinned_until_s(each)) for each in self.kept_blocks), default=0.0)

    def check(self, now_s: float) -> None:
        self.ledger.expire(now_s)
        found = set(self.ledger.handles())
        assert not found & self._ended(now_s), "a handle outlives its time"
        for lease_id, lent in self.lent.items():
            if lent.ends_at_s > now_s:
                for block_id, content in lent.contents.items():
                    assert self.pool.contents[block_id] == content, f"block {block_id} went under lease {lease_id}"

    def _note_lent(self, message: Acquire, answer: Acquired, now_s: float) -> None:
        wanted = block_contents(_chain_in(message))
        contents = dict(zip(answer.block_ids, wanted, strict=False))
        for block_id, content in contents.items():
            assert self.pool.contents[block_id] == content, f"lent block {block_id} with other content"
        self.lent[answer.lease_id] = LentBlocks(now_s + answer.remaining_s, contents, message.handle)

    def _note_renewed(self, lease_id: str, remaining_s: float, now_s: float) -> None:
        lent = self.lent.get(lease_id)
        is_live = lent is not None and lent.ends_at_s > now_s
        assert (remaining_s > 0) == is_live, f"{lease_id} has {remaining_s} s left by the ledger, live is {is_live}"
        if lent is not None and is_live:
            lent.ends_at_s = max(lent.ends_at_s, now_s + remaining_s)
            self.heard_at_s[lent.handle] = now_s


def _chain_in(message: Acquire) -> TokenChain:
    return TokenChain(message.block_size_tokens, message.num_tokens, message.links, message.tail)
