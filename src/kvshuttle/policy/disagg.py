"""Whether a request goes through a prefill engine or to a decode engine alone, and why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvshuttle.policy.placement import Following


class Route(StrEnum):
    """The two ways through the cluster."""

    PAIR = "pair"
    LOCAL = "local"


class RouteReason(StrEnum):
    """Why a request took its way. Also the metric label."""

    DEFAULT = "default"
    PROMPT_LOGPROBS = "prompt_logprobs"
    """A decode engine that did not run the prompt cannot give its log probabilities."""
    PROMPT_EMBEDS = "prompt_embeds"
    """The token hash chain does not cover embeddings."""
    BEAM_SEARCH = "beam_search"
    """The engine makes many requests of one; they would share a single handle."""
    SEVERAL_PROMPTS = "several_prompts"
    """One handle names the KV of one prompt."""
    NO_OUTPUT = "no_output"
    """Nothing is generated, so there is nothing to decode."""
    SHORT_PROMPT = "short_prompt"
    LOCAL_APPEND = "local_append"
    """A decode engine keeps the history, and little is new."""
    NO_PREFILL_ENGINE = "no_prefill_engine"
    NO_DECODE_ENGINE = "no_decode_engine"
    """Nobody can answer."""
    NO_COMPATIBLE_PAIR = "no_compatible_pair"
    MODEL_NOT_ON_PREFILL = "model_not_on_prefill"
    PREFILL_FAILED = "prefill_failed"
    """The attempts are used up."""
    PREFILL_REFUSED = "prefill_refused"
    """The prefill engine answered 4xx; the decode engine is asked for its own words on the original request."""


@dataclass(frozen=True, slots=True)
class RequestTraits:
    """What the decision needs to know of a request's body."""

    num_tokens: int
    """Estimated prompt length."""
    num_prompts: int = 1
    wants_prompt_logprobs: bool = False
    has_prompt_embeds: bool = False
    is_beam_search: bool = False
    is_without_output: bool = False


@dataclass(frozen=True, slots=True)
class RouteDecision:
    """A way and the reason for it."""

    route: Route
    reason: RouteReason


def choose_route(traits: RequestTraits, *, disaggregate_from_tokens: int) -> RouteDecision:
    """The way a request should take when all engines are well.

    LOCAL when a prefill leg could not serve it, or when it is estimated shorter than ``disaggregate_from_tokens``.
    """
    checks = (
        (traits.wants_prompt_logprobs, RouteReason.PROMPT_LOGPROBS),
        (traits.has_prompt_embeds, RouteReason.PROMPT_EMBEDS),
        (traits.is_beam_search, RouteReason.BEAM_SEARCH),
        (traits.num_prompts != 1, RouteReason.SEVERAL_PROMPTS),
        (traits.is_without_output, RouteReason.NO_OUTPUT),
        (traits.num_tokens < disaggregate_from_tokens, RouteReason.SHORT_PROMPT),
    )
    for holds, reason in checks:
        if holds:
            return RouteDecision(Route.LOCAL, reason)
    return _PAIR


def may_append(
    decision: RouteDecision, *, num_new_tokens: int | None, local_append_max_tokens: int, following: Following | None
) -> bool:
    """Whether a turn that would go through a pair should go to the decode engine that keeps its history, alone.

    ``num_new_tokens``: estimated, behind that history; None when the prompt does not continue it. ``following``:
    whether that engine can take the turn now; None when none keeps anything.
    """
    is_short = num_new_tokens is not None and num_new_tokens <= local_append_max_tokens
    return decision.route is Route.PAIR and is_short and local_append_max_tokens > 0 and following is Following.FOLLOWED


_PAIR = RouteDecision(Route.PAIR, RouteReason.DEFAULT)
