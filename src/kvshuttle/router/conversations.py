"""What the router says about history: where the last turn's KV is kept, and under which handle this one's shall be.

One ``Conversations`` for the router, one ``Turn`` for each request. Nothing is read from answers: the router names the
handle beforehand, in the decode leg, and the engine keeps what it has under it when the answer is complete.

::

    claim ── legs carry history and keep ──┬─ whole answer ──── settle: the handle is the conversation's latest turn
                                           ├─ cut off ───────── put back; ask the engine what it has kept after all
                                           └─ no answer ─────── put back; release the handle
"""

from __future__ import annotations

import asyncio
from enum import StrEnum
from typing import TYPE_CHECKING

from kvshuttle.handoff.params import History, Keep
from kvshuttle.ids import mint
from kvshuttle.policy import (
    DropReason,
    Following,
    Found,
    Kept,
    Scope,
    caller_of,
    chat_trail,
    follow_history,
    name_of,
    text_trail,
)
from kvshuttle.router.openai import BYTES_PER_TOKEN, Endpoint
from kvshuttle.router.registry import peer_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine
    from typing import Any

    from kvshuttle.config import RouterConfig
    from kvshuttle.policy import Claim, ConversationTable, EngineView, Trail
    from kvshuttle.router.http_text import Headers
    from kvshuttle.router.openai import InferenceRequest
    from kvshuttle.router.prober import Prober
    from kvshuttle.router.registry import Engine, Registry

NAME_HEADERS = (b"x-conversation-id", b"x-session-id")
"""By which clients name their conversation; the first one given counts, and either before the body's fields."""
_CREDENTIAL_HEADERS = (b"authorization", b"x-api-key", b"api-key")

_SINCE_PROTOCOL = 1
"""Engines that speak an older version know nothing of turns."""
_ASK_AFTER_S = (1.0, 4.0)
"""After a turn was cut off: its engine takes a step or two to end the request."""
_LOOK_S = 0.001
"""Renewing by nothing asks how long something is kept."""
_RENEWALS_PER_TTL = 4
_MAX_HANDLES_PER_MESSAGE = 500


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
        view = self._conversations.view_of(holder)
        return holder, follow_history(view, model=model, source=source, avoid=avoid, num_tokens=self._num_tokens)

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


