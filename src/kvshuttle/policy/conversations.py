"""The conversation table: which engine keeps the KV of which turn, found by how a prompt begins.

A *turn* is entered when its answer is complete, and replaced by the one that continues it. A request *claims* what it
continues: everybody may read a claimed turn, only the first claimant may supersede it, and it stays in the table until
that one has its own answer. So a turn that is aborted loses nothing.

What supersedes what:

- a prompt that begins with all of a turn's prompt, or repeats it, *continues* it and supersedes it. The new turn is
  found wherever the old one was, since its KV begins with the same;
- one that begins like an earlier turn (edited, regenerated from further back, a second branch) reads what is there and
  becomes a turn of its own, beside it;
- one that has only the conversation's name in common reads the latest turn under it, as a guess.

Invariants:

1. Nothing is found across callers, models or names.
2. There are never more than ``max_turns`` turns, and none is found after its time.
3. Whoever leaves the table leaves it once and with a reason, and what its engine must still be told of is returned.

Pure: the event loop owns it and passes the time. It knows engines by name and incarnation only.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvshuttle.policy.conversation_key import Scope, Tip, Trail

_MAX_KEYS = 32
"""Earlier turns of a conversation at which a branch is still recognised."""


class Found(StrEnum):
    """What the table knows of a request's history."""

    CONTINUED = "continued"
    """The prompt begins with all of a turn's, or repeats it."""
    BRANCHED = "branched"
    """It begins like an earlier turn of a conversation."""
    NAMED = "named"
    """Only the conversation's name is known, the prompt begins in another way."""
    EXPIRED = "expired"
    """There was one, too long ago."""
    NEW = "new"
    """Nothing that this caller, model or name has left begins like it."""


class DropReason(StrEnum):
    """Why a turn left the table. Also the metric label."""

    SUPERSEDED = "superseded"
    """The next turn is kept in its place."""
    EXPIRED = "expired"
    TABLE_FULL = "table_full"
    """``max_conversations``: the one used longest ago goes."""
    UNREACHABLE = "unreachable"
    """Another turn has taken every name that it was found by."""
    FORGOTTEN = "forgotten"
    """Somebody deleted the conversation."""
    OTHER_INCARNATION = "other_incarnation"
    """Its engine was restarted."""
    GONE = "gone"
    """Its engine says that it keeps it no more."""


@dataclass(frozen=True, slots=True)
class Kept:
    """KV of a turn, kept by one life of an engine under ``handle``. ``num_tokens``: estimated, of its prompt."""

    handle: str
    engine: str
    incarnation: str
    num_tokens: int

    def is_beside(self, other: Kept) -> bool:
        """Whether the same life of the same engine keeps both."""
        return (self.engine, self.incarnation) == (other.engine, other.incarnation)


@dataclass(slots=True, eq=False)
class KeptTurn:
    """An entry. ``name``: of its conversation. ``keys``: by which it is found, its own last."""

    scope: Scope
    name: str
    kept: Kept
    tip: Tip | None
    keys: list[bytes]
    kept_at_s: float
    used_at_s: float
    ends_at_s: float
    claimed_by: Claim | None = field(default=None, repr=False)


@dataclass(slots=True, eq=False)
class Claim:
    """One request's hold on its conversation, from its arrival to ``settle`` or ``put_back``.

    ``parent``: the turn that was found; ``history``: the same, while its KV may be read. ``is_continuing``: the prompt
    begins with all of the parent's. ``is_superseding``: and nobody else was about to continue it.
    """

    scope: Scope
    trail: Trail | None
    name: str
    found: Found
    parent: KeptTurn | None
    history: KeptTurn | None
    is_continuing: bool
    is_superseding: bool = False
    is_open: bool = True
    is_forgotten: bool = False

    @property
    def superseded(self) -> Kept | None:
        """What this turn replaces when it has its answer."""
        return self.parent.kept if self.is_superseding and self.parent is not None else None

    @property
    def num_new_bytes(self) -> int | None:
        """Of the prompt, behind the turn that it continues and its answer; None when it continues none."""
        if not self.is_continuing or self.trail is None or self.parent is None or self.parent.tip is None:
            return None
        return self.trail.num_new_bytes(self.parent.tip)

    @property
    def own_key(self) -> bytes:
        """By which the turn will be found."""
        return self.trail.marks[-1] if self.trail is not None else self.scope.seed


