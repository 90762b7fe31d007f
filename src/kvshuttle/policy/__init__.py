"""Choices, pure: which way, which engine, and the reason. No clock, no randomness, no IO."""

from kvshuttle.policy.disagg import RequestTraits, Route, RouteDecision, RouteReason, choose_route
from kvshuttle.policy.modes import ModeDecision, ModeReason, choose_mode
from kvshuttle.policy.placement import (
    EngineView,
    Placement,
    PlacementReason,
    able_decodes,
    place_decode,
    place_prefill,
)

__all__ = [
    "EngineView",
    "ModeDecision",
    "ModeReason",
    "Placement",
    "PlacementReason",
    "RequestTraits",
    "Route",
    "RouteDecision",
    "RouteReason",
    "able_decodes",
    "choose_mode",
    "choose_route",
    "place_decode",
    "place_prefill",
]
