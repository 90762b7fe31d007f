"""The decode engine of ``PushPair``: reserved blocks, workers that report loads once, and the reader's machines.

As in vLLM, the scheduler half reaches its workers with the next step only, a load is over when every worker has
reported it, blocks of a load that is under way are kept whatever happens to its request, and those of a failed one are
given back at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvshuttle.blocks import num_blocks_for
from kvshuttle.handoff import (
    AcquireAnswered,
    Acquired,
    Arrived,
    BlocksArrived,
    Declined,
    Denied,
    ExpectPush,
    FailPush,
    Inboxes,
    Intake,
    IntakeFact,
    LiftQuarantine,
    LoadAdmitted,
    NothingToRead,
    Notification,
    Offer,
    Outcome,
    PeerFailed,
    ProceedAnswered,
    Proceeding,
    PushFailed,
    PushOutcome,
    PushReceived,
    Quarantine,
    ReadEnded,
    RegisterAnswered,
    Registered,
    RegisterFailed,
    RenewAnswered,
    Renewed,
    RequestEnded,
    SendAcquire,
    SendProceed,
    SendRegister,
    SendRelease,
    SendRenew,
    SendWithdraw,
    SourceFailed,
    StartRead,
    Withdraw,
    WithdrawAnswered,
    Withdrawn,
)
from support.handoff_values import BLOCK_SIZE_TOKENS, block_contents, chain_of
from support.push_pool import RankedPool, right_content
from support.push_prefill import engine_card

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvshuttle.blocks import TokenChain
    from kvshuttle.handoff import IntakeAction, Peer, PushLimits
    from kvshuttle.ids import Handle
    from support.push_pair import PushPair
    from support.push_prefill import Answer, Question

GOOD = (PushOutcome.RECEIVED, Outcome.READ_OK)


@dataclass(eq=False)
class Decode:
    """One decode request and everything that was observed of it."""

    intake: Intake
    chain: TokenChain
    holder_life: int
    table: tuple[int, ...] = ()
    first_index: int = 0
    is_over: bool = False
    is_loading: bool = False
    reports: list[bool] = field(default_factory=list)
    outcomes: list[PushOutcome | Outcome] = field(default_factory=list)
    quarantined: tuple[int, ...] = ()

    @property
    def destinations(self) -> tuple[int, ...]:
        return self.table[self.first_index :]


class DecodeRank:
    """One worker: it owes each load that it was told of exactly one report."""

    def __init__(self, engine: DecodeEngine, rank: int) -> None:
        self.engine = engine
        self.rank = rank
        self.inboxes = Inboxes()
        self.owed: dict[Decode, str] = {}
        self.results: list[tuple[Decode, bool]] = []
        self.news: list[tuple[Decode, IntakeFact]] = []
        self.reads: dict[Decode, list[tuple[int, int]]] = {}

    def obey(self, request: Decode, order: IntakeAction, now_s: float) -> None:
        match order:
            case ExpectPush():
                self.owed[request] = order.registration_id
                self.on_events(self.inboxes.expect(order.registration_id, order.num_blocks, now_s=now_s))
            case FailPush() if request in self.owed and request not in self.reads:
                self.inboxes.abandon(self.owed[request])
                self.report(request, is_ok=False)
            case StartRead() if request in self.owed:
                self.inboxes.abandon(self.owed[request])
                self.reads[request] = [
                    (run.source_first + step, run.destination_first + step)
                    for run in order.plan.runs
                    for step in range(run.num_blocks)
                ]

    def on_notification(self, notification: Notification, now_s: float) -> None:
        self.on_events(self.inboxes.on_notification(notification, now_s=now_s))

    def on_events(self, events: tuple[object, ...]) -> None:
        for event in events:
            request = self._request_of(event.registration_id)
            if request is None:
                continue
            match event:
                case Arrived():
                    self.news.append((request, BlocksArrived()))
                case PushFailed():
                    self.news.append((request, SourceFailed(event.reason)))
                case PushReceived():
                    self.engine.check_content(request, self.rank)
                    self.inboxes.abandon(event.registration_id)
                    self.report(request, is_ok=True)

    def read_block(self, request: Decode) -> None:
        holder = self.engine.world.holder
        pairs = self.reads[request]
        if pairs and holder is not None and holder.life == request.holder_life:
            source, destination = pairs.pop(0)
            contents = self.engine.pool.contents[self.rank]
            contents[destination] = holder.pool.contents[self.rank][source]

    def end_read(self, request: Decode, *, is_ok: bool) -> None:
        pairs = self.reads[request]
        for _ in range(len(pairs) if is_ok else 0):
            self.read_block(request)
        del self.reads[request]
        self.report(request, is_ok=is_ok and not pairs)

    def report(self, request: Decode, *, is_ok: bool) -> None:
        del self.owed[request]
        self.results.append((request, is_ok))

    def _request_of(self, registration_id: str) -> Decode | None:
        found = [request for request, each in self.owed.items() if each == registration_id]
        return found[0] if found else None


class DecodeEngine:
    """One life of the reader. ``owner``: for each block in use, who may write to it."""

    def __init__(self, world: PushPair, life: int, *, num_blocks: int, num_ranks: int) -> None:
        self.world = world
        self.life = life
        self.card = engine_card("decode-1", f"reader-{life}", num_ranks)
        self.pool = RankedPool(num_blocks, num_ranks, self._on_free)
        self.ranks = [DecodeRank(self, rank) for rank in range(num_ranks)]
        self.requests: list[Decode] = []
        self.orders: list[tuple[Decode, IntakeAction]] = []
        self.tally: dict[Decode, list[bool]] = {}
        self.owner: dict[int, str] = {}

    # -- the engine --------------------------------------------------------------------------------

    def begin(self, handle: Handle, tokens: Sequence[int], source: Peer, limits: PushLimits) -> Decode:
        chain = chain_of(tokens)
        intake = Intake(
            handle=handle,
            source=source,
            wanted=chain,
            reader=self.card,
            registration_id=f"reg-{self.life}-{len(self.requests)}",
            limits=limits,
        )
        request = Decode(intake, chain, int(source.incarnation.removeprefix("life-")))
        self.requests.append(request)
        return request

    def admit(self, request: Decode, num_local_tokens: int, offer: Offer, now_s: float) -> bool:
        """The engine takes an offer and allocates; False when it has no room."""
        links = block_contents(request.chain)
        table = self.pool.allocate(num_blocks_for(request.chain.num_tokens, BLOCK_SIZE_TOKENS))
        if table is None:
            return False
        request.table, request.first_index = table, num_local_tokens // BLOCK_SIZE_TOKENS
        for rank, contents in enumerate(self.pool.contents):
            for index, block_id in enumerate(table[: request.first_index]):
                contents[block_id] = right_content(links[index], rank)
        for block_id in request.destinations:
            self.owner[block_id] = request.intake.registration_id
        request.is_loading = True
        self.tell(request, LoadAdmitted(num_local_tokens, offer.num_tokens or 0, table), now_s)
        return True

    def decline(self, request: Decode, offer: Offer, now_s: float) -> None:
        self.tell(request, NothingToRead(offer.reason), now_s)

    def end_request(self, request: Decode, now_s: float) -> None:
        request.is_over = True
        self.tell(request, RequestEnded(), now_s)
        self._free_if_over(request)

    def step(self, now_s: float) -> None:
        """Orders out, reports in."""
        orders, self.orders = self.orders, []
        for rank in self.ranks:
            for request, order in orders:
                rank.obey(request, order, now_s)
        for rank in self.ranks:
            rank.inboxes.expire(now_s)
            news, rank.news = rank.news, []
            for request, fact in news:
                self.tell(request, fact, now_s)
            results, rank.results = rank.results, []
            for request, is_ok in results:
                self.tally.setdefault(request, []).append(is_ok)
        for request, reports in tuple(self.tally.items()):
            assert len(reports) <= len(self.ranks), f"{request.intake} was reported {reports}"
            if len(reports) == len(self.ranks):
                del self.tally[request]
                self._load_ended(request, all(reports), now_s)

    def tick(self, now_s: float) -> None:
        for request in self.requests:
            self._do(request, request.intake.tick(now_s))

    def tell(self, request: Decode, fact: IntakeFact, now_s: float) -> None:
        self._do(request, request.intake.on(fact, now_s=now_s))

    # -- the side channel --------------------------------------------------------------------------

    def take_reply(self, request: Decode, question: Question, reply: Answer, ordinal: int, now_s: float) -> None:
        match reply:
            case Registered():
                self.tell(request, RegisterAnswered(reply), now_s)
            case Proceeding():
                self.tell(request, ProceedAnswered(reply), now_s)
            case Withdrawn():
                assert isinstance(question, Withdraw)
                self.tell(request, WithdrawAnswered(question.lease_id, reply), now_s)
            case Declined():
                if isinstance(question, Withdraw):
                    self.tell(request, WithdrawAnswered(question.lease_id, reply), now_s)
                else:
                    is_first = type(question).__name__ == "Register"
                    self.tell(request, RegisterAnswered(reply) if is_first else ProceedAnswered(reply), now_s)
            case Acquired() | Denied():
                self.tell(request, AcquireAnswered(reply), now_s)
            case Renewed():
                self.tell(request, RenewAnswered(ordinal, reply), now_s)

    def fail_side_channel(self, request: Decode, now_s: float) -> None:
        """It gives up on whatever is being waited for; the answer may still come."""
        self.tell(request, RegisterFailed("timed out"), now_s)
        self.tell(request, PeerFailed("timed out"), now_s)

    # -- what must hold ----------------------------------------------------------------------------

    def check_content(self, request: Decode, rank: int) -> None:
        links = block_contents(request.chain)
        for index, block_id in enumerate(request.table):
            found = self.pool.contents[rank][block_id]
            right = right_content(links[index], rank)
            assert found == right, f"{request.intake}: rank {rank} index {index} is {found!r}, judged good"

    def check(self) -> None:
        for request in self.requests:
            assert len(request.reports) <= 1, f"{request.intake} was reported {request.reports}"
            assert len(request.outcomes) <= 1, f"{request.intake} ended as {request.outcomes}"

    # -- the rest ----------------------------------------------------------------------------------

    def _load_ended(self, request: Decode, is_ok: bool, now_s: float) -> None:
        request.is_loading = False
        request.reports.append(is_ok)
        self.tell(request, ReadEnded(is_ok, "" if is_ok else "failed"), now_s)
        assert request.intake.outcome is not None, request.intake
        if request.intake.outcome in GOOD:
            for rank in range(len(self.ranks)):
                self.check_content(request, rank)
            for block_id in request.destinations:
                self.owner[block_id] = "loaded"
        else:
            # Failed, or called off: vLLM computes it in other blocks.
            self._give_back(request)
        self._free_if_over(request)

    def _free_if_over(self, request: Decode) -> None:
        if request.is_over and not request.is_loading:
            self._give_back(request)

    def _give_back(self, request: Decode) -> None:
        table, request.table = request.table, ()
        self.pool.give_back(table)

    def _do(self, request: Decode, actions: tuple[IntakeAction, ...]) -> None:
        for action in actions:
            match action:
                case ExpectPush() | FailPush():
                    self.orders.append((request, action))
                case StartRead():
                    self.orders.append((request, action))
                    for block_id in request.destinations:
                        self.owner[block_id] = "read"
                case SendRegister() | SendProceed() | SendWithdraw() | SendAcquire() | SendRelease():
                    self.world.ask(request, action.message)
                case SendRenew():
                    self.world.ask(request, action.message, action.ordinal)
                case Quarantine():
                    assert not request.quarantined
                    self.pool.touch(action.block_ids)
                    request.quarantined = action.block_ids
                case LiftQuarantine():
                    block_ids, request.quarantined = request.quarantined, ()
                    assert block_ids
                    self.pool.give_back(block_ids)
        outcome = request.intake.outcome
        if outcome is not None and outcome not in request.outcomes:
            request.outcomes.append(outcome)

    def _on_free(self, block_id: int) -> None:
        self.owner.pop(block_id, None)
