"""Choices, pure: which way, which engine, and the reason. No clock, no randomness, no IO."""

from kvshuttle.policy.conversation_key import (
    ChatTrail,
    Scope,
    TextTrail,
    Tip,
    Trail,
    caller_of,
    chat_trail,
    name_of,
    text_trail,
)
from kvshuttle.policy.conversations import Claim, ConversationTable, DropReason, Found, Kept, KeptTurn
from kvshuttle.policy.disagg import RequestTraits, Route, RouteDecision, RouteReason, choose_route, may_append
from kvshuttle.policy.modes import ModeDecision, ModeReason, choose_mode
from kvshuttle.policy.placement import (
    EngineView,
    Following,
    Placement,
    PlacementReason,
    able_decodes,
    follow_history,
    place_decode,
    place_prefill,
)

__all__ = [
    "ChatTrail",
    "Claim",
    "ConversationTable",
    "DropReason",
    "EngineView",
    "Following",
    "Found",
    "Kept",
    "KeptTurn",
    "ModeDecision",
    "ModeReason",
    "Placement",
    "PlacementReason",
    "RequestTraits",
    "Route",
    "RouteDecision",
    "RouteReason",
    "Scope",
    "TextTrail",
    "Tip",
    "Trail",
    "able_decodes",
    "caller_of",
    "chat_trail",
    "choose_mode",
    "choose_route",
    "follow_history",
    "may_append",
    "name_of",
    "place_decode",
    "place_prefill",
    "text_trail",
]