class ConversationTable:
    """``ttl_s``: how long after its answer a turn may be found, unless it is renewed."""

    def __init__(self, *, max_turns: int, ttl_s: float) -> None:
        self.drops: Counter[DropReason] = Counter()
        self.num_entered = 0
        self._max_turns = max_turns
        self._ttl_s = ttl_s
        self._turns: OrderedDict[str, KeptTurn] = OrderedDict()
        """By handle, those used longest ago first."""
        self._by_key: dict[bytes, KeptTurn] = {}
        self._by_name: dict[tuple[bytes, str], dict[KeptTurn, None]] = {}
        self._claims: dict[tuple[bytes, str], set[Claim]] = {}

    def __len__(self) -> int:
        return len(self._turns)

    def __repr__(self) -> str:
        return f"<ConversationTable turns={len(self._turns)} claims={sum(map(len, self._claims.values()))}>"

    # --- one request ---

    def claim(self, scope: Scope, trail: Trail | None, *, fresh_name: str, now_s: float) -> Claim:
        """A request arrived. ``fresh_name``: for its conversation, if it is new and has none from its client.

        Every claim must be ended by ``settle`` or ``put_back``.
        """
        parent = self._find(scope, trail)
        found = _kinship(parent, trail) if parent is not None else Found.NEW
        is_continuing = found is Found.CONTINUED
        history = parent
        if parent is not None and parent.ends_at_s <= now_s:
            self._drop(parent, DropReason.EXPIRED)
            found, history = Found.EXPIRED, None
        self.expire(now_s)
        name = scope.name or (parent.name if parent is not None and is_continuing else fresh_name)
        claim = Claim(scope, trail, name, found, parent, history, is_continuing)
        if history is not None:
            history.used_at_s = now_s
            self._turns.move_to_end(history.kept.handle)
            if is_continuing and history.claimed_by is None:
                history.claimed_by = claim
                claim.is_superseding = True
        self._claims.setdefault((scope.caller, name), set()).add(claim)
        return claim

    def settle(self, claim: Claim, kept: Kept, *, now_s: float) -> list[Kept]:
        """The request has its answer, and ``kept`` is what it left. Returns what engines must be told to release.

        What it supersedes at the same engine is not among that: the engine was told by the request itself.
        """
        self.put_back(claim)
        if claim.is_forgotten:
            return [kept]
        releases = []
        inherited = self._heirlooms(claim)
        parent = claim.parent
        if claim.is_superseding and parent is not None and self._drop(parent, DropReason.SUPERSEDED):
            releases += [] if parent.kept.is_beside(kept) else [parent.kept]
        keys = [*(key for key in inherited if key != claim.own_key), claim.own_key][-_MAX_KEYS:]
        releases += self._take_keys(keys)
        tip = claim.trail.tip if claim.trail is not None else None
        turn = KeptTurn(claim.scope, claim.name, kept, tip, keys, now_s, now_s, now_s + self._ttl_s)
        self._enter(turn)
        self.expire(now_s)
        while len(self._turns) > self._max_turns:
            oldest = next(iter(self._turns.values()))
            self._drop(oldest, DropReason.TABLE_FULL)
            releases.append(oldest.kept)
        return releases

    def put_back(self, claim: Claim) -> None:
        """The request ended without leaving anything: what it claimed is as before. Idempotent."""
        if not claim.is_open:
            return
        claim.is_open = False
        if claim.parent is not None and claim.parent.claimed_by is claim:
            claim.parent.claimed_by = None
        claims = self._claims[claim.scope.caller, claim.name]
        claims.discard(claim)
        if not claims:
            del self._claims[claim.scope.caller, claim.name]

    def is_overtaken(self, claim: Claim) -> bool:
        """Whether another request has left a turn meanwhile where this one would be found."""
        return self._by_key.get(claim.own_key) not in (None, claim.parent)

    # --- single turns ---

    def drop(self, turn: KeptTurn, why: DropReason) -> None:
        """A turn is of no use any more; nothing happens when it has left already."""
        self._drop(turn, why)

    def renewed(self, handle: str, remaining_s: float, *, now_s: float) -> None:
        """Its engine says how long it keeps a turn from now; a negative number says that it is gone."""
        turn = self._turns.get(handle)
        if turn is None:
            return
        if remaining_s < 0:
            self._drop(turn, DropReason.GONE)
        else:
            turn.ends_at_s = now_s + remaining_s

    def in_use_since(self, at_s: float) -> dict[tuple[str, str], list[str]]:
        """Handles of turns used at or after ``at_s``, by engine and incarnation."""
        handles: dict[tuple[str, str], list[str]] = {}
        for turn in self._turns.values():
            if turn.used_at_s >= at_s:
                handles.setdefault((turn.kept.engine, turn.kept.incarnation), []).append(turn.kept.handle)
        return handles

    def expire(self, now_s: float) -> None:
        """Let go of turns whose time is over. One that was used later than it was kept may stay until it is met."""
        while self._turns and (oldest := next(iter(self._turns.values()))).ends_at_s <= now_s:
            self._drop(oldest, DropReason.EXPIRED)

    # --- whole conversations ---

    def turns_of(self, caller: bytes, name: str, *, now_s: float) -> list[KeptTurn]:
        """What is kept of a caller's conversation, the latest last; empty when there is no such one of this caller."""
        return [turn for turn in self._by_name.get((caller, name), ()) if turn.ends_at_s > now_s]

    def num_running(self, caller: bytes, name: str) -> int:
        """Requests of it that are under way."""
        return len(self._claims.get((caller, name), ()))

    def forget(self, caller: bytes, name: str) -> list[Kept]:
        """Drop all of a conversation, and what requests under way will leave of it. Returns what to release now."""
        for claim in self._claims.get((caller, name), ()):
            claim.is_forgotten = True
        turns = list(self._by_name.get((caller, name), ()))
        for turn in turns:
            self._drop(turn, DropReason.FORGOTTEN)
        return [turn.kept for turn in turns]

    # --- private ---

    def _find(self, scope: Scope, trail: Trail | None) -> KeptTurn | None:
        marks = reversed(trail.marks) if trail is not None else iter((scope.seed,))
        for mark in marks:
            turn = self._by_key.get(mark)
            if turn is not None and turn.scope == scope:
                return turn
        if scope.name:
            for turn in reversed(self._by_name.get((scope.caller, scope.name), {})):
                if turn.scope == scope:
                    return turn
        return None

    def _heirlooms(self, claim: Claim) -> list[bytes]:
        """Keys of the parent that a turn in its place is found by: those that are still its own, or nobody's."""
        parent = claim.parent
        is_trunk_left = parent is not None and parent.kept.handle in self._turns and not claim.is_superseding
        if parent is None or not claim.is_continuing or is_trunk_left:
            return []
        return [key for key in parent.keys if self._by_key.get(key) in (None, parent)]

    def _take_keys(self, keys: list[bytes]) -> list[Kept]:
        """Make ``keys`` free; returns what nothing leads to any more."""
        unreachable = []
        for key in keys:
            owner = self._by_key.pop(key, None)
            if owner is None:
                continue
            owner.keys.remove(key)
            if not owner.keys:
                self._drop(owner, DropReason.UNREACHABLE)
                unreachable.append(owner.kept)
        return unreachable

    def _enter(self, turn: KeptTurn) -> None:
        self.num_entered += 1
        self._turns[turn.kept.handle] = turn
        self._by_key.update(dict.fromkeys(turn.keys, turn))
        self._by_name.setdefault((turn.scope.caller, turn.name), {})[turn] = None

    def _drop(self, turn: KeptTurn, why: DropReason) -> bool:
        """False when it has left before."""
        if self._turns.get(turn.kept.handle) is not turn:
            return False
        del self._turns[turn.kept.handle]
        for key in turn.keys:
            del self._by_key[key]
        siblings = self._by_name[turn.scope.caller, turn.name]
        del siblings[turn]
        if not siblings:
            del self._by_name[turn.scope.caller, turn.name]
        self.drops[why] += 1
        return True


def _kinship(parent: KeptTurn, trail: Trail | None) -> Found:
    if trail is None or parent.tip is None:
        return Found.NAMED
    if trail.extends(parent.tip):
        return Found.CONTINUED
    return Found.BRANCHED if not set(parent.keys).isdisjoint(trail.marks) else Found.NAMED
