"""Push hand-off between two complete engines: what is written while the prompt is computed, and that nothing stays."""

import itertools

import pytest

from kvshuttle.handoff.messages import Release
from kvshuttle.handoff.params import Mode, parse_result
from support import quiet_vllm  # noqa: F401
from support.engine_pair import PATIENT, PROMPT
from support.side import ask_side
from support.vllm_engine import BLOCK_SIZE, run_until

WHOLE_BLOCKS = [7 * index + 3 for index in range(4 * BLOCK_SIZE)]
LONG = [3 * index + 1 for index in range(20 * BLOCK_SIZE + 5)]
SMALL_CHUNKS = {"max_num_batched_tokens": 32}
HASTY = {**PATIENT, "push_timeout_s": 0.6, "confirm_timeout_s": 10.0, "lease_s": 3.0}
"""A push is given up soon. What its source says then is waited for: it lives, except where a test says otherwise."""
UNCONFIRMED = {**HASTY, "push_timeout_s": 2.0, "confirm_timeout_s": 0.4}


def pushed(pair):
    """Tokens that the sink got by push."""
    return pair.sink.count("transfer_tokens", "push")


def until_received(pair, request_id):
    """Run until the decode leg's load is over."""
    run_until(lambda: not pair.sink.half._reader.is_loading(request_id), [pair.source, pair.sink], "the push")


def step_apart(pair):
    """One step of each engine, with time for the threads in between."""
    pair.source.step()
    pair.sink.step()


def report(engine):
    """Let an idle engine step, so that its workers' metrics come out."""
    engine.add(f"small-{engine.num_steps}", [1])
    run_until(engine.is_idle, [engine], "a small request")


