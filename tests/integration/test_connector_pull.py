"""Pull hand-off between two complete engines: what moves, and that nothing stays behind."""

from support import quiet_vllm  # noqa: F401 - before anything that imports vLLM

# isort: split
import itertools

import pytest

from kvshuttle.handoff.messages import Release
from support.engine_pair import PATIENT, PROMPT
from support.side import ask_side
from support.vllm_engine import BLOCK_SIZE, run_until

WHOLE_BLOCKS = [7 * index + 3 for index in range(4 * BLOCK_SIZE)]


def read(pair):
    """Tokens that the sink moved and used."""
    return pair.sink.count("transfer_tokens", "read")


def test_a_prompt_computed_at_the_source_is_only_read_at_the_sink(make_pair):
    pair = make_pair()
    result = pair.prefill("x-1")
    assert (result.transfer_id, result.num_tokens, result.lease_s) == ("x-1", len(PROMPT), PATIENT["lease_s"])
    pair.finish(pair.decode("x-1", max_tokens=5))
    # The last prompt token and the answer's but the last.
    assert pair.sink.model.num_computed_tokens == 5
    assert read(pair) == len(PROMPT)
    assert pair.sink.count("transfers", "read", "read_ok") == 1
    assert pair.sink.count("transfer_bytes", "read") == 5 * 2 * 1024
    pair.assert_drained()


@pytest.mark.parametrize("num_tokens", [1, 2, 15, 16, 17, 47, 48, 49, 128, 129, 300])
def test_prompts_of_every_shape_are_read_whole(make_pair, num_tokens):
    pair = make_pair()
    prompt = [5 * index + 11 for index in range(num_tokens)]
    pair.prefill("x-1", prompt)
    pair.finish(pair.decode("x-1", prompt))
    # A prompt of one token is computed: the engine always computes the last one.
    assert read(pair) == (num_tokens if num_tokens > 1 else 0)
    pair.assert_drained()


def test_an_engine_that_holds_for_a_reader_idles(make_pair):
    pair = make_pair()
    pair.prefill("x-1")
    assert pair.source.is_idle()
    status = pair.source.status()
    assert (status.num_holdings, status.num_held_blocks, status.num_leases) == (1, 5, 0)
    assert status.num_free_blocks == pair.source.options.num_blocks - 1 - 5
    pair.finish(pair.decode("x-1"))
    pair.assert_drained()


def test_blocks_let_go_while_the_engine_idles_count_as_free_and_can_be_had_at_once(make_pair):
    pair = make_pair(source={"num_blocks": 7})
    pair.prefill("x-1")
    ask_side(pair.source.half.address, Release(handles=("x-1",)))
    assert pair.source.num_free_blocks == 1
    assert pair.source.status().num_free_blocks == 6
    pair.prefill("x-2", [9] * 90)  # needs all six
    ask_side(pair.source.half.address, Release(handles=("x-2",)))
    pair.assert_drained()


def test_a_local_prefix_hit_shortens_the_read(make_pair):
    pair = make_pair()
    pair.prefill("x-1", WHOLE_BLOCKS)
    pair.finish(pair.decode("x-1", WHOLE_BLOCKS))
    longer = [*WHOLE_BLOCKS, *PROMPT]
    pair.prefill("x-2", longer)
    pair.finish(pair.decode("x-2", longer))
    assert read(pair) == len(WHOLE_BLOCKS) + len(PROMPT)
    assert pair.sink.count("local_hit_tokens", "decode") == len(WHOLE_BLOCKS)
    pair.assert_drained()


def test_a_full_local_hit_reads_nothing_and_releases_the_source(make_pair):
    pair = make_pair()
    prompt = [*WHOLE_BLOCKS, 1]
    for transfer_id in ("x-1", "x-2"):
        pair.prefill(transfer_id, prompt)
        pair.finish(pair.decode(transfer_id, prompt))
    assert read(pair) == len(prompt)
    assert pair.sink.count("transfers", "read", "full_local_hit") == 1
    pair.assert_drained()


def test_only_the_verified_common_prefix_is_used(make_pair):
    pair = make_pair()
    pair.prefill("x-1")
    other = [*PROMPT[: 2 * BLOCK_SIZE + 3], 7, *PROMPT[2 * BLOCK_SIZE + 4 :]]
    pair.finish(pair.decode("x-1", other))
    assert read(pair) == 2 * BLOCK_SIZE
    pair.assert_drained()


def test_a_prompt_of_other_tokens_is_recomputed(make_pair):
    pair = make_pair()
    pair.prefill("x-1")
    pair.finish(pair.decode("x-1", [1, *PROMPT]))
    assert read(pair) == 0
    assert pair.sink.count("transfers", "read", "denied_no_common_prefix") == 1
    # Denied is not released: the holding stays for its lease, since another reader may still come.
    assert pair.source.status().num_holdings == 1


def test_a_cache_salt_makes_other_kv_of_the_same_tokens(make_pair):
    pair = make_pair()
    pair.prefill("x-1")
    pair.finish(pair.decode("x-1", cache_salt="somebody else"))
    assert read(pair) == 0