class Conversations:
    """The table, and what engines must be told of it."""

    def __init__(
        self,
        config: RouterConfig,
        registry: Registry,
        prober: Prober,
        table: ConversationTable,
        now_s: Callable[[], float],
    ) -> None:
        self.registry = registry
        self.table = table
        self._config = config
        self._prober = prober
        self._now_s = now_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._cut_off: set[Claim] = set()

    def start(self) -> None:
        """Begin renewing, if that is wanted."""
        if self._config.is_history_renewed:
            self._spawn(self._renew_forever())

    async def stop(self) -> None:
        """End what is under way. Engines keep what they have until its time is over."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def open(self, headers: Headers, request: InferenceRequest) -> Turn:
        """A request arrived: find its history. ``Turn.close`` must be called in every case."""
        traits = request.traits
        if not self._config.is_reusing_history:
            return Turn(self, None, traits.num_tokens, without=HistoryResult.OFF)
        is_one_of_many = traits.num_prompts != 1 or traits.is_beam_search
        is_odd = traits.has_prompt_embeds or traits.is_without_output or traits.wants_prompt_logprobs
        if is_one_of_many or is_odd:
            return Turn(self, None, traits.num_tokens)
        given = _named_by(headers) or request.conversation
        scope = Scope(caller_from(headers), request.model, name_of(given) if given else "")
        trail = _trail(scope, request)
        if trail is None and not scope.name:
            return Turn(self, None, traits.num_tokens)
        claim = self.table.claim(scope, trail, fresh_name=mint("conv"), now_s=self._now_s())
        return Turn(self, claim, traits.num_tokens)

    def view_of(self, engine: Engine) -> EngineView:
        """A frozen snapshot for placement."""
        return engine.view(self._now_s())

    def settle(self, claim: Claim, kept: Kept) -> None:
        """A turn has its answer; what it makes useless is released."""
        for useless in self.table.settle(claim, kept, now_s=self._now_s()):
            self.release(useless)

    def release(self, kept: Kept, *, is_again: bool = False) -> None:
        """Nobody will ask for this. ``is_again``: its request may end after the word arrives, so say it once more."""
        self._prober.release(self.registry.engines[kept.engine], kept.handle, is_again=is_again)

    def find_out(self, claim: Claim, asked: Kept) -> None:
        """A turn was cut off: its engine may have kept it nevertheless, and let go of the one before."""
        self._cut_off.add(claim)
        self._spawn(self._find_out(claim, asked))

    # --- for clients and operators ---

    def describe(self, caller: bytes, given: str) -> dict[str, object] | None:
        """What is known of a caller's conversation, by its client's name for it or ours; None for nothing."""
        name, now_s = self._name(caller, given), self._now_s()
        turns = self.table.turns_of(caller, name, now_s=now_s)
        num_running = self.table.num_running(caller, name)
        if not turns and not num_running:
            return None
        return {
            "id": given,
            "object": "kvshuttle.conversation",
            "name": name,
            "num_running": num_running,
            "turns": [
                {
                    "model": turn.scope.model,
                    "engine": turn.kept.engine,
                    "num_prompt_tokens_estimated": turn.kept.num_tokens,
                    "age_s": round(now_s - turn.kept_at_s, 3),
                    "remaining_s": round(turn.ends_at_s - now_s, 3),
                }
                for turn in turns
            ],
        }

    def forget(self, caller: bytes, given: str) -> dict[str, object] | None:
        """Release all of a caller's conversation; None when there is no such one."""
        if self.describe(caller, given) is None:
            return None
        name = self._name(caller, given)
        for claim in self._cut_off:
            claim.is_forgotten |= (claim.scope.caller, claim.name) == (caller, name)
        released = self.table.forget(caller, name)
        for kept in released:
            self.release(kept)
        return {
            "id": given,
            "object": "kvshuttle.conversation.deleted",
            "deleted": True,
            "num_released": len(released),
        }

    # --- private ---

    def _name(self, caller: bytes, given: str) -> str:
        """A client's own word for its conversation may look like one of ours, and goes first."""
        name = name_of(given)
        is_known = self.table.turns_of(caller, name, now_s=self._now_s()) or self.table.num_running(caller, name)
        return name if is_known else given

    async def _find_out(self, claim: Claim, asked: Kept) -> None:
        try:
            for pause_s in _ASK_AFTER_S:
                await asyncio.sleep(pause_s)
                if await self._has_kept(claim, asked):
                    return
            self.release(asked)
        finally:
            self._cut_off.discard(claim)

    async def _has_kept(self, claim: Claim, asked: Kept) -> bool:
        """Ask the engine of a turn that was cut off; True when it was kept, and is in the table."""
        superseded = claim.superseded
        handles = [asked.handle]
        if superseded is not None and superseded.is_beside(asked):
            handles.append(superseded.handle)
        remaining_s = await self._prober.renew(self.registry.engines[asked.engine], handles, _LOOK_S)
        for handle, left_s in zip(handles[1:], remaining_s[1:], strict=False):
            self._note_remaining(handle, left_s)
        if not remaining_s or remaining_s[0] < 0 or self.table.is_overtaken(claim):
            return False
        self.settle(claim, asked)
        self._note_remaining(asked.handle, remaining_s[0])
        return True

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(self._config.history_ttl_s / _RENEWALS_PER_TTL)
            in_use = self.table.in_use_since(self._now_s() - self._config.history_renewed_for_s)
            for (name, incarnation), handles in in_use.items():
                engine = self.registry.engines[name]
                if engine.card is not None and engine.card.incarnation == incarnation:
                    await self._renew(engine, handles)

    async def _renew(self, engine: Engine, handles: list[str]) -> None:
        for start in range(0, len(handles), _MAX_HANDLES_PER_MESSAGE):
            some = handles[start : start + _MAX_HANDLES_PER_MESSAGE]
            remaining_s = await self._prober.renew(engine, some, self._config.history_ttl_s)
            for handle, left_s in zip(some, remaining_s, strict=False):
                self._note_remaining(handle, left_s)

    def _note_remaining(self, handle: str, remaining_s: float) -> None:
        if remaining_s >= 0:
            remaining_s = max(remaining_s - self._config.history_margin_s, 0.0)
        self.table.renewed(handle, remaining_s, now_s=self._now_s())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def caller_from(headers: Headers) -> bytes:
    """Names the caller of a request."""
    return caller_of([value for name in _CREDENTIAL_HEADERS for key, value in headers if key == name])


def _named_by(headers: Headers) -> str:
    for name in NAME_HEADERS:
        for key, value in headers:
            if key == name and value.strip():
                return value.strip().decode("latin-1")
    return ""


def _trail(scope: Scope, request: InferenceRequest) -> Trail | None:
    if request.endpoint is Endpoint.CHAT:
        return chat_trail(scope, request.fields.get("messages"))
    prompt = request.fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    return text_trail(scope, prompt)


def _speaks_of_turns(engine: Engine) -> bool:
    return engine.card is not None and engine.card.protocol_version >= _SINCE_PROTOCOL


def _can_exchange(reader: Engine, holder: Engine) -> bool:
    if reader.card is None or holder.card is None or not _speaks_of_turns(reader):
        return False
    return reader.card.fingerprint == holder.card.fingerprint
