"""Turns of a conversation through a pair of engines, as a router would send them, each checked against the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvshuttle.handoff.params import DecodeLeg, History, Keep, Mode, Peer, PrefillLeg, parse_result, to_params
from support.vllm_engine import BLOCK_SIZE, Engine, run_until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from support.engine_pair import EnginePair


@dataclass(frozen=True)
class Turn:
    """``num_computed``: tokens that the prefill engine computed for it. ``num_cached``: what it says it did not."""

    prompt: list[int]
    answer: list[int]
    num_computed: int
    num_cached: int

    @property
    def history(self) -> list[int]:
        """What the next prompt begins with."""
        return [*self.prompt, *self.answer]

    @property
    def num_kept(self) -> int:
        """Tokens whose KV can be kept: the last one has none, and only full blocks are."""
        return (len(self.history) - 1) // BLOCK_SIZE * BLOCK_SIZE


def peer_of(engine: Engine) -> Peer:
    """Where an engine is, and which life of it."""
    card = engine.card
    return Peer(engine.half.address, card.engine_id, card.incarnation)


class Conversation:
    """``handle``: under which the decode engine keeps the latest turn; "" before the first."""

    def __init__(self, pair: EnginePair, mode: Mode = Mode.PULL, name: str = "c") -> None:
        self._pair = pair
        self._mode = mode
        self._name = name
        self._num_turns = 0
        self.handle = ""
        self.kept_at = peer_of(pair.sink)

    def turn(self, prompt: Sequence[int], *, max_tokens: int = 5, **fields: Any) -> Turn:
        """One turn, to its end. ``fields``: of both requests."""
        pair, before = self._pair, self._pair.source.model.num_computed_tokens
        prefill, decode = self.begin(prompt, max_tokens=max_tokens, **fields)
        pair.finish(decode)
        run_until(lambda: pair.source.has_finished(prefill), [pair.source, pair.sink], "the prefill leg")
        result = parse_result(pair.source.answers[prefill].kv_transfer_params)
        return Turn(
            list(prompt),
            pair.sink.answers[decode].tokens,
            pair.source.model.num_computed_tokens - before,
            result.num_cached_tokens if result else 0,
        )

    def begin(self, prompt: Sequence[int], *, max_tokens: int = 5, **fields: Any) -> tuple[str, str]:
        """Send both legs; in a pull the decode leg when the prefill leg is answered. Returns their request ids."""
        number = self._num_turns
        self._num_turns += 1
        prefill, decode = (f"{leg}-{self._name}-{number}" for leg in ("prefill", "decode"))
        transfer_id = f"x-{self._name}-{number}"
        history = History(self.handle, self.kept_at) if self.handle else None
        keep = Keep(f"turn-{self._name}-{number}", supersedes=self.handle or None)
        pair = self._pair
        pair.source.add(prefill, prompt, to_params(PrefillLeg(transfer_id, self._mode, history)), **fields)
        if self._mode is Mode.PULL:
            run_until(lambda: pair.source.has_finished(prefill), [pair.source], "the prefill leg")
            pair.source.step()
        leg = DecodeLeg(transfer_id, peer_of(pair.source), self._mode, keep)
        pair.sink.add(decode, prompt, to_params(leg), max_tokens=max_tokens, **fields)
        self.handle, self.kept_at = keep.handle, peer_of(pair.sink)
        return prefill, decode