def test_a_prompt_is_written_while_it_is_computed_and_only_its_last_token_computed_again(make_pair):
    pair = make_pair(source=SMALL_CHUNKS)
    pair.finish(pair.push("x-1", LONG, max_tokens=5))
    assert pair.sink.model.num_computed_tokens == 5
    assert pushed(pair) == len(LONG)
    assert pair.sink.count("transfers", "push", "received") == 1
    num_blocks = -(-len(LONG) // BLOCK_SIZE)
    assert pair.sink.count("transfer_bytes", "push") == num_blocks * 2 * 1024
    pair.assert_drained()
    report(pair.source)
    written = pair.source.count("transfer_bytes", "write")
    assert written == num_blocks * 2 * 1024
    assert pair.source.count("pushed_bytes", "streamed") + pair.source.count("pushed_bytes", "final") == written


def test_with_many_chunks_all_but_the_last_one_may_be_written_before_the_prompt_is_computed(make_pair):
    pair = make_pair(source=SMALL_CHUNKS)
    request_id = pair.push("x-1", LONG)
    boxes = pair.source.workers[0]._worker._comm._writes._writer._outboxes
    run_until(lambda: boxes, [pair.sink], "the registration to reach the worker")
    (box,) = boxes.values()
    num_computed_blocks = 0

    def is_written():
        return box._next_index == num_computed_blocks and not box._under_way

    while not pair.source.has_finished("prefill-2"):
        run_until(is_written, [pair.sink], f"{num_computed_blocks} blocks to be written")
        pair.source.step()
        num_computed_blocks += SMALL_CHUNKS["max_num_batched_tokens"] // BLOCK_SIZE
    pair.finish(request_id)
    pair.assert_drained()
    report(pair.source)
    assert pair.source.count("pushed_bytes", "streamed") == len(LONG) // BLOCK_SIZE * 2 * 1024
    assert pair.source.count("pushed_bytes", "final") == 2 * 1024


@pytest.mark.parametrize("num_tokens", [1, 2, 15, 16, 17, 47, 48, 49, 128, 129, 300])
def test_prompts_of_every_shape_are_pushed_whole(make_pair, num_tokens):
    pair = make_pair()
    prompt = [5 * index + 11 for index in range(num_tokens)]
    pair.finish(pair.push("x-1", prompt))
    # A prompt of one token is computed: the engine always computes the last one.
    assert pushed(pair) == (num_tokens if num_tokens > 1 else 0)
    pair.assert_drained()


def test_the_decode_leg_may_come_when_the_prompt_is_computed_already(make_pair):
    pair = make_pair()
    prefill = pair.begin_prefill("x-1")
    run_until(lambda: pair.source.has_finished(prefill), [pair.source], "the prefill leg")
    pair.source.step()
    assert pair.source.is_idle()
    pair.finish(pair.decode("x-1", mode=Mode.PUSH))
    assert pushed(pair) == len(PROMPT)
    pair.assert_drained()


def test_the_decode_leg_may_come_in_the_middle_of_the_prefill(make_pair):
    pair = make_pair(source=SMALL_CHUNKS)
    pair.begin_prefill("x-1", LONG)
    for _ in range(4):
        pair.source.step()
    pair.finish(pair.decode("x-1", LONG, mode=Mode.PUSH))
    assert pushed(pair) == len(LONG)
    pair.assert_drained()


def test_a_decode_leg_that_waits_for_a_push_is_reported_as_loading_and_not_as_a_queue(make_pair):
    pair = make_pair()
    request_id = pair.decode("x-1", mode=Mode.PUSH)
    run_until(lambda: pair.sink.half._reader.is_loading(request_id), [pair.sink], "the load")
    status = pair.sink.status()
    assert (status.num_waiting, status.num_loading, status.num_slots) == (1, 1, 16)
    pair.begin_prefill("x-1")
    pair.finish(request_id)
    assert pair.sink.status().num_loading == 0
    pair.assert_drained()


def test_the_decode_leg_waits_for_a_prefill_leg_that_comes_late(make_pair):
    pair = make_pair()
    request_id = pair.decode("x-1", mode=Mode.PUSH)
    run_until(lambda: pair.source.half._pusher._source._registrations, [pair.sink], "the registration")
    pair.begin_prefill("x-1")
    pair.finish(request_id)
    assert pushed(pair) == len(PROMPT)
    pair.assert_drained()


def test_a_local_prefix_hit_is_not_written_again(make_pair):
    pair = make_pair()
    pair.finish(pair.push("x-1", WHOLE_BLOCKS))
    longer = [*WHOLE_BLOCKS, *PROMPT]
    pair.finish(pair.push("x-2", longer))
    assert pushed(pair) == len(WHOLE_BLOCKS) + len(PROMPT)
    assert pair.sink.count("local_hit_tokens", "decode") == len(WHOLE_BLOCKS)
    pair.assert_drained()


def test_a_full_local_hit_tells_the_source_that_it_is_not_needed(make_pair):
    pair = make_pair()
    prompt = [*WHOLE_BLOCKS, 1]
    for transfer_id in ("x-1", "x-2"):
        pair.finish(pair.push(transfer_id, prompt))
    assert pushed(pair) == len(prompt)
    assert pair.sink.count("transfers", "push", "full_local_hit") == 1
    pair.assert_drained()


def test_a_prefix_that_the_source_has_cached_is_pushed_like_the_rest(make_pair):
    pair = make_pair(source={"num_blocks": 100})
    pair.source.add("before", WHOLE_BLOCKS)
    run_until(lambda: pair.source.has_finished("before"), [pair.source], "the first request")
    computed = pair.source.model.num_computed_tokens
    pair.finish(pair.push("x-1", [*WHOLE_BLOCKS, *PROMPT]))
    assert pair.source.model.num_computed_tokens - computed <= len(PROMPT) + 1
    assert pushed(pair) == len(WHOLE_BLOCKS) + len(PROMPT)
    pair.assert_drained()


def test_many_pushes_at_once_between_the_same_two_engines(make_pair):
    pair = make_pair(source={"num_blocks": 200, **SMALL_CHUNKS}, sink={"num_blocks": 200})
    prompts = {f"x-{n}": [n * 1000 + index for index in range(30 + 17 * n)] for n in range(8)}
    pair.finish(*itertools.starmap(pair.push, prompts.items()))
    assert pushed(pair) == sum(map(len, prompts.values()))
    pair.assert_drained()


def test_tensor_parallel_ranks_each_write_their_own_share(make_pair):
    pair = make_pair(source={"num_ranks": 2, **SMALL_CHUNKS}, sink={"num_ranks": 2})
    pair.finish(pair.push("x-1", LONG))
    assert pushed(pair) == len(LONG)
    assert pair.sink.model.num_computed_tokens == 3
    pair.assert_drained()


def test_a_prefill_that_is_preempted_is_written_again(make_pair):
    pair = make_pair(source={"num_blocks": 30, **SMALL_CHUNKS})
    source = pair.source
    occupants = [source.add(f"o-{n}", [n] * (BLOCK_SIZE // 2), max_tokens=1000).request_id for n in range(1, 11)]
    run_until(lambda: all(source.answers[each].tokens for each in occupants), [source], "all to run")
    prompt = [900 + index for index in range(15 * BLOCK_SIZE)]
    request_id = pair.push("x-1", prompt)
    boxes = source.workers[0]._worker._comm._writes._writer._outboxes
    run_until(lambda: boxes, [pair.sink], "the registration to reach the worker")
    (box,) = boxes.values()
    for _ in range(3):
        source.step()
    run_until(lambda: box._next_index > 0 and not box._under_way, [pair.sink], "the first blocks to be written")
    # It fitted when it was admitted, and does not any more when each of the others needs a second block.
    run_until(lambda: source.num_preemptions("prefill-2"), [source], "a preemption")
    for each in occupants:
        source.abort(each)
    pair.finish(request_id)
    assert pushed(pair) == len(prompt)
    pair.assert_drained()
    report(source)
    assert source.count("transfer_bytes", "write") > 15 * 2 * 1024


# -- when it fails -----------------------------------------------------------------------------------


def test_other_tokens_under_the_handle_are_computed_and_not_used(make_pair):
    pair = make_pair()
    pair.begin_prefill("x-1")
    pair.finish(pair.decode("x-1", [1, *PROMPT], mode=Mode.PUSH))
    assert pushed(pair) == 0
    assert pair.sink.count("transfers", "push", "declined_other_tokens") == 1


def test_an_aborted_prefill_makes_the_decode_leg_compute(make_pair):
    pair = make_pair(source={"extra": HASTY, **SMALL_CHUNKS}, sink={"extra": HASTY})
    request_id = pair.push("x-1", LONG)
    run_until(lambda: pair.source.half._pusher._source._registrations, [pair.sink], "the registration")
    pair.source.step()
    pair.source.abort("prefill-2")
    pair.finish(request_id)
    assert pushed(pair) == 0
    pair.assert_drained()


def test_an_aborted_decode_leg_ends_the_writes_and_frees_everything(make_pair):
    pair = make_pair(source=SMALL_CHUNKS)
    request_id = pair.push("x-1", LONG)
    for _ in range(3):
        step_apart(pair)
    pair.sink.abort(request_id)
    run_until(lambda: pair.source.has_finished("prefill-2"), [pair.source, pair.sink], "the prefill leg")
    pair.assert_drained()


def test_a_prefill_leg_that_never_comes_is_not_waited_for_long(make_pair):
    pair = make_pair(sink={"extra": HASTY})
    pair.finish(pair.decode("x-1", mode=Mode.PUSH))
    assert pair.sink.count("transfers", "push", "went_quiet") == 1
    assert pair.sink.count("transfers", "read", "denied_unknown_handle") == 1
    pair.assert_drained()


def test_a_lost_commit_is_made_good_by_a_read(make_pair):
    pair = make_pair(sink={"extra": HASTY})
    comm = pair.sink.workers[0]._worker._comm
    comm._arrivals.take = lambda notifications: None
    pair.finish(pair.push("x-1"))
    assert pair.sink.count("transfers", "push", "went_quiet") == 1
    assert pair.sink.count("transfers", "read", "read_ok") == 1
    assert pair.sink.model.num_computed_tokens == 3
    pair.assert_drained()


def test_a_source_that_is_killed_is_noticed_and_its_prompt_computed(make_pair):
    pair = make_pair(source=SMALL_CHUNKS)
    request_id = pair.push("x-1", LONG)
    run_until(lambda: pair.source.half._pusher._source._registrations, [pair.sink], "the registration")
    pair.source.step()
    pair.restart_source()
    pair.finish(request_id)
    assert pair.sink.count("transfers", "push", "declined_other_incarnation") == 1
    pair.assert_drained()


def test_a_stopped_source_leaves_the_blocks_in_quarantine_until_it_goes_on(make_pair):
    pair = make_pair(source={"extra": HASTY, **SMALL_CHUNKS}, sink={"extra": UNCONFIRMED, "num_blocks": 100})
    request_id = pair.push("x-1", LONG)
    run_until(lambda: pair.source.half._pusher._source._registrations, [pair.sink], "the registration")
    pair.source.step()
    with pair.stopped(pair.source):
        pair.finish_alone(request_id)
        num_blocks = -(-len(LONG) // BLOCK_SIZE)
        assert pair.sink.half._holder.num_quarantined_blocks == num_blocks
    run_until(lambda: pair.source.has_finished("prefill-2"), [pair.source, pair.sink], "the prefill leg")
    pair.assert_drained()


def test_a_sink_that_is_killed_costs_the_source_one_lease(make_pair):
    pair = make_pair(
        source={"extra": {**HASTY, "lease_s": 1.0}, **SMALL_CHUNKS}, sink={"extra": {**HASTY, "lease_s": 1.0}}
    )
    pair.push("x-1", LONG)
    run_until(lambda: pair.source.half._pusher._source._registrations, [pair.sink], "the registration")
    pair.source.step()
    pair.kill(pair.sink)
    run_until(lambda: pair.source.has_finished("prefill-2"), [pair.source], "the prefill leg")
    pair.assert_drained()


def test_what_the_router_does_not_want_any_more_is_not_held_when_it_is_computed(make_pair):
    pair = make_pair()
    prefill = pair.begin_prefill("x-1")
    ask_side(pair.source.half.address, Release(handles=("x-1",)))
    run_until(lambda: pair.source.has_finished(prefill), [pair.source], "the prefill leg")
    said = parse_result(pair.source.answers[prefill].kv_transfer_params)
    assert (said.num_tokens, said.num_cached_tokens) == (0, 0)
    pair.assert_drained()


def test_a_push_and_a_pull_at_the_same_time_do_not_disturb_each_other(make_pair):
    pair = make_pair()
    pair.prefill("x-1")
    pair.finish(pair.decode("x-1"), pair.push("x-2", WHOLE_BLOCKS))
    assert pair.sink.count("transfer_tokens", "read") == len(PROMPT)
    assert pushed(pair) == len(WHOLE_BLOCKS)
    pair.assert_drained()


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize("num_steps", range(0, 14, 2))
def test_an_abort_of_either_leg_at_any_moment_leaves_nothing_behind(make_pair, num_steps, leg):
    pair = make_pair(source={"extra": HASTY, **SMALL_CHUNKS}, sink={"extra": HASTY})
    request_id = pair.push("x-1", LONG)
    for _ in range(num_steps):
        step_apart(pair)
    if leg == "prefill":
        pair.source.abort("prefill-2")
        pair.finish(request_id)
    else:
        pair.sink.abort(request_id)
        run_until(lambda: pair.source.has_finished("prefill-2"), [pair.source, pair.sink], "the prefill leg")
    pair.assert_drained()


def test_three_decode_legs_of_one_prompt_are_all_written_to(make_pair):
    pair = make_pair(source=SMALL_CHUNKS, sink={"num_blocks": 100})
    requests = [pair.decode("x-1", LONG, mode=Mode.PUSH) for _ in range(3)]
    run_until(lambda: len(pair.source.half._pusher._source._registrations) == 3, [pair.sink], "registrations")
    pair.begin_prefill("x-1", LONG)
    pair.finish(*requests)
    assert pair.sink.count("transfers", "push", "received") == 3
    pair.assert_drained()


def test_two_sinks_are_written_to_by_one_source_at_the_same_time(make_pair):
    pair = make_pair(source={"num_blocks": 120, **SMALL_CHUNKS})
    other = pair.start("other")
    request_id = pair.push("x-1", LONG)
    other.add("decode-other", WHOLE_BLOCKS, pair.leg("x-2", Mode.PUSH), max_tokens=3)
    pair.begin_prefill("x-2", WHOLE_BLOCKS)
    engines = [pair.source, pair.sink, other]
    run_until(lambda: pair.sink.has_finished(request_id) and other.has_finished("decode-other"), engines, "both")
    assert other.count("transfer_tokens", "push") == len(WHOLE_BLOCKS)
    assert pushed(pair) == len(LONG)
    pair.assert_drained()


def test_one_sink_is_written_to_by_two_sources_at_the_same_time(make_pair):
    pair = make_pair(source=SMALL_CHUNKS, sink={"num_blocks": 100})
    first = pair.push("x-1", LONG)
    one = pair.source
    pair.source = pair.start("another", **SMALL_CHUNKS)
    pair.card = pair.source.card
    second = pair.push("x-2", [9, *LONG])
    run_until(lambda: pair.sink.has_finished(first, second), [one, pair.source, pair.sink], "both")
    for request_id in (first, second):
        pair.check_answer(request_id)
    assert pushed(pair) == 2 * len(LONG) + 1
    pair.assert_drained()


def test_a_decode_leg_without_room_is_registered_when_there_is_some(make_pair):
    pair = make_pair(sink={"num_blocks": 30})
    occupant = pair.sink.add("occupant", [3] * 200, max_tokens=10_000)
    pair.sink.step()
    request_id = pair.push("x-1", LONG)
    run_until(lambda: pair.source.has_finished("prefill-2"), [pair.source, pair.sink], "the prefill leg")
    pair.sink.abort(occupant.request_id)
    pair.finish(request_id)
    assert pushed(pair) == len(LONG)
    pair.assert_drained()
