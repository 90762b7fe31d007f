"""The router's legs while their requests live: what was asked, and how much of a prompt was here already."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvshuttle.handoff.params import DecodeLeg, PrefillLeg, history_of, parse_leg

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.v1.request import Request

    from kvshuttle.blocks import TokenChain
    from kvshuttle.connector.stats import ShuttleStats
    from kvshuttle.handoff.params import History, Leg


@dataclass(slots=True, eq=False)
class LiveLeg:
    """``prompt``: its chain, where something was asked for. ``num_local_tokens``: what the prefix cache had of it when
    vLLM last asked before it admitted the request.

    ``num_cached_tokens``: of a prefill leg, how many tokens of its prompt no step has computed, neither before nor
    after a preemption or a failed read. None before its first step.
    """

    leg: Leg
    prompt: TokenChain | None
    num_local_tokens: int = 0
    num_cached_tokens: int | None = None
    is_admitted: bool = False

    @property
    def kind(self) -> str:
        """The metric label."""
        if isinstance(self.leg, PrefillLeg):
            return "prefill"
        return "decode" if isinstance(self.leg, DecodeLeg) else "local"


class Legs:
    """All of them, by request id."""

    def __init__(self, stats: ShuttleStats) -> None:
        self._stats = stats
        self._live: dict[str, LiveLeg] = {}
        self._prefills: dict[str, LiveLeg] = {}

    def __len__(self) -> int:
        return len(self._live)

    def add(self, request_id: str, leg: Leg, prompt: TokenChain | None = None) -> None:
        """A request arrived with a leg."""
        live = self._live[request_id] = LiveLeg(leg, prompt)
        if isinstance(leg, PrefillLeg):
            self._prefills[request_id] = live

    def note_asked(self, request_id: str, num_local_tokens: int) -> None:
        """vLLM has found so many tokens in its prefix cache, and may be about to admit the request."""
        live = self._live.get(request_id)
        if live is not None and not live.is_admitted:
            live.num_local_tokens = num_local_tokens

    def note_admitted(self, request_id: str) -> None:
        """vLLM admitted the request, for the first or the n-th time; only the first one counts."""
        live = self._live.get(request_id)
        if live is not None and not live.is_admitted:
            live.is_admitted = True
            self._stats.count("local_hit_tokens", live.kind, by=live.num_local_tokens)

    def note_scheduled(self, num_scheduled_tokens: Mapping[str, int], requests: Mapping[str, Request]) -> None:
        """A step is scheduled that computes so many tokens of each request, behind those that ``requests`` have."""
        for request_id, live in self._prefills.items():
            if num_scheduled_tokens.get(request_id):
                num_before = requests[request_id].num_computed_tokens
                had = live.num_cached_tokens
                live.num_cached_tokens = num_before if had is None else min(had, num_before)

    def pop(self, request_id: str) -> LiveLeg | None:
        """The request ended."""
        self._prefills.pop(request_id, None)
        return self._live.pop(request_id, None)


def leg_of(request: Request) -> tuple[Leg | None, str]:
    """A request's leg, if it has one, and what is wrong with its params, if anything."""
    try:
        return parse_leg(request.kv_transfer_params), ""
    except ValueError as error:
        return None, str(error)


def wish_of(leg: Leg | None) -> DecodeLeg | History | None:
    """What a leg wants to be read, or written here: the KV of a hand-off, or that of an earlier turn."""
    return leg if isinstance(leg, DecodeLeg) else history_of(leg)
