"""What of a request that is over can be kept, and how fast things go."""

from types import SimpleNamespace

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import RequestStatus

from kvshuttle.config import ConnectorConfig
from kvshuttle.connector import vllm_compat
from kvshuttle.connector.holder import Holder
from kvshuttle.connector.keeper import Keeper, retention_of
from kvshuttle.connector.legs import Legs
from kvshuttle.connector.pace import Pace
from kvshuttle.connector.stats import ShuttleStats
from kvshuttle.handoff.params import DecodeLeg, Keep, LocalLeg, Peer, PrefillLeg
from support.handoff_values import ledger

BLOCK_SIZE = 4


def request(num_prompt=10, num_output=7, **changes):
    """A request that is over, as vLLM leaves it: the token sampled last has not been computed."""
    num_tokens = num_prompt + num_output
    fields = {
        "request_id": "r",
        "prompt_token_ids": list(range(num_prompt)),
        "all_token_ids": list(range(num_tokens)),
        "num_tokens": num_tokens,
        "num_output_tokens": num_output,
        "num_computed_tokens": num_tokens - 1,
        "num_in_flight_tokens": 0,
        "status": RequestStatus.FINISHED_STOPPED,
        "sampling_params": SamplingParams(),
    }
    return SimpleNamespace(**{**fields, **changes})


def keeper(**options):
    holder = Holder(ledger(), lease_s=10.0)
    retention = retention_of(ConnectorConfig(), holder.ledger, num_blocks=100)
    fields = {"block_size_tokens": BLOCK_SIZE, "max_step_tokens": 64, "is_disconnect_retained": False}
    return Keeper(holder, retention, **{**fields, **options})


@pytest.mark.parametrize(
    ("changes", "num_tokens"),
    [
        ({}, 16),
        ({"num_computed_tokens": 17}, 16),  # a step ahead, whose token is not there yet
        ({"num_computed_tokens": 18, "num_in_flight_tokens": 2}, 16),
        ({"num_computed_tokens": 16, "num_in_flight_tokens": 5}, 11),
        ({"num_computed_tokens": 0}, 0),  # preempted in its last step
        ({"num_output": 0, "num_computed_tokens": 10}, 0),  # waits for a load, of which nothing may have arrived
        ({"num_computed_tokens": 3, "num_in_flight_tokens": 5}, 0),
    ],
)
def test_tokens_are_settled_when_the_steps_that_computed_them_are_over(changes, num_tokens):
    assert vllm_compat.num_settled_tokens(request(**changes)) == num_tokens


def test_releases_that_do_not_count_tokens_under_way_tell_of_those_scheduled_ahead():
    older = request(num_computed_tokens=17, num_output_placeholders=2)
    del older.num_in_flight_tokens
    assert vllm_compat.num_settled_tokens(older) == 15
    del older.num_output_placeholders
    assert vllm_compat.num_settled_tokens(older) == 16


STOP = SamplingParams(stop=["END"])


@pytest.mark.parametrize(
    ("changes", "is_disconnect_retained", "num_blocks"),
    [
        ({}, False, 4),
        ({"status": RequestStatus.FINISHED_LENGTH_CAPPED}, False, 4),
        ({"status": RequestStatus.FINISHED_ABORTED}, False, 0),
        ({"status": RequestStatus.FINISHED_ABORTED}, True, 4),
        ({"status": RequestStatus.FINISHED_ABORTED, "sampling_params": STOP}, False, 4),
        ({"status": RequestStatus.FINISHED_ABORTED, "sampling_params": None}, False, 0),
        ({"status": RequestStatus.FINISHED_ERROR}, True, 0),
        ({"status": RequestStatus.FINISHED_IGNORED}, True, 0),
        ({"prompt_embeds": object()}, False, 0),
        ({"num_computed_tokens": 3}, False, 0),
    ],
)
def test_what_lasts_of_a_request_depends_on_how_it_ended(changes, is_disconnect_retained, num_blocks):
    chain = keeper(is_disconnect_retained=is_disconnect_retained).lasting_chain(request(**changes))
    assert (len(chain.links) if chain else 0) == num_blocks
    assert chain is None or chain.tail == b""


