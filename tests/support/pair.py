"""``HandoffPair``: a ledger and fetches, a link that may lose, double, delay and reorder, and two memories.

Everything happens in one simulated world time; each engine sees it through its own clock. Content is simulated
too: a block contains the name of everything up to its end, returning a block to the pool scribbles over it at once,
and a read copies what is there *when it gets to the block*. So lending a wrong block, freeing under a lease, or
believing a late read all end in wrong content, whatever the machines think. The checks here share no code with them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvshuttle.blocks import num_blocks_for
from kvshuttle.handoff import (
    Acquire,
    AcquireAnswered,
    Acquired,
    Action,
    Denied,
    Fact,
    FailLoad,
    Fetch,
    FetchLimits,
    LoadAdmitted,
    NothingToRead,
    Offer,
    Outcome,
    PeerFailed,
    ReadEnded,
    Release,
    Renew,
    RenewAnswered,
    Renewed,
    RequestEnded,
    SendAcquire,
    SendRelease,
    SendRenew,
    StartRead,
)
from support.handoff_values import BLOCK_SIZE_TOKENS, LIMITS, block_contents, chain_of, fetch
from support.holder_engine import Clock, HolderEngine, Pool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvshuttle.blocks import TokenChain
    from kvshuttle.handoff import BlockPlan
    from kvshuttle.ids import Handle


HOLDER_CLOCK = Clock()
READER_CLOCK = Clock(offset_s=1000.0)


@dataclass
class Read:
    """Workers reading: everything is posted at the start, blocks land one by one."""

    life: int
    pairs: list[tuple[int, int]]


@dataclass(eq=False)
class Request:
    """One decode request and everything that was observed of it."""

    fetch: Fetch
    chain: TokenChain
    life: int
    table: tuple[int, ...] = ()
    read: Read | None = None
    is_over: bool = False
    num_loads_admitted: int = 0
    num_loads_ended: int = 0
    outcomes: list[Outcome] = field(default_factory=list)
    leases_seen: set[str] = field(default_factory=set)
    leases_given_back: list[str] = field(default_factory=list)

    @property
    def is_loading(self) -> bool:
        return self.num_loads_admitted > self.num_loads_ended


@dataclass(frozen=True)
class Envelope:
    """A message on its way to the holder, or (``is_reply``) back to the request that caused it."""

    request: Request
    message: Acquire | Renew | Release | Acquired | Denied | Renewed
    ordinal: int = 0
    is_reply: bool = False


class HandoffPair:
    """One holder, one reader, and what is on the link between them. Drives as the connector does."""

    def __init__(
        self,
        *,
        holder_clock: Clock = HOLDER_CLOCK,
        reader_clock: Clock = READER_CLOCK,
        limits: FetchLimits = LIMITS,
        num_blocks: int = 16,
    ) -> None:
        self.world_s = 0.0
        self.limits = limits
        self.holder = HolderEngine(holder_clock, num_blocks)
        self.reader_clock = reader_clock
        self.reader_pool = Pool(num_blocks)
        self.requests: list[Request] = []
        self.link: list[Envelope] = []

    # -- time --------------------------------------------------------------------------------------

    @property
    def holder_now_s(self) -> float:
        return self.holder.clock.at(self.world_s)

    @property
    def reader_now_s(self) -> float:
        return self.reader_clock.at(self.world_s)

    def advance(self, duration_s: float) -> None:
        self.world_s += duration_s

    def next_deadlines(self) -> list[float]:
        """World times at which some machine next has something to do, soonest first."""
        at_s = self.holder.ledger.next_deadline_at_s()
        deadlines = [] if at_s is None else [self.holder.clock.world(at_s)]
        for request in self.requests:
            at_s = request.fetch.next_deadline_at_s()
            if at_s is not None:
                deadlines.append(self.reader_clock.world(at_s))
        return sorted(deadlines)

    def lease_end_s(self, request: Request) -> float:
        """World time at which the holder's last lease for a request really ends; now when there is none."""
        lent = [self.holder.lent[lease_id] for lease_id in request.leases_seen if lease_id in self.holder.lent]
        return max((self.holder.clock.world(each.ends_at_s) for each in lent), default=self.world_s)

    def tick(self) -> None:
        for request in self.requests:
            self._do(request, request.fetch.tick(self.reader_now_s))

    # -- the holder --------------------------------------------------------------------------------

    def hold(self, handle: Handle, tokens: Sequence[int], duration_s: float = 30.0, **how: bool) -> bool:
        return self.holder.hold(handle, tokens, duration_s, self.holder_now_s, **how)

    def collect(self) -> None:
        self.holder.collect(self.holder_now_s)

    def release_by_router(self, handle: Handle) -> None:
        self.holder.answer(Release(handles=(handle,)), self.holder_now_s)

    def restart_holder(self) -> None:
        self.holder.restart()

    # -- the link ----------------------------------------------------------------------------------

    def deliver(self, index: int = 0, *, keeps_copy: bool = False) -> None:
        envelope = self.link[index] if keeps_copy else self.link.pop(index)
        if envelope.is_reply:
            self._take_reply(envelope)
            return
        reply = self.holder.answer(envelope.message, self.holder_now_s)
        if reply is not None:
            self.link.append(Envelope(envelope.request, reply, envelope.ordinal, is_reply=True))

    def deliver_newest(self, request: Request, kind: type) -> None:
        """Deliver a request's newest message of a kind, overtaking everything else; nothing when there is none."""
        indices = [
            index for index, each in enumerate(self.link) if each.request is request and isinstance(each.message, kind)
        ]
        if indices:
            self.deliver(indices[-1])

    def lose(self, index: int = 0) -> None:
        self.link.pop(index)

    def fail_peer(self, request: Request) -> None:
        """The side channel gives up on an answer, which may still come."""
        self.tell(request, PeerFailed("timed out"))

    def pump(self) -> None:
        """A lossless link: deliver everything, and everything that follows from it."""
        while self.link:
            self.deliver()

    # -- the reader --------------------------------------------------------------------------------

    def begin(self, handle: Handle, tokens: Sequence[int], *, is_read_once: bool = True) -> Request:
        made = fetch(
            tokens,
            handle=handle,
            incarnation=self.holder.incarnation,
            limits=self.limits,
            now_s=self.reader_now_s,
            is_read_once=is_read_once,
        )
        request = Request(made, chain_of(tokens), self.holder.life)
        self.requests.append(request)
        self._do(request, made.start(self.reader_now_s))
        return request

    def tell(self, request: Request, fact: Fact) -> tuple[Action, ...]:
        return self._do(request, request.fetch.on(fact, now_s=self.reader_now_s))

    def admit(self, request: Request, num_local_tokens: int, offer: Offer) -> bool:
        """The engine takes an offer and allocates; False when it has no room."""
        assert offer.num_tokens
        contents = block_contents(request.chain)
        num_local_blocks = num_local_tokens // BLOCK_SIZE_TOKENS
        num_blocks = num_blocks_for(num_local_tokens + offer.num_tokens, BLOCK_SIZE_TOKENS)
        fresh = [b"empty"] * (num_blocks - num_local_blocks)
        table = self.reader_pool.allocate([*contents[:num_local_blocks], *fresh])
        if table is None:
            return False
        request.table = table
        request.num_loads_admitted += 1
        self.tell(request, LoadAdmitted(num_local_tokens, offer.num_tokens, table))
        return True

    def decline(self, request: Request, offer: Offer) -> None:
        self.tell(request, NothingToRead(offer.reason))

    def copy_block(self, request: Request) -> None:
        """One more block of the read lands, with the content that it has now."""
        read = request.read
        assert read is not None
        if read.pairs and read.life == self.holder.life:
            source, destination = read.pairs.pop(0)
            self.reader_pool.contents[destination] = self.holder.pool.contents[source]

    def end_read(self, request: Request, *, is_ok: bool = True) -> None:
        """The workers report; a read that they call good has copied everything, however late."""
        read = request.read
        assert read is not None
        while is_ok and read.pairs and read.life == self.holder.life:
            self.copy_block(request)
        request.read = None
        request.num_loads_ended += 1
        is_good = is_ok and not read.pairs
        self.tell(request, ReadEnded(is_good, "" if is_good else "transport"))
        if request.fetch.outcome is Outcome.READ_OK:
            self._check_content(request)
        self._free_if_over(request)

    def end_request(self, request: Request) -> None:
        """The request finished or was aborted; its blocks are kept while workers may write to them."""
        request.is_over = True
        self.tell(request, RequestEnded())
        self._free_if_over(request)

    def restart_reader(self) -> None:
        """The reading process dies: its fetches, reads and memory are gone, its messages are not."""
        self.requests.clear()
        self.reader_pool = Pool(self.reader_pool.num_blocks)

    # -- the end -----------------------------------------------------------------------------------

    def check(self) -> None:
        """What must hold at any instant."""
        self.holder.check(self.holder_now_s)
        held = self.holder.ledger.num_held_blocks
        assert held >= 0
        for request in self.requests:
            assert len(request.outcomes) <= 1, f"{request.fetch} reported {request.outcomes}"
            assert request.num_loads_ended <= request.num_loads_admitted <= 1
            assert request.read is None or not request.fetch.is_drained, f"{request.fetch} forgot its read"
            given_back = request.leases_given_back
            assert len(given_back) == len(set(given_back)), f"{request.fetch} gave back {given_back}"

    def drain(self) -> None:
        """Let everything end by itself: reads fail, no message arrives, time passes. Nothing may stay."""
        for request in self.requests:
            if request.read is not None:
                self.end_read(request, is_ok=False)
        for _ in range(1000):
            deadlines = self.next_deadlines()
            if not deadlines:
                break
            self.world_s = max(self.world_s, deadlines[0] + 1e-6)
            self.tick()
            self.collect()
            self.check()
        self.collect()
        self._check_drained()
        for request in self.requests:
            if not request.is_over:
                self.end_request(request)
        self.link.clear()
        self.check()
        assert self.reader_pool.num_free == self.reader_pool.num_blocks, "the reader leaks blocks"

    def _check_drained(self) -> None:
        assert self.holder.ledger.is_drained, f"{self.holder.ledger} is not drained"
        assert self.holder.pool.num_free == self.holder.pool.num_blocks, "the holder leaks blocks"
        for request in self.requests:
            assert request.fetch.is_drained, f"{request.fetch} is not drained"
            assert len(request.outcomes) == 1, f"{request.fetch} reported {request.outcomes}"
            assert not request.is_loading, f"{request.fetch} never ended its load"
            kept = request.leases_seen - set(request.leases_given_back)
            assert not kept, f"{request.fetch} never gave back {kept}"

    def _take_reply(self, envelope: Envelope) -> None:
        request = envelope.request
        if request not in self.requests:
            return
        match envelope.message:
            case Acquired() | Denied() as answer:
                if isinstance(answer, Acquired):
                    request.leases_seen.add(answer.lease_id)
                self.tell(request, AcquireAnswered(answer))
            case Renewed() as answer:
                self.tell(request, RenewAnswered(envelope.ordinal, answer))

    def _do(self, request: Request, actions: tuple[Action, ...]) -> tuple[Action, ...]:
        for action in actions:
            match action:
                case SendAcquire():
                    self.link.append(Envelope(request, action.message))
                case SendRenew():
                    self.link.append(Envelope(request, action.message, action.ordinal))
                case SendRelease():
                    request.leases_given_back.extend(action.message.lease_ids)
                    self.link.append(Envelope(request, action.message))
                case StartRead():
                    self._check_fence(request, action.submit_within_s)
                    request.read = Read(request.life, _pairs(action.plan))
                case FailLoad():
                    request.num_loads_ended += 1
        outcome = request.fetch.outcome
        if outcome is not None and outcome not in request.outcomes:
            request.outcomes.append(outcome)
        return actions

    def _check_fence(self, request: Request, submit_within_s: float) -> None:
        """The last instant at which workers may submit is a margin before the holder lets go."""
        assert submit_within_s > 0
        if request.life == self.holder.life:
            fence_s = self.reader_now_s + submit_within_s + self.limits.submit_margin_s
            assert self.reader_clock.world(fence_s) <= self.lease_end_s(request) + 1e-6, f"{request.fetch} submits late"

    def _check_content(self, request: Request) -> None:
        for index, (block_id, content) in enumerate(zip(request.table, block_contents(request.chain), strict=False)):
            found = self.reader_pool.contents[block_id]
            assert found == content, f"{request.fetch}: block index {index} is {found!r} after a read judged good"

    def _free_if_over(self, request: Request) -> None:
        if request.is_over and request.read is None and request.table:
            self.reader_pool.give_back(request.table)
            request.table = ()


def _pairs(plan: BlockPlan) -> list[tuple[int, int]]:
    return [
        (run.source_first + step, run.destination_first + step) for run in plan.runs for step in range(run.num_blocks)
    ]
