"""Engines that this one has read from: their cards, by address, and what the workers must be told about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvshuttle.handoff.messages import PROTOCOL_VERSION, Denied, DenyReason

if TYPE_CHECKING:
    from collections.abc import Container

    from kvshuttle.connector.step_metadata import StepMetadata
    from kvshuttle.handoff.cards import EngineCard

_IDLE_S = 600.0
"""A peer that was not read from for so long is forgotten when a new one is met; its transport state is memory."""


@dataclass(slots=True)
class _Peer:
    card: EngineCard
    used_at_s: float


class Peers:
    """Which life of which engine answers at an address. The caller holds the scheduler half's lock."""

    def __init__(self, own: EngineCard) -> None:
        self._own = own
        self._by_address: dict[str, _Peer] = {}

    def __len__(self) -> int:
        return len(self._by_address)

    def is_known(self, address: str, incarnation: str, *, now_s: float) -> bool:
        """Whether that life of the engine was met at that address, so that it needs no introduction."""
        peer = self._by_address.get(address)
        if peer is None or peer.card.incarnation != incarnation:
            return False
        peer.used_at_s = now_s
        return True

    def refusal(self, card: EngineCard, wanted_incarnation: str) -> Denied | None:
        """Why nothing can be read from the engine of this card; None when it can."""
        if card.incarnation != wanted_incarnation:
            return Denied(DenyReason.OTHER_INCARNATION, f"{card.engine_id} is {card.incarnation} by now")
        differences = self._own.fingerprint.differences(card.fingerprint)
        if card.protocol_version != PROTOCOL_VERSION:
            differences.insert(0, f"protocol_version: {PROTOCOL_VERSION} != {card.protocol_version}")
        ours, theirs = ([(worker.rank, worker.device) for worker in each.workers] for each in (self._own, card))
        if ours != theirs:
            differences.append(f"workers: {ours} != {theirs}")
        return Denied(DenyReason.INCOMPATIBLE, "; ".join(differences)) if differences else None

    def meet(self, address: str, card: EngineCard, step: StepMetadata, *, in_use: Container[str], now_s: float) -> None:
        """Write a peer down and have the workers told of it. ``in_use``: incarnations that reads go on with."""
        before = self._by_address.get(address)
        if before is not None and before.card.incarnation == card.incarnation:
            return
        for known_address, known in tuple(self._by_address.items()):
            is_idle = now_s - known.used_at_s > _IDLE_S and known.card.incarnation not in in_use
            if known_address == address or is_idle:
                self._forget(known_address, step)
        self._by_address[address] = _Peer(card, now_s)
        step.peers[card.incarnation] = card.workers

    def forget(self, incarnation: str, step: StepMetadata) -> None:
        """The workers do not know it, or not any more: it has to be met again before the next read."""
        for address, peer in tuple(self._by_address.items()):
            if peer.card.incarnation == incarnation:
                self._forget(address, step)

    def _forget(self, address: str, step: StepMetadata) -> None:
        incarnation = self._by_address.pop(address).card.incarnation
        if all(peer.card.incarnation != incarnation for peer in self._by_address.values()):
            step.gone.append(incarnation)
            step.peers.pop(incarnation, None)
