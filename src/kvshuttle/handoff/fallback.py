"""A fetch into blocks that the engine has reserved already: what is left when a push has failed.

The engine was promised the whole rest of the prompt, so a lease on less than that is of no use here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvshuttle.handoff.fetch import Fetch
from kvshuttle.handoff.fetch_protocol import (
    FailLoad,
    NothingToRead,
    ReadEnded,
    RequestEnded,
    SendAcquire,
    SendRelease,
    SendRenew,
    StartRead,
)
from kvshuttle.handoff.fetch_states import State

if TYPE_CHECKING:
    from kvshuttle.blocks import TokenChain
    from kvshuttle.handoff.cards import EngineCard
    from kvshuttle.handoff.fetch_protocol import Action, Fact, FetchLimits, LoadAdmitted, Outcome
    from kvshuttle.handoff.params import Peer
    from kvshuttle.ids import Handle

FallbackAction = SendAcquire | SendRenew | SendRelease | StartRead


class Fallback:
    """Drives one ``Fetch`` for ``load``, which the engine waits for. Actions are the fetch's, without ``FailLoad``."""

    def __init__(
        self,
        load: LoadAdmitted,
        *,
        handle: Handle,
        source: Peer,
        wanted: TokenChain,
        reader: EngineCard,
        limits: FetchLimits,
        now_s: float,
    ) -> None:
        self._load = load
        self._is_reading = False
        self.fetch = Fetch(
            handle=handle,
            source=source,
            wanted=wanted,
            fingerprint=reader.fingerprint,
            reader=reader.engine_id,
            # The blocks are reserved: reading is cheaper than computing whatever the threshold.
            limits=replace(limits, recompute_threshold_tokens=0),
            now_s=now_s,
        )

    def start(self, now_s: float) -> tuple[FallbackAction, ...]:
        """Ask for a lease."""
        return self._go_on(self.fetch.start(now_s), now_s)

    def on(self, fact: Fact, *, now_s: float) -> tuple[FallbackAction, ...]:
        """Take in what happened."""
        return self._go_on(self.fetch.on(fact, now_s=now_s), now_s)

    def end(self, *, is_ok: bool, detail: str, now_s: float) -> tuple[FallbackAction, ...]:
        """The workers have reported the load."""
        if self._is_reading:
            return self.on(ReadEnded(is_ok, detail), now_s=now_s)
        return self.on(RequestEnded(), now_s=now_s)

    def tick(self, now_s: float) -> tuple[FallbackAction, ...]:
        """Let deadlines pass."""
        return self._go_on(self.fetch.tick(now_s), now_s)

    def next_deadline_at_s(self) -> float | None:
        """The fetch's."""
        return self.fetch.next_deadline_at_s()

    @property
    def outcome(self) -> Outcome | None:
        """The fetch's."""
        return self.fetch.outcome

    @property
    def is_reading(self) -> bool:
        """The workers were told to read."""
        return self._is_reading

    @property
    def is_hopeless(self) -> bool:
        """It ended before it read."""
        return self.fetch.outcome is not None and not self._is_reading

    def _go_on(self, actions: tuple[Action, ...], now_s: float) -> tuple[FallbackAction, ...]:
        if self.fetch.state is State.LEASED and not self._is_reading:
            offer = self.fetch.offer(self._load.num_local_tokens)
            is_enough = offer.num_tokens == self._load.num_external_tokens
            actions += self.fetch.on(self._load if is_enough else NothingToRead(offer.reason), now_s=now_s)
        self._is_reading |= any(isinstance(action, StartRead) for action in actions)
        return tuple(action for action in actions if not isinstance(action, FailLoad))