def test_two_prompts_under_one_transfer_id_find_their_own_blocks(make_pair):
    pair = make_pair()
    prompts = [PROMPT, WHOLE_BLOCKS]
    for prompt in prompts:
        pair.prefill("x-1", prompt)
    pair.finish(*[pair.decode("x-1", prompt) for prompt in reversed(prompts)])
    assert read(pair) == sum(map(len, prompts))
    pair.assert_drained()


def test_three_readers_of_one_handle_all_read_it(make_pair):
    pair = make_pair()
    pair.prefill("x-1")
    pair.fabric.stop(pair.agent(pair.source))  # so that none releases before all have acquired
    requests = [pair.decode("x-1") for _ in range(3)]
    run_until(lambda: pair.source.status().num_leases == 3, [pair.sink], "three leases")
    pair.fabric.resume(pair.agent(pair.source))
    pair.finish(*requests)
    assert pair.sink.count("transfers", "read", "read_ok") == 3
    pair.assert_drained()


def test_many_requests_at_once(make_pair):
    pair = make_pair(source={"num_blocks": 200}, sink={"num_blocks": 200})
    prompts = {f"x-{n}": [n * 1000 + index for index in range(30 + 17 * n)] for n in range(8)}
    for transfer_id, prompt in prompts.items():
        pair.prefill(transfer_id, prompt)
    pair.finish(*itertools.starmap(pair.decode, prompts.items()))
    assert read(pair) == sum(map(len, prompts.values()))
    pair.assert_drained()


def test_a_request_is_read_once_though_it_is_preempted_later(make_pair):
    pair = make_pair(sink={"num_blocks": 13})
    others = [[n * 500 + index for index in range(60)] for n in (1, 2)]
    for number, prompt in enumerate(others):
        pair.prefill(f"x-{number}", prompt)
    pair.fabric.stop(pair.agent(pair.source))
    requests = [pair.decode(f"x-{number}", prompt, max_tokens=50) for number, prompt in enumerate(others)]
    comm = pair.sink.workers[0]._worker._comm
    run_until(lambda: len(comm._reads._reads) == 2, [pair.sink], "two reads to be posted")
    pair.fabric.resume(pair.agent(pair.source))
    # Both requests run from the same step on, so that there is not room for both answers.
    run_until(lambda: comm._outcomes.qsize() == 2, [], "two reads to end")
    pair.finish(*requests)
    assert sum(pair.sink.num_preemptions(request_id) for request_id in requests) > 0
    assert sum(pair.sink.metrics.data.get(f"transfers|read|{each}", 0) for each in ("read_ok", "aborted")) == 2
    pair.assert_drained()


def test_leases_are_renewed_while_the_request_waits_for_room(make_pair):
    options = {**PATIENT, "lease_s": 4.0}
    pair = make_pair(source={"extra": options}, sink={"extra": options, "num_blocks": 9})
    occupant = pair.sink.add("occupant", [3] * 100, max_tokens=10_000)
    pair.sink.step()
    pair.prefill("x-1")
    request_id = pair.decode("x-1")
    counters = pair.source.half._holder.ledger.counters
    run_until(lambda: counters.renewed >= 4, [pair.source], "more than a lease to pass")
    pair.sink.abort(occupant.request_id)
    pair.finish(request_id)
    assert read(pair) == len(PROMPT)
    pair.assert_drained()


def test_tensor_parallel_ranks_each_read_their_own_share(make_pair):
    pair = make_pair(source={"num_ranks": 2}, sink={"num_ranks": 2})
    pair.prefill("x-1")
    pair.finish(pair.decode("x-1"))
    assert read(pair) == len(PROMPT)
    assert pair.sink.model.num_computed_tokens == 3
    assert len(pair.sink.metrics.data["transfer_wire_seconds|read"]) == 2
    pair.assert_drained()


def test_the_peers_pool_may_be_of_another_size(make_pair):
    pair = make_pair(source={"num_blocks": 40}, sink={"num_blocks": 16})
    pair.prefill("x-1")
    pair.finish(pair.decode("x-1"))
    assert read(pair) == len(PROMPT)


def test_what_the_engine_declines_is_not_read(make_pair):
    pair = make_pair()
    pair.prefill("x-1")
    request_id = pair.decode("x-1")
    pair.sink.scheduler.requests[request_id].skip_reading_prefix_cache = True
    pair.finish(request_id)
    assert read(pair) == 0
    assert pair.sink.count("transfers", "read", "engine_declined") == 1
    pair.assert_drained()


def test_vllm_can_reset_its_cache_once_the_connector_was_reset(make_pair):
    pair = make_pair()
    pair.prefill("x-1")
    assert not pair.source.scheduler.reset_prefix_cache(reset_connector=True)
    assert pair.source.status().num_holdings == 0
    assert pair.source.scheduler.reset_prefix_cache(reset_connector=True)
    pair.finish(pair.decode("x-1"))
    assert pair.sink.count("transfers", "read", "denied_unknown_handle") == 1
    pair.assert_drained()
