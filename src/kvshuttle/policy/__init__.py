"""Choices, pure: which way, which engine, and the reason. No clock, no randomness, no IO."""

from kvshuttle.policy.disagg import RequestTraits, Route, RouteDecision, RouteReason, choose_route
from kvshuttle.policy.placement import EngineView, Placement, PlacementReason, place_decode, place_prefill

__all__ = [
    "EngineView",
    "Placement",
    "PlacementReason",
    "RequestTraits",
    "Route",
    "RouteDecision",
    "RouteReason",
    "choose_route",
    "place_decode",
    "place_prefill",
]
