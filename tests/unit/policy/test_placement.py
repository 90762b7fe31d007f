import pytest
from msgspec.structs import replace

from kvshuttle.policy import (
    EngineView,
    Following,
    Placement,
    PlacementReason,
    follow_history,
    place_decode,
    place_prefill,
)

P0 = EngineView("p0", is_up=True, peers=frozenset({"d0", "d1"}))
P1 = replace(P0, name="p1")
D0 = EngineView("d0", is_up=True, peers=frozenset({"p0", "p1"}))
D1 = replace(D0, name="d1")


def prefill(*views: EngineView, model: str = "", avoid: tuple[str, ...] = (), draw: float = 0.0) -> Placement:
    return place_prefill(views, model=model, avoid=avoid, draw=draw)


def decode(*views: EngineView, source: str | None = None, draw: float = 0.0) -> Placement:
    return place_decode(views, model="", source=source, avoid=(), draw=draw)


def test_the_fewest_outstanding_prefill_tokens_win_whatever_the_number_of_requests():
    few_long = replace(P0, outstanding_requests=1, outstanding_tokens=9000)
    many_short = replace(P1, outstanding_requests=20, outstanding_tokens=2000)
    assert prefill(few_long, many_short) == Placement("p1", PlacementReason.LEAST_LOADED)


@pytest.mark.parametrize("draw", [0.0, 0.999])
def test_of_equals_the_one_that_was_given_a_request_the_longest_ago_is_taken(draw):
    # All are computing a prompt of the same length: the oldest one will be done first.
    views = [EngineView(f"p{at}", is_up=True, outstanding_tokens=512, given_at=at, peers=P0.peers) for at in (3, 1, 2)]
    assert prefill(*views, draw=draw).engine == "p1"
    assert prefill(*views, replace(P1, name="new", outstanding_tokens=512), draw=draw).engine == "new"


@pytest.mark.parametrize(("draw", "winner"), [(0.0, "p0"), (0.49, "p0"), (0.5, "p1"), (0.999, "p1")])
def test_the_draw_decides_between_equals(draw, winner):
    assert prefill(P0, P1, draw=draw).engine == winner


def test_an_engine_that_is_down_is_never_chosen():
    assert prefill(replace(P0, is_up=False)) == Placement(None, PlacementReason.NO_ENGINE_UP)
    assert prefill(replace(P0, is_up=False), P1) == Placement("p1", PlacementReason.ONLY_CANDIDATE)


def test_no_engines_at_all_is_no_engine_up():
    assert prefill() == Placement(None, PlacementReason.NO_ENGINE_UP)


def test_a_prefill_engine_without_a_compatible_decode_engine_is_never_chosen():
    assert prefill(replace(P0, peers=frozenset())) == Placement(None, PlacementReason.NO_COMPATIBLE_PAIR)


def test_an_engine_that_does_not_serve_the_model_is_never_chosen():
    other = replace(P0, models=frozenset({"b"}))
    assert prefill(other, model="a") == Placement(None, PlacementReason.MODEL_NOT_SERVED)
    assert prefill(other, P1, model="a").engine == "p1"
    assert prefill(other, model="").engine == "p0"


def test_quarantined_and_failed_engines_are_avoided_while_another_is_left():
    assert prefill(replace(P0, is_quarantined=True), replace(P1, outstanding_tokens=10**6)).engine == "p1"
    assert prefill(P0, replace(P1, outstanding_tokens=10**6), avoid=("p0",)).engine == "p1"


def test_an_engine_in_quarantine_is_better_than_one_that_failed_this_request():
    assert prefill(P0, replace(P1, is_quarantined=True), avoid=("p0",)) == Placement("p1", PlacementReason.LAST_RESORT)


def test_the_last_engine_is_tried_even_in_quarantine():
    assert prefill(replace(P0, is_quarantined=True), avoid=("p0",)) == Placement("p0", PlacementReason.LAST_RESORT)


def test_the_decode_engine_with_the_least_load_wins_by_the_greater_of_own_and_reported_load():
    assert decode(replace(D0, outstanding_requests=3), replace(D1, outstanding_requests=2)).engine == "d1"
    assert decode(replace(D0, reported_requests=3), replace(D1, outstanding_requests=2)).engine == "d1"
    assert decode(replace(D0, reported_requests=3), replace(D1, outstanding_requests=4)).engine == "d0"


def test_a_decode_engine_that_runs_out_of_blocks_loses_to_one_with_somewhat_more_load():
    full = replace(D0, outstanding_requests=2, num_blocks=100, num_free_blocks=0)
    assert decode(full, replace(D1, outstanding_requests=4)).engine == "d1"
    assert decode(full, replace(D1, outstanding_requests=6)).engine == "d0"


def test_free_blocks_do_not_matter_while_there_are_enough():
    assert decode(replace(D0, num_blocks=100, num_free_blocks=10), replace(D1, outstanding_requests=1)).engine == "d0"


def test_a_decode_engine_must_be_able_to_read_from_the_source():
    stranger = replace(D0, peers=frozenset({"p1"}))
    assert decode(stranger, source="p0") == Placement(None, PlacementReason.NO_COMPATIBLE_PAIR)
    assert decode(stranger, D1, source="p0").engine == "d1"
    assert decode(stranger, source=None).engine == "d0"


def following(view: EngineView, *others: EngineView, source: str | None = "p0", avoid: tuple[str, ...] = ()):
    return follow_history("d0", [*others, view], model="m", source=source, avoid=avoid, num_tokens=10)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, Following.FOLLOWED),
        ({"outstanding_requests": 5, "num_slots": 6}, Following.FOLLOWED),
        ({"outstanding_requests": 6, "num_slots": 6}, Following.BUSY),
        ({"num_queued": 1}, Following.BUSY),
        ({"num_blocks": 4, "num_free_blocks": 0, "block_size_tokens": 16}, Following.BUSY),
        ({"is_quarantined": True}, Following.AVOIDED),
        ({"is_quarantined": True, "num_queued": 1}, Following.AVOIDED),
        ({"peers": frozenset({"p1"})}, Following.UNABLE),
        ({"models": frozenset({"n"})}, Following.UNABLE),
        ({"is_up": False, "is_quarantined": True}, Following.UNABLE),
    ],
)
def test_a_turn_goes_where_its_history_is_kept_unless_that_engine_should_not_have_it(change, expected):
    assert following(replace(D0, **change)) is expected


def test_an_engine_that_failed_the_turn_is_not_gone_back_to():
    assert following(D0, avoid=("d0",)) is Following.AVOIDED


def test_a_turn_for_one_engine_alone_needs_no_peer():
    assert following(replace(D0, peers=frozenset()), source=None) is Following.FOLLOWED


@pytest.mark.parametrize(
    ("load", "other_load", "expected"),
    [(8, 0, Following.FOLLOWED), (9, 0, Following.BUSY), (28, 10, Following.FOLLOWED), (29, 10, Following.BUSY)],
)
def test_a_turn_is_not_followed_to_an_engine_with_far_more_to_do_than_another(load, other_load, expected):
    other = replace(D1, outstanding_requests=other_load)
    assert following(replace(D0, outstanding_requests=load), other) is expected
    assert following(replace(D0, outstanding_requests=load), replace(other, is_up=False)) is Following.FOLLOWED


def test_an_engine_alone_is_followed_whatever_it_has_to_do():
    assert following(replace(D0, outstanding_requests=100)) is Following.FOLLOWED
    assert following(replace(D0, outstanding_requests=100), replace(D1, is_up=False)) is Following.FOLLOWED
