"""The conversation table under clients that continue, branch, edit, abort and forget, against a plain model of it."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from kvshuttle.policy import (
    Claim,
    ConversationTable,
    Found,
    Kept,
    KeptTurn,
    Scope,
    Trail,
    chat_trail,
    name_of,
    text_trail,
)

MAX_TURNS = 5
TTL_S = 10.0
CALLERS = (b"alice", b"bob")
NAMES = ("", name_of("shared"))

scopes = st.builds(Scope, st.sampled_from(CALLERS), st.sampled_from(["m", "n"]), st.sampled_from(NAMES))
words = st.sampled_from("ab")
histories = st.lists(words, min_size=1, max_size=6).map("".join)
places = st.tuples(st.sampled_from(["d0", "d1"]), st.sampled_from(["life-1", "life-2"]))
kinds = st.sampled_from(["chat", "text", "none"])


def trail_of(scope: Scope, kind: str, prompt: str) -> Trail | None:
    if kind == "chat":
        return chat_trail(scope, [{"role": "user", "content": word} for word in prompt])
    # Cut between marks, so that prompts share one that are not beginnings of each other.
    return text_trail(scope, "".join(word * 48 for word in "a" + prompt)) if kind == "text" else None


class Requests(RuleBasedStateMachine):
    """``everything``: what was ever entered, with its scope and its prompt."""

    claims = Bundle("claims")

    def __init__(self) -> None:
        super().__init__()
        self.table = ConversationTable(max_turns=MAX_TURNS, ttl_s=TTL_S)
        self.now_s = 0.0
        self.everything: dict[str, tuple[Scope, str, str]] = {}
        self.prompts: dict[Claim, tuple[str, str]] = {}
        self.open: set[Claim] = set()
        self.released: Counter[str] = Counter()

    # --- what happens ---

    @rule(target=claims, scope=scopes, prompt=histories, kind=kinds)
    def arrive(self, scope: Scope, prompt: str, kind: str) -> Claim:
        if kind == "none" and not scope.name:
            kind = "chat"
        trail = trail_of(scope, kind, prompt)
        claim = self.table.claim(scope, trail, fresh_name=f"conv-{len(self.prompts)}", now_s=self.now_s)
        self.prompts[claim] = (kind, prompt)
        self.open.add(claim)
        self._check_claim(claim, scope, kind, prompt)
        return claim

    @precondition(lambda self: self.everything)
    @rule(target=claims, data=st.data(), num_kept=st.integers(1, 9), more=st.text("ab", max_size=2))
    def continue_or_branch(self, data: st.DataObject, num_kept: int, more: str) -> Claim:
        scope, kind, prompt = self.everything[data.draw(st.sampled_from(sorted(self.everything)))]
        return self.arrive(scope, prompt[:num_kept] + more, kind)

    @precondition(lambda self: self.everything)
    @rule(target=claims, data=st.data(), scope=scopes)
    def repeat_what_somebody_said(self, data: st.DataObject, scope: Scope) -> Claim:
        _, kind, prompt = self.everything[data.draw(st.sampled_from(sorted(self.everything)))]
        return self.arrive(scope, prompt + "a", kind)

    @rule(claim=consumes(claims), place=places)
    def answer(self, claim: Claim, place: tuple[str, str]) -> None:
        kept = Kept(f"turn-{len(self.everything)}", *place, 1)
        self.everything[kept.handle] = (claim.scope, *self.prompts[claim])
        superseded = claim.superseded
        was_there = superseded is not None and superseded.handle in self.handles()
        is_forgotten = claim.is_forgotten
        releases = self.table.settle(claim, kept, now_s=self.now_s)
        self.open.discard(claim)
        self.released.update(each.handle for each in releases)
        if is_forgotten:
            assert releases == [kept]
            return
        assert kept.handle in self.handles()
        again = self.table._find(claim.scope, claim.trail)
        assert again is not None
        assert again.kept == kept
        if superseded is not None and was_there:
            assert superseded.handle not in self.handles()
            is_told = any(each.handle == superseded.handle for each in releases)
            assert is_told != superseded.is_beside(kept)

    @rule(claim=consumes(claims), times=st.integers(1, 2))
    def abort(self, claim: Claim, times: int) -> None:
        before = self.handles()
        for _ in range(times):
            self.table.put_back(claim)
        self.open.discard(claim)
        assert self.handles() == before
        if claim.history is not None:
            assert claim.history.claimed_by is not claim

    @rule(claim=consumes(claims), place=places)
    def abort_and_find_that_it_was_kept(self, claim: Claim, place: tuple[str, str]) -> None:
        self.table.put_back(claim)
        if self.table.is_overtaken(claim):
            self.open.discard(claim)
        else:
            self.answer(claim, place)

    @rule(duration_s=st.sampled_from([0.5, 3.0, 11.0]))
    def wait(self, duration_s: float) -> None:
        self.now_s += duration_s

    @rule()
    def expire(self) -> None:
        self.table.expire(self.now_s)
        assert len(self.table) <= len(self.everything)

    @rule(caller=st.sampled_from(CALLERS))
    def forget(self, caller: bytes) -> None:
        others = {turn.kept.handle for turn in self.turns() if (turn.scope.caller, turn.name) != (caller, NAMES[1])}
        dropped = self.table.forget(caller, NAMES[1])
        self.released.update(kept.handle for kept in dropped)
        assert self.handles() == others
        assert self.table.turns_of(caller, NAMES[1], now_s=self.now_s) == []

    @precondition(lambda self: len(self.table))
    @rule(data=st.data(), remaining_s=st.sampled_from([-1.0, 5.0, 20.0]))
    def renew(self, data: st.DataObject, remaining_s: float) -> None:
        handle = data.draw(st.sampled_from(sorted(self.handles())))
        self.table.renewed(handle, remaining_s, now_s=self.now_s)
        assert (handle in self.handles()) is (remaining_s >= 0)

    # --- what must hold ---

    def _check_claim(self, claim: Claim, scope: Scope, kind: str, prompt: str) -> None:
        turn = claim.history
        if turn is None:
            assert claim.found in (Found.NEW, Found.EXPIRED)
            assert claim.superseded is None
            return
        assert turn.kept.handle in self.handles()
        assert turn.ends_at_s > self.now_s
        entered_scope, entered_kind, entered_prompt = self.everything[turn.kept.handle]
        assert entered_scope == scope
        if claim.is_superseding:
            assert claim.found is Found.CONTINUED
            assert kind == entered_kind
            assert prompt.startswith(entered_prompt)
            others = [each for each in self.open if each is not claim and each.superseded == turn.kept]
            assert not [each for each in others if each.is_open]

    @invariant()
    def the_table_is_bounded(self) -> None:
        assert len(self.table) <= MAX_TURNS

    @invariant()
    def every_way_to_a_turn_leads_to_it_and_back(self) -> None:
        turns = self.turns()
        assert len({turn.kept.handle for turn in turns}) == len(turns) == len(self.table)
        by_key = self.table._by_key
        assert sorted(by_key) == sorted(key for turn in turns for key in turn.keys)
        for turn in turns:
            assert turn.keys
            assert all(by_key[key] is turn for key in turn.keys)
            assert len(set(turn.keys)) == len(turn.keys) <= 32
        named = [turn for turns_of in self.table._by_name.values() for turn in turns_of]
        assert len(named) == len(turns)

    @invariant()
    def nobody_leaves_twice_or_without_a_reason(self) -> None:
        assert sum(self.table.drops.values()) + len(self.table) == self.table.num_entered
        assert max(self.released.values(), default=0) <= 1
        assert not self.handles() & set(self.released)

    @invariant()
    def only_open_claims_hold_turns(self) -> None:
        assert {claim for claims in self.table._claims.values() for claim in claims} == {
            claim for claim in self.open if claim.is_open
        }
        for turn in self.turns():
            assert turn.claimed_by is None or turn.claimed_by.is_open

    def turns(self) -> list[KeptTurn]:
        return list(self.table._turns.values())

    def handles(self) -> set[str]:
        return {turn.kept.handle for turn in self.turns()}


TestRequests = Requests.TestCase
TestRequests.settings = settings(stateful_step_count=40)
