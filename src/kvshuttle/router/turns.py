"""One request's part in its conversation: what its legs say of history, and how that ends.

::

    claim ── legs carry history and keep ──┬─ whole answer ──── settle: the handle is the conversation's latest turn
                                           ├─ cut off ───────── put back; ask the engine what it has kept after all
                                           └─ no answer ─────── put back; release the handle
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from kvshuttle.handoff.cards import Feature
from kvshuttle.handoff.params import History, Keep
from kvshuttle.ids import mint
from kvshuttle.policy import DropReason, Following, Found, Kept, follow_history
from kvshuttle.router.openai import BYTES_PER_TOKEN
from kvshuttle.router.registry import peer_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvshuttle.policy import Claim
    from kvshuttle.router.conversations import Conversations
    from kvshuttle.router.registry import Engine


class HistoryResult(StrEnum):
    """What became of a request's history. Also the metric label. All after ``named`` mean that none was sent."""

    CONTINUED = "continued"
    BRANCHED = "branched"
    NAMED = "named"
    NEW = "new"
    EXPIRED = "expired"
    OTHER_INCARNATION = "other_incarnation"
    """The engine that kept it was restarted."""
    ENGINE_DOWN = "engine_down"
    """That engine is down, or silent on its side channel."""
    CANNOT_READ = "cannot_read"
    """That engine and the one that computes the prompt cannot exchange KV."""
    DISTRUSTED = "distrusted"
    """An attempt with it failed, so another one went without."""
    UNNAMEABLE = "unnameable"
    """The request has no history that could be recognised: several prompts, embeddings, a very short text …"""
    OFF = "off"
    """``is_reusing_history`` is off."""


class Turn:
    """One request's part in its conversation. Without a ``claim`` nothing is said to engines.

    ``num_tokens``: estimated prompt length. ``without``: why there is no claim.
    """

    def __init__(
        self,
        conversations: Conversations,
        claim: Claim | None,
        num_tokens: int,
        *,
        without: HistoryResult = HistoryResult.UNNAMEABLE,
    ) -> None:
        self._without = without
        self._conversations = conversations
        self._claim = claim
        self._num_tokens = num_tokens
        self._asked: Kept | None = None
        self._problem: HistoryResult | None = None
        self._was_sent = False
        self._is_distrusted = False
        self._is_over = False

    @property
    def result(self) -> HistoryResult:
        """What became of the history, by now."""
        if self._claim is None:
            return self._without
        return self._problem or HistoryResult(self._claim.found)

    @property
    def name(self) -> str:
        """Of the conversation; "" for none."""
        return self._claim.name if self._claim is not None else ""

    @property
    def holder(self) -> Engine | None:
        """The engine that keeps the history, if it is worth going to: not for a conversation known by name only."""
        is_recognised = self._claim is not None and self._claim.found in (Found.CONTINUED, Found.BRANCHED)
        return self._holder() if is_recognised else None

    @property
    def num_new_tokens(self) -> int | None:
        """Estimated, behind the turn that this one continues; None when it continues none."""
        num_bytes = self._claim.num_new_bytes if self._claim is not None else None
        return None if num_bytes is None else num_bytes // BYTES_PER_TOKEN

    def following(self, *, model: str, source: str | None, avoid: Collection[str]) -> tuple[Engine, Following] | None:
        """Whether to decode where the history is kept; None when that is nowhere."""
        holder = self.holder
        if holder is None:
            return None
        views = self._conversations.registry.decode_views()
        num_tokens = self._num_tokens
        return holder, follow_history(
            holder.name, views, model=model, source=source, avoid=avoid, num_tokens=num_tokens
        )

    def history_for(self, reader: Engine) -> History | None:
        """What the leg to ``reader``, which computes the prompt, says of history."""
        holder = self._holder()
        if self._claim is None or self._claim.history is None or holder is None or holder is reader:
            return None
        self._problem = None if _can_exchange(reader, holder) else HistoryResult.CANNOT_READ
        if self._problem is not None:
            return None
        self._was_sent = True
        return History(self._claim.history.kept.handle, peer_of(holder))

    def keep_at(self, engine: Engine) -> Keep | None:
        """What the leg to ``engine``, which decodes, says of keeping. Each dispatch has a handle of its own."""
        self._abandon()
        claim = self._claim
        if claim is None or engine.card is None or not _speaks_of_turns(engine):
            return None
        kept = self._asked = Kept(mint("turn"), engine.name, engine.card.incarnation, self._num_tokens)
        superseded = claim.superseded
        is_here = superseded is not None and superseded.is_beside(kept)
        return Keep(kept.handle, superseded.handle if superseded is not None and is_here else None)

    def distrust(self) -> None:
        """The leg that was sent a history failed. Further attempts go without, or it might fail them all."""
        if self._was_sent:
            self._is_distrusted = True
            self._problem = HistoryResult.DISTRUSTED

    def answered(self) -> None:
        """The whole answer is here, before the client has its end. Idempotent."""
        if self._is_over:
            return
        self._is_over = True
        if self._claim is not None and self._asked is not None:
            self._conversations.settle(self._claim, self._asked)

    def close(self, *, is_cut_off: bool) -> None:
        """The request is over, idempotent. ``is_cut_off``: before the end of its answer, which may be kept yet."""
        if self._is_over or self._claim is None:
            return
        self._is_over = True
        self._conversations.table.put_back(self._claim)
        if is_cut_off and self._asked is not None:
            self._conversations.find_out(self._claim, self._asked)
        else:
            self._abandon()

    def _abandon(self) -> None:
        """Nobody will ask for what the last dispatch was told to keep."""
        asked, self._asked = self._asked, None
        if asked is not None:
            self._conversations.release(asked, is_again=True)

    def _holder(self) -> Engine | None:
        """The engine that keeps the history, as far as it is known to live."""
        claim = self._claim
        if claim is None or claim.history is None or self._is_distrusted:
            return None
        kept = claim.history.kept
        engine = self._conversations.registry.engines[kept.engine]
        if engine.card is None or not engine.is_up:
            self._problem = HistoryResult.ENGINE_DOWN
            return None
        if engine.card.incarnation != kept.incarnation:
            self._conversations.table.drop(claim.history, DropReason.OTHER_INCARNATION)
            claim.history = None
            self._problem = HistoryResult.OTHER_INCARNATION
            return None
        if self._problem is HistoryResult.ENGINE_DOWN:
            self._problem = None
        return engine


def _speaks_of_turns(engine: Engine) -> bool:
    """An engine that does not would refuse the whole leg."""
    return engine.card is not None and Feature.TURNS in engine.card.features


def _can_exchange(reader: Engine, holder: Engine) -> bool:
    if reader.card is None or holder.card is None or not _speaks_of_turns(reader):
        return False
    return reader.card.fingerprint == holder.card.fingerprint