@pytest.mark.parametrize(
    ("options", "max_blocks"),
    [
        ({}, 90),
        ({"retention_max_fraction": 0.5}, 50),
        ({"retention_max_fraction": 0}, 0),
        ({"retention_max_blocks": 7}, 7),
        ({"retention_max_blocks": 700}, 90),
    ],
)
def test_the_budget_is_the_smaller_of_the_two(options, max_blocks):
    assert retention_of(ConnectorConfig(**options), ledger(), num_blocks=100).max_blocks == max_blocks


def test_without_a_pool_nothing_is_kept_and_nothing_breaks():
    made = keeper()
    made.keep(Keep("h"), made.lasting_chain(request()), [1, 2, 3, 4])
    assert not made.give_way()
    made.make_room_for(request(), 0, 0, [])
    made.make_headroom(SimpleNamespace(num_scheduled_tokens={}), [])
    assert made._retention.num_handles == 0


def test_local_hits_of_a_leg_are_counted_once_at_its_first_admission():
    stats = ShuttleStats()
    legs = Legs(stats)
    peer = Peer("a:1", "e", "i")
    for request_id, leg in (("p", PrefillLeg("x")), ("d", DecodeLeg("x", peer)), ("l", LocalLeg())):
        legs.add(request_id, leg)
        legs.note_asked(request_id, 16)
        legs.note_asked(request_id, 32)
        legs.note_admitted(request_id)
        legs.note_asked(request_id, 64)  # preempted
        legs.note_admitted(request_id)
        assert legs.pop(request_id).num_local_tokens == 32
    legs.note_asked("nobody's", 1)
    legs.note_admitted("nobody's")
    assert stats.data == {f"local_hit_tokens|{kind}": 32 for kind in ("prefill", "decode", "local")}


# -- pace --------------------------------------------------------------------------------------------


def test_a_fixed_threshold_is_what_it_is_whatever_is_measured():
    stats = ShuttleStats()
    pace = Pace(77, stats)
    pace.note_read("d", 1000, 0.001, 0.0)
    assert pace.threshold_tokens("d", 1.0) == 77
    assert stats.data == {"recompute_threshold_tokens|d": 77}


def measured(pace):
    """Half a second for 256 prompt tokens, and 0.1 s for a read of 100."""
    pace.note_scheduled([200, 56], 10.0)
    pace.note_done(10.5)
    pace.note_read("d", 100, 0.1, 11.0)
    return pace


def test_an_automatic_threshold_follows_what_is_measured_of_each_peer():
    pace = measured(Pace("auto", ShuttleStats()))
    assert pace.threshold_tokens("d", 11.0) == 52  # 0.1 s at 512 tokens/s
    assert pace.threshold_tokens("another", 11.0) == 64


def test_steps_that_compute_no_prompt_say_nothing_of_prompts():
    pace = measured(Pace("auto", ShuttleStats()))
    pace.note_scheduled([1] * 200, 12.0)
    pace.note_done(40.0)
    pace.note_scheduled([63], 50.0)
    pace.note_done(90.0)
    pace.note_done(95.0)  # of a step that nobody has scheduled
    assert pace.threshold_tokens("d", 95.0) == 52


def test_a_step_that_was_scheduled_ahead_is_timed_from_the_end_of_the_one_before():
    pace = Pace("auto", ShuttleStats())
    pace.note_scheduled([256], 0.0)
    pace.note_scheduled([256], 0.1)
    pace.note_done(0.5)
    pace.note_done(1.0)
    pace.note_read("d", 100, 0.1, 1.0)
    assert pace.threshold_tokens("d", 1.0) == 52
