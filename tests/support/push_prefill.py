"""The prefill engine of ``PushPair``: chunked prefill over a pool with content, and the holder's machines around it.

It behaves as the connector and vLLM do: a step first takes blocks away and tells the workers (which wait for their
writes, or give up waiting), then computes, then hands the workers its progress, which they take in when they get to it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvshuttle.blocks import num_blocks_for
from kvshuttle.handoff import (
    Acquire,
    Acquired,
    Commit,
    Declined,
    Denied,
    EngineCard,
    Notify,
    Orders,
    OrdersTaken,
    PostWrite,
    Proceed,
    Proceeding,
    Progress,
    Publisher,
    PushSource,
    PushWriter,
    Register,
    Registered,
    Release,
    Renew,
    Renewed,
    Restarted,
    Withdraw,
    Withdrawn,
    WorkerCard,
)
from support.handoff_values import BLOCK_SIZE_TOKENS, FINGERPRINT, block_contents, chain_of, lease_mint, ledger
from support.push_pool import RankedPool, right_content

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvshuttle.blocks import TokenChain
    from kvshuttle.ids import Handle
    from support.push_pair import PushPair

Question = Register | Proceed | Withdraw | Acquire | Renew | Release
Answer = Registered | Declined | Proceeding | Withdrawn | Acquired | Denied | Renewed


def engine_card(name: str, incarnation: str, num_ranks: int) -> EngineCard:
    workers = tuple(WorkerCard(rank, f"{incarnation}/{rank}", b"agent", "DRAM", 0, ()) for rank in range(num_ranks))
    return EngineCard(name, incarnation, "kv_both", 1, "0.32.0", FINGERPRINT, workers)


@dataclass(eq=False)
class Prefill:
    """One prefill request. ``num_done``: tokens computed; ``table``: its blocks."""

    handle: Handle
    chain: TokenChain
    publisher: Publisher
    table: list[int] = field(default_factory=list)
    num_done: int = 0
    is_over: bool = False

    @property
    def source_id(self) -> str:
        return self.publisher.source_id

    @property
    def is_computed(self) -> bool:
        return self.num_done == self.chain.num_tokens


@dataclass(eq=False)
class Write:
    """A posted write. ``pairs``: what has not landed yet. ``is_failed``: the transport has said so already."""

    rank: int
    post: PostWrite
    source_id: str
    pairs: list[tuple[int, int]]
    is_failed: bool = False

    @property
    def epoch(self) -> int:
        return self.post.notification.epoch


class PrefillRank:
    """One worker: its main thread hands ``facts`` over, its comm thread owns ``writer`` and ``writes``."""

    def __init__(self, engine: PrefillEngine, rank: int) -> None:
        self.engine = engine
        self.rank = rank
        self.writer = PushWriter(max_writes_per_peer=2, max_blocks_per_write=2)
        self.facts: deque[Progress | str] = deque()
        self.writes: list[Write] = []

    def take_fact(self) -> None:
        fact = self.facts.popleft()
        if isinstance(fact, str):
            self.writer.forget_source(fact)
        else:
            self.do(self.writer.on_source(fact))

    def take_orders(self, message: Orders) -> OrdersTaken:
        answer, actions = self.writer.take_orders(message)
        self.do(actions)
        return answer

    def post(self) -> bool:
        post = self.writer.next_write()
        if post is None:
            return False
        pairs = [
            (run.source_first + step, run.destination_first + step)
            for run in post.plan.runs
            for step in range(run.num_blocks)
        ]
        write = Write(self.rank, post, post.source_id, pairs)
        self.engine.world.check_post(self.engine, write)
        self.writes.append(write)
        return True

    def fail(self, write: Write) -> None:
        """The transport says that it failed; bytes of it may still land."""
        if not write.is_failed:
            write.is_failed = True
            self.do(self.writer.on_write_failed(write.post))

    def end(self, write: Write, *, is_ok: bool) -> None:
        """It touches no memory any more."""
        self.writes.remove(write)
        self.do(self.writer.on_write_ended(write.post, is_ok=is_ok))

    def do(self, actions: tuple[Notify, ...]) -> None:
        for action in actions:
            if isinstance(action.notification, Commit):
                self.engine.world.check_commit(self.rank, action)
            self.engine.world.notify(self.rank, action.worker.address, action.notification)


class PrefillEngine:
    """One life of the holder."""

    def __init__(self, world: PushPair, life: int, *, num_blocks: int, num_ranks: int) -> None:
        self.world = world
        self.life = life
        self.card = engine_card("prefill-1", f"life-{life}", num_ranks)
        self.pool = RankedPool(num_blocks, num_ranks, self._on_free)
        self.ledger = ledger(self.card.incarnation)
        self.push = PushSource(self.ledger, card=self.card, mint=lease_mint(f"{self.card.incarnation}-push"))
        self.ranks = [PrefillRank(self, rank) for rank in range(num_ranks)]
        self.requests: list[Prefill] = []
        self.restarted: dict[str, int] = {}

    # -- the engine --------------------------------------------------------------------------------

    def begin(self, handle: Handle, tokens: Sequence[int], now_s: float) -> Prefill:
        chain = chain_of(tokens)
        source_id = f"{self.life}-{len(self.requests)}"
        publisher = Publisher(source_id, num_prompt_tokens=len(tokens), block_size_tokens=BLOCK_SIZE_TOKENS)
        request = Prefill(handle, chain, publisher)
        self.requests.append(request)
        self.push.begin(source_id, handle, chain, now_s=now_s)
        self.flush(now_s)
        return request

    def step(self, request: Prefill, num_tokens: int, now_s: float, *, rolls_back: bool, waits: bool) -> bool:
        """Compute some tokens; False when there is no room. ``rolls_back``: from the first one again, in place."""
        before = 0 if rolls_back else request.num_done
        after = min(before + num_tokens, request.chain.num_tokens)
        num_blocks = num_blocks_for(after, BLOCK_SIZE_TOKENS)
        more = self.pool.allocate(max(0, num_blocks - len(request.table)))
        if more is None:
            return False
        request.table += more
        facts = request.publisher.on_step(num_before_tokens=before, num_after_tokens=after, block_ids=request.table)
        for fact in facts:
            if isinstance(fact, Restarted):
                self._restart(fact, waits=waits)
        if rolls_back:
            for block_id in request.table:
                self.pool.scribble(block_id)
        self._compute(request, before, after)
        for fact in facts:
            if isinstance(fact, Progress):
                for rank in self.ranks:
                    rank.facts.append(fact)
        self.collect(now_s)
        return True

    def preempt(self, request: Prefill, now_s: float, *, waits: bool) -> None:
        fact = request.publisher.on_preempted()
        if fact is not None:
            self._restart(fact, waits=waits)
        self.pool.give_back(request.table)
        request.table, request.num_done = [], 0
        self.collect(now_s)

    def finish(self, request: Prefill, hold_s: float, now_s: float) -> bool:
        """It has been answered, or (when its prompt is not computed) aborted. True when the KV is held."""
        ending = self.push.finish(
            request.source_id,
            tuple(request.table),
            is_computed=request.is_computed,
            duration_s=hold_s,
            now_s=now_s,
        )
        if not ending.is_taken:
            self.pool.give_back(request.table)
        request.table, request.is_over = [], True
        self.collect(now_s)
        return ending.is_held

    def collect(self, now_s: float) -> None:
        """What every hook does: let time pass, give the pool what is due to it, pass news on to the workers."""
        self.ledger.expire(now_s)
        for block_ids in self.ledger.take_freed():
            self.pool.give_back(block_ids)
        for source_id in self.push.take_sources_over():
            for rank in self.ranks:
                rank.facts.append(source_id)
        self.flush(now_s)

    def flush(self, now_s: float) -> None:
        for rank in range(len(self.ranks)):
            orders = self.push.take_orders(rank, now_s)
            if orders is not None:
                self.world.order_link.append((self.life, rank, orders))

    # -- the side channel --------------------------------------------------------------------------

    def answer(self, message: Question, now_s: float) -> Answer | None:
        answer = self._answer(message, now_s)
        self.flush(now_s)
        return answer

    def tick(self, now_s: float) -> None:
        self.push.tick(now_s)
        self.flush(now_s)

    def _answer(self, message: Question, now_s: float) -> Answer | None:
        match message:
            case Register():
                return self.push.register(message, now_s=now_s)
            case Proceed():
                return self.push.proceed(message, now_s=now_s)
            case Withdraw():
                return self.push.withdraw(message, now_s=now_s)
            case Acquire():
                return self.ledger.acquire(message, now_s=now_s)
            case Renew():
                return self.ledger.renew(message, now_s=now_s)
            case Release():
                self.ledger.release(message, now_s=now_s)
                for handle in message.handles:
                    self.push.release(handle)
                return None

    # -- the rest ----------------------------------------------------------------------------------

    def _restart(self, fact: Restarted, *, waits: bool) -> None:
        """Before the forward pass: the workers learn of it at once, and may wait until nothing reads the old blocks."""
        self.restarted[fact.source_id] = fact.epoch
        for rank in self.ranks:
            rank.do(rank.writer.on_source(fact))
            if waits:
                for write in [each for each in rank.writes if each.source_id == fact.source_id]:
                    self.world.complete(rank, write)
                assert rank.writer.is_settled(fact.source_id)

    def _compute(self, request: Prefill, before: int, after: int) -> None:
        links = block_contents(request.chain)
        first, end = before // BLOCK_SIZE_TOKENS, after // BLOCK_SIZE_TOKENS
        if after == request.chain.num_tokens:
            end = len(links)
        for index in range(first, end):
            for rank, contents in enumerate(self.pool.contents):
                contents[request.table[index]] = right_content(links[index], rank)
        request.num_done = after

    def _on_free(self, block_id: int) -> None:
        """No block is reused while a write reads it, but of an epoch that can no longer be committed."""
        for rank in self.ranks:
            for write in rank.writes:
                is_void = self.restarted.get(write.source_id, 0) > write.epoch
                is_read = any(source == block_id for source, _ in write.pairs)
                assert is_void or not is_read, f"block {block_id} was reused under {write}"
