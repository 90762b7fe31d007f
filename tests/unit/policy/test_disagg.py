import pytest

from kvshuttle.policy import Following, RequestTraits, Route, RouteDecision, RouteReason, choose_route, may_append


def test_an_ordinary_request_takes_a_pair():
    decision = choose_route(RequestTraits(num_tokens=0), disaggregate_from_tokens=0)
    assert decision == RouteDecision(Route.PAIR, RouteReason.DEFAULT)


@pytest.mark.parametrize(
    ("traits", "reason"),
    [
        (RequestTraits(9, wants_prompt_logprobs=True), RouteReason.PROMPT_LOGPROBS),
        (RequestTraits(9, has_prompt_embeds=True), RouteReason.PROMPT_EMBEDS),
        (RequestTraits(9, is_beam_search=True), RouteReason.BEAM_SEARCH),
        (RequestTraits(9, num_prompts=2), RouteReason.SEVERAL_PROMPTS),
        (RequestTraits(9, num_prompts=0), RouteReason.SEVERAL_PROMPTS),
        (RequestTraits(9, is_without_output=True), RouteReason.NO_OUTPUT),
        (RequestTraits(4), RouteReason.SHORT_PROMPT),
    ],
)
def test_what_a_prefill_leg_cannot_serve_stays_on_the_decode_engine(traits, reason):
    assert choose_route(traits, disaggregate_from_tokens=5) == RouteDecision(Route.LOCAL, reason)


def test_a_prompt_of_exactly_the_threshold_takes_a_pair():
    assert choose_route(RequestTraits(5), disaggregate_from_tokens=5).route is Route.PAIR


PAIR = RouteDecision(Route.PAIR, RouteReason.DEFAULT)
SHORT = RouteDecision(Route.LOCAL, RouteReason.SHORT_PROMPT)


@pytest.mark.parametrize(
    ("decision", "num_new_tokens", "max_tokens", "following", "expected"),
    [
        (PAIR, 10, 10, Following.FOLLOWED, True),
        (PAIR, 0, 1, Following.FOLLOWED, True),
        (PAIR, 11, 10, Following.FOLLOWED, False),
        (PAIR, None, 10, Following.FOLLOWED, False),
        (PAIR, 0, 0, Following.FOLLOWED, False),
        (PAIR, 10, 10, Following.BUSY, False),
        (PAIR, 10, 10, None, False),
        (SHORT, 10, 10, Following.FOLLOWED, False),
    ],
)
def test_only_a_short_continuation_goes_to_a_free_engine_that_keeps_its_history(
    decision, num_new_tokens, max_tokens, following, expected
):
    verdict = may_append(
        decision, num_new_tokens=num_new_tokens, local_append_max_tokens=max_tokens, following=following
    )
    assert verdict is expected
