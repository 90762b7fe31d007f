"""Which engine serves a leg: filter, score, pick, with a reason.

Hard filters drop engines that cannot serve the leg at all. Soft filters drop engines that failed lately or
failed this very request, unless nobody else is left: with every engine in quarantine, trying one
is better than refusing. Scores lie in [0, 1], more is better; the highest wins. Of equal ones it is the one that was
given a request the longest ago, which is the first to be done where all are alike; where none was given any, one is
drawn.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from kvshuttle.policy.modes import why_busy

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

_SCORE_TOLERANCE = 1e-9
_NO_BLOCKS_PENALTY = 0.5
"""A decode engine with no free blocks would have to preempt: its score halves, falling linearly from a tenth free."""
_LOW_FREE_FRACTION = 0.1
_FOLLOW_LOAD_FACTOR = 2
_FOLLOW_LOAD_SLACK = 8
"""A turn follows its history until that engine has this much more load than the idlest: moving a history costs one
transfer, but prompts that many clients open with would all end up on one engine."""


class PlacementReason(StrEnum):
    """Why this engine, or why none. Also the metric label."""

    ONLY_CANDIDATE = "only_candidate"
    LEAST_LOADED = "least_loaded"
    LAST_RESORT = "last_resort"
    """Every candidate is in quarantine or failed this request before."""
    HISTORY = "history"
    """It keeps what the prompt begins with."""
    NO_ENGINE_UP = "no_engine_up"
    MODEL_NOT_SERVED = "model_not_served"
    NO_COMPATIBLE_PAIR = "no_compatible_pair"


class Following(StrEnum):
    """Whether a turn was decoded where its history is kept. Also the metric label."""

    FOLLOWED = "followed"
    BUSY = "busy"
    """That engine has no room for it now, or far more to do than another one."""
    AVOIDED = "avoided"
    """It is in quarantine, or failed this very request."""
    UNABLE = "unable"
    """It does not serve the model any more, or cannot exchange KV with the prefill engine."""


class EngineView(msgspec.Struct, frozen=True):
    """What the router believes of one engine at one instant.

    ``outstanding_*``: dispatched by this router and not answered. ``given_at``: which of all requests that this router
    gave to engines was the last one for it, 0 for none. ``reported_requests``: running and waiting by the
    engine's own report, other routers' included; ``num_queued``: those of them that wait for room, not for their KV.
    ``num_slots``: how many it runs at a time, 0 when unknown, as ``num_blocks`` and ``block_size_tokens`` may be.
    ``models``: names it serves, None when unknown. ``peers``: names of the engines of the other role that are up and
    whose KV it can exchange.
    """

    name: str
    is_up: bool
    is_quarantined: bool = False
    outstanding_requests: int = 0
    outstanding_tokens: int = 0
    given_at: int = 0
    reported_requests: int = 0
    num_queued: int = 0
    num_slots: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    block_size_tokens: int = 0
    models: frozenset[str] | None = None
    peers: frozenset[str] = frozenset()

    @property
    def load(self) -> int:
        """Requests that it has, by our own count or its report, whichever knows of more."""
        return max(self.outstanding_requests, self.reported_requests)

    @property
    def free_blocks_fraction(self) -> float:
        """Share of its KV cache that is free; 1 when unknown."""
        return self.num_free_blocks / self.num_blocks if self.num_blocks else 1.0


class Placement(msgspec.Struct, frozen=True):
    """The engine picked (None: none can serve) and why."""

    engine: str | None
    reason: PlacementReason


def place_prefill(views: Sequence[EngineView], *, model: str, avoid: Collection[str], draw: float) -> Placement:
    """The prefill engine with the fewest outstanding prefill tokens.

    score = 1 / (1 + outstanding_tokens). Only engines with a compatible decode engine count. ``model``: "" for any.
    ``avoid``: engines that failed this request. ``draw``: uniform in [0, 1), decides between equals
    that were never given any.
    """
    return _place(
        views, model, lambda view: bool(view.peers), avoid, lambda view: 1.0 / (1.0 + view.outstanding_tokens), draw
    )


def place_decode(
    views: Sequence[EngineView], *, model: str, source: str | None, avoid: Collection[str], draw: float
) -> Placement:
    """The decode engine with the least load, able to read from ``source`` when that is not None.

    load = max(outstanding_requests, reported_requests); score = 1 / (1 + load) · memory, where memory falls
    linearly from 1 at a tenth of the blocks free to 0.5 at none.
    """
    return _place(views, model, lambda view: source is None or source in view.peers, avoid, _decode_score, draw)


def follow_history(
    holder: str, views: Sequence[EngineView], *, model: str, source: str | None, avoid: Collection[str], num_tokens: int
) -> Following:
    """Whether a turn should be decoded by ``holder``, which keeps its history: unless something is wrong with it, or it
    is overloaded (see ``why_busy``), or has load > 2 · the least of all that could serve it + 8.

    ``num_tokens``: estimated prompt length. The rest as for ``place_decode``.
    """
    (view,) = (each for each in views if each.name == holder)
    if not _serving((view,), model) or (source is not None and source not in view.peers):
        return Following.UNABLE
    if view.name in avoid or view.is_quarantined:
        return Following.AVOIDED
    sound = [each for each in _serving(views, model) if not each.is_quarantined and each.name not in avoid]
    max_load = _FOLLOW_LOAD_FACTOR * min(each.load for each in sound) + _FOLLOW_LOAD_SLACK
    is_busy = view.load > max_load or why_busy(view, num_tokens=num_tokens) is not None
    return Following.BUSY if is_busy else Following.FOLLOWED


def able_decodes(
    views: Sequence[EngineView], *, model: str, source: str, avoid: Collection[str]
) -> Sequence[EngineView]:
    """Those decode engines that ``place_decode`` would choose from; empty when there is none."""
    return _soft_filtered([view for view in _serving(views, model) if source in view.peers], avoid)[0]


def _decode_score(view: EngineView) -> float:
    shortage = 1.0 - min(view.free_blocks_fraction, _LOW_FREE_FRACTION) / _LOW_FREE_FRACTION
    return (1.0 - _NO_BLOCKS_PENALTY * shortage) / (1.0 + view.load)


def _place(
    views: Sequence[EngineView],
    model: str,
    is_pairable: Callable[[EngineView], bool],
    avoid: Collection[str],
    score: Callable[[EngineView], float],
    draw: float,
) -> Placement:
    if not any(view.is_up for view in views):
        return Placement(None, PlacementReason.NO_ENGINE_UP)
    serving = _serving(views, model)
    if not serving:
        return Placement(None, PlacementReason.MODEL_NOT_SERVED)
    able = [view for view in serving if is_pairable(view)]
    if not able:
        return Placement(None, PlacementReason.NO_COMPATIBLE_PAIR)
    candidates, is_sound = _soft_filtered(able, avoid)
    winner = _highest(candidates, score, draw)
    if not is_sound:
        return Placement(winner.name, PlacementReason.LAST_RESORT)
    reason = PlacementReason.ONLY_CANDIDATE if len(candidates) == 1 else PlacementReason.LEAST_LOADED
    return Placement(winner.name, reason)


def _serving(views: Sequence[EngineView], model: str) -> list[EngineView]:
    return [view for view in views if view.is_up and (not model or view.models is None or model in view.models)]


def _soft_filtered(able: Sequence[EngineView], avoid: Collection[str]) -> tuple[Sequence[EngineView], bool]:
    """Those with nothing against them, else the next best; and whether there is nothing against them."""
    fresh = [view for view in able if view.name not in avoid]
    sound = [view for view in fresh if not view.is_quarantined]
    return sound or fresh or able, bool(sound)


def _highest(views: Sequence[EngineView], score: Callable[[EngineView], float], draw: float) -> EngineView:
    if len(views) == 1:
        return views[0]
    scores = [score(view) for view in views]
    best = max(scores)
    equals = [view for view, value in zip(views, scores, strict=True) if best - value <= _SCORE_TOLERANCE]
    longest_ago = min(view.given_at for view in equals)
    equals = [view for view in equals if view.given_at == longest_ago]
    return equals[int(draw * len(equals))]
