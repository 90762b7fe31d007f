"""What the router knows of conversations, and what engines must be told of them.

One ``Conversations`` for the router, one ``Turn`` (``turns.py``) for each request. Nothing is read from answers: the
router names the handle beforehand, in the decode leg, and the engine keeps what it has under it when the answer is
complete. After an answer that was cut off, the engine is asked what it has kept.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvshuttle.ids import mint
from kvshuttle.policy import (
    Kept,
    Scope,
    caller_of,
    chat_trail,
    name_of,
    text_trail,
)
from kvshuttle.router.openai import Endpoint
from kvshuttle.router.turns import HistoryResult, Turn

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from kvshuttle.config import RouterConfig
    from kvshuttle.policy import Claim, ConversationTable, Trail
    from kvshuttle.router.http_text import Headers
    from kvshuttle.router.openai import InferenceRequest
    from kvshuttle.router.prober import Prober
    from kvshuttle.router.registry import Engine, Registry

NAME_HEADERS = (b"x-conversation-id", b"x-session-id")
"""By which clients name their conversation; the first one given counts, and either before the body's fields."""
_CREDENTIAL_HEADERS = (b"authorization", b"x-api-key", b"api-key")

_ASK_AFTER_S = (1.0, 4.0)
"""After a turn was cut off: its engine takes a step or two to end the request."""
_LOOK_S = 0.001
"""Renewing by nothing asks how long something is kept."""
_RENEWALS_PER_TTL = 4
_MAX_HANDLES_PER_MESSAGE = 500


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

    def expire(self) -> None:
        """Let go of turns whose time is over."""
        self.table.expire(self._now_s())

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
