"""Pull hand-off when things go wrong: the answer is right all the same, the reason is counted, nothing stays behind."""

from support import quiet_vllm  # noqa: F401 - before anything that imports vLLM

# isort: split
import logging
import random
import time

import msgspec
import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from kvshuttle.clock import now_s
from kvshuttle.handoff.cards import Fingerprint
from kvshuttle.handoff.messages import Acquire, HelloAck, Refused, Release
from kvshuttle.handoff.params import DecodeLeg, Peer, to_params
from kvshuttle.handoff.wire import MessageCodec
from kvshuttle.transport.endpoint import Endpoint
from kvshuttle.transport.faulty import Faults, FaultyTransport
from kvshuttle.transport.memory import MemoryTransport
from kvshuttle.transport.side_channel import SideChannelThread
from support.engine_pair import PATIENT, PROMPT
from support.side import ask_side
from support.vllm_engine import BLOCK_SIZE, run_until

SHORT_READ = {**PATIENT, "read_timeout_s": 1.0}
SHORT_ACQUIRE = {**PATIENT, "acquire_timeout_s": 0.5}
NUM_BLOCKS_READ = 5


def outcomes(pair):
    """How the sink's hand-offs ended."""
    prefix = "transfers|read|"
    return {key.removeprefix(prefix): n for key, n in pair.sink.metrics.data.items() if key.startswith(prefix)}


def assert_recomputed(pair, outcome):
    """One hand-off, which ended so and moved nothing that was used."""
    assert outcomes(pair) == {outcome: 1}
    assert pair.sink.count("transfer_tokens", "read") == 0


def faulty(pair_of, name, faults):
    """Makes a sink's transport that fails as ``faults`` says."""
    return lambda rank: FaultyTransport(
        MemoryTransport(pair_of().fabric, f"{name}{rank}"), faults=faults, rng=random.Random(rank)
    )


def start_sink(pair, **fields):
    """Another sink than the one that every pair has."""
    pair.sink = pair.start("other sink", **fields)


def reading(pair, transfer_id="x-1", **fields):
    """A decode leg whose read has been posted and does not move, since the source is stopped."""
    pair.prefill(transfer_id)
    pair.fabric.stop(pair.agent(pair.source))
    request_id = pair.decode(transfer_id, **fields)
    reads = pair.sink.workers[0]._worker._comm._reads
    run_until(lambda: reads.is_any_live, [pair.sink], "the read to be posted")
    return request_id


def end_quarantine(pair):
    """The hanging reads go on and end; the engine hears of it in its next step, which takes a request."""
    for rank in range(len(pair.source.workers)):
        pair.fabric.resume(pair.agent(pair.source, rank))
    reads = [worker._worker._comm._reads for worker in pair.sink.workers]
    run_until(lambda: not any(each._reads for each in reads), [], "the reads to end")
    pair.finish_alone(pair.sink.add("next", [1, 2, 3]).request_id)
    assert pair.sink.metrics.data["quarantined_blocks"] == 0


# -- aborts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_stopped", [False, True], ids=["reading", "read stands still"])
@pytest.mark.parametrize("num_steps", range(10))
def test_an_abort_at_any_moment_leaves_nothing_behind(make_pair, num_steps, is_stopped):
    pair = make_pair()
    pair.prefill("x-1")
    if is_stopped:
        pair.fabric.stop(pair.agent(pair.source))
    request_id = pair.decode("x-1", max_tokens=20)
    for _ in range(num_steps):
        pair.sink.step()
    pair.sink.abort(request_id)
    pair.sink.step()
    if is_stopped:
        pair.fabric.resume(pair.agent(pair.source))
    pair.assert_drained()


def test_an_abort_while_the_step_runs_leaves_nothing_behind(make_pair):
    pair = make_pair()
    pair.prefill("x-1")
    request_id = pair.decode("x-1", max_tokens=20)
    aborted_in = []

    def abort_once():
        if pair.sink.half._reader._loads and not aborted_in:
            aborted_in.append(pair.sink.num_steps)
            pair.sink.abort(request_id)

    pair.sink.between = abort_once
    run_until(lambda: bool(aborted_in), [pair.sink], "the load to be admitted")
    pair.assert_drained()


def test_an_abort_while_a_read_hangs_frees_the_blocks_when_the_read_has_timed_out_and_ended(make_pair):
    pair = make_pair(sink={"extra": SHORT_READ})
    request_id = reading(pair)
    pair.sink.abort(request_id)
    run_until(pair.sink.is_idle, [pair.sink], "the read to time out")
    assert pair.sink.num_free_blocks == pair.sink.options.num_blocks - 1 - NUM_BLOCKS_READ
    end_quarantine(pair)
    pair.assert_drained()


# -- the source goes ---------------------------------------------------------------------------------


def test_a_source_that_died_before_the_acquire(make_pair):
    pair = make_pair(sink={"extra": SHORT_ACQUIRE})
    pair.prefill("x-1")
    pair.kill(pair.source)
    pair.finish_alone(pair.decode("x-1"))
    assert_recomputed(pair, "acquire_timed_out")
    pair.assert_drained()


def test_a_source_that_dies_during_the_read(make_pair):
    pair = make_pair()
    request_id = reading(pair)
    pair.kill(pair.source)
    pair.finish_alone(request_id)
    assert_recomputed(pair, "read_failed")
    assert pair.sink.count("transfer_failures", "read", "transport_failed") == 1
    pair.assert_drained()


def test_a_source_that_restarts_at_the_same_address_is_another_one(make_pair):
    pair = make_pair()
    pair.prefill("x-1")
    pair.finish(pair.decode("x-1"))
    old = pair.card.incarnation
    pair.restart_source()
    pair.prefill("x-2", [1] * 50)
    stale = pair.sink.add("stale", [1] * 50, pair.leg("x-2", incarnation=old), max_tokens=3)
    pair.finish(stale.request_id)
    assert outcomes(pair) == {"read_ok": 1, "denied_other_incarnation": 1}
    pair.finish(pair.decode("x-2", [*([1] * 50)], cache_salt=""))
    assert outcomes(pair)["denied_other_incarnation"] == 1
    peers = pair.sink.half._reader._asking.peers
    assert len(peers) == 1
    assert len(pair.sink.workers[0]._worker._comm._reads._peers) == 1


def test_kv_moves_again_from_a_restarted_source(make_pair):
    pair = make_pair()
    for life in range(3):
        prompt = [life * 1000 + index for index in range(50)]
        pair.prefill(f"x-{life}", prompt)
        pair.finish(pair.decode(f"x-{life}", prompt))
        pair.restart_source()
    assert outcomes(pair) == {"read_ok": 3}
    pair.assert_drained()


def test_an_expired_lease_is_not_read(make_pair):
    pair = make_pair(source={"extra": {**PATIENT, "lease_s": 0.7}})
    pair.prefill("x-1")
    run_until(lambda: pair.source.status().num_holdings == 0, [pair.sink], "the lease to expire at an idle source")
    assert pair.source.status().num_free_blocks == pair.source.options.num_blocks - 1
    pair.finish(pair.decode("x-1"))
    assert_recomputed(pair, "denied_unknown_handle")
    pair.assert_drained()


# -- reads go wrong ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        (Faults(fail_transfer=1.0), "transport_failed"),
        (Faults(half_write=1.0), "transport_failed"),
        (Faults(fail_post=1.0), "post_failed"),
    ],
)
def test_a_failed_read_is_recomputed(make_pair, faults, reason):
    pair = make_pair()
    start_sink(pair, transport=faulty(lambda: pair, "faulty", faults))
    pair.prefill("x-1")
    pair.finish(pair.decode("x-1"))
    assert_recomputed(pair, "read_failed")
    assert pair.sink.count("transfer_failures", "read", reason) == 1
    pair.assert_drained()


def test_reads_that_are_seen_late_and_released_late_are_still_good(make_pair):
    pair = make_pair()
    start_sink(pair, transport=faulty(lambda: pair, "slow", Faults(keep_release=0.5, delay_polls_max=5)))
    for number in range(4):
        prompt = [number * 1000 + index for index in range(50)]
        pair.prefill(f"x-{number}", prompt)
        pair.finish(pair.decode(f"x-{number}", prompt))
    assert pair.sink.count("transfer_tokens", "read") > 0
    pair.assert_drained()


def test_the_destination_of_a_read_that_hangs_is_kept_back_until_the_read_has_ended(make_pair):
    pair = make_pair(sink={"extra": SHORT_READ, "num_blocks": 13})
    request_id = reading(pair)
    pair.finish_alone(request_id)
    assert_recomputed(pair, "read_failed")
    assert pair.sink.count("transfer_failures", "read", "timed_out") == 1
    assert pair.sink.metrics.data["quarantined_blocks"] == NUM_BLOCKS_READ
    # Everything else of the pool is in use when the late bytes land: the model checks what it attends to.
    busy = [
        pair.sink.add(f"busy-{n}", [n * 50 + index for index in range(40)], max_tokens=8).request_id for n in (1, 2)
    ]
    pair.sink.step()
    pair.fabric.resume(pair.agent(pair.source))
    pair.finish_alone(*busy)
    end_quarantine(pair)
    pair.assert_drained()


def test_one_failing_rank_of_two_fails_the_load_once(make_pair):
    pair = make_pair(source={"num_ranks": 2})
    good, bad = (faulty(lambda: pair, "rank", each) for each in (Faults(), Faults(fail_transfer=1.0)))
    start_sink(pair, num_ranks=2, transport=lambda rank: (good, bad)[rank](rank))
    pair.prefill("x-1")
    pair.finish(pair.decode("x-1"))
    assert_recomputed(pair, "read_failed")
    assert pair.sink.count("transfer_failures", "read", "transport_failed") == 1
    pair.assert_drained()


def test_one_hanging_rank_of_two_keeps_its_destination_back(make_pair):
    pair = make_pair(source={"num_ranks": 2}, sink={"num_ranks": 2, "extra": SHORT_READ})
    pair.prefill("x-1")
    pair.fabric.stop(pair.agent(pair.source, rank=1))
    pair.finish_alone(pair.decode("x-1"))
    assert pair.sink.metrics.data["quarantined_blocks"] == NUM_BLOCKS_READ
    end_quarantine(pair)
    assert_recomputed(pair, "read_failed")
    pair.assert_drained()


def test_a_good_read_under_a_lost_lease_is_recomputed(make_pair):
    pair = make_pair(sink={"extra": {**PATIENT, "lease_s": 3.0}})
    request_id = reading(pair)
    [reading_of] = pair.sink.half._reader._readings.values()
    lease = reading_of.fetch._held
    # Somebody gives the lease back behind the reader's back, and the source puts other KV there.
    ask_side(pair.source.half.address, Release(lease_ids=(lease.lease_id,)))
    pair.source.add("other", [5] * 900)
    run_until(lambda: pair.source.has_finished("other"), [pair.source], "the blocks to be overwritten")
    run_until(lambda: lease.is_lost, [pair.sink], "a renewal to be refused")
    pair.fabric.resume(pair.agent(pair.source))
    pair.finish(request_id)
    assert_recomputed(pair, "read_too_late")
    pair.assert_drained()


def test_a_good_read_is_used_though_the_engine_notices_after_the_end_of_the_lease(make_pair):
    pair = make_pair(sink={"extra": {**PATIENT, "lease_s": 4.0, "read_timeout_s": 3.0}})
    request_id = reading(pair)
    [reading_of] = pair.sink.half._reader._readings.values()
    pair.fabric.resume(pair.agent(pair.source))
    # The engine sits in a long step meanwhile: nobody turns its loop.
    outcomes_of_reads = pair.sink.workers[0]._worker._comm._outcomes
    run_until(lambda: not outcomes_of_reads.empty(), [], "the read to end")
    run_until(lambda: now_s() > reading_of.fetch._held.ends_at_s, [], "the lease to be over")
    pair.finish(request_id)
    assert outcomes(pair) == {"read_ok": 1}
    pair.assert_drained()


# -- peers that do not fit ---------------------------------------------------------------------------


CHANGES = {
    "model": "other/1",
    "kv_dtype": "bfloat16",
    "block_size_tokens": 32,
    "num_layers": 3,
    "num_kv_heads": 4,
    "head_size": 8,
    "tensor_parallel_size": 2,
    "kv_layout": "elsewhere",
    "region_len_bytes": (1024, 2048),
    "chain_scheme": "another",
}


def test_every_field_of_the_fingerprint_is_tried():
    assert set(CHANGES) == set(Fingerprint.__struct_fields__)


@pytest.mark.parametrize("field", CHANGES)
def test_a_peer_that_differs_is_not_read_and_the_field_is_named(make_pair, caplog, field):
    pair = make_pair()
    print_ = msgspec.structs.replace(pair.card.fingerprint, **{field: CHANGES[field]})
    card = msgspec.structs.replace(pair.card, fingerprint=print_)
    assert_refused(pair, caplog, card, "denied_incompatible", field)


def test_a_peer_with_missing_workers_is_not_read(make_pair, caplog):
    pair = make_pair()
    assert_refused(pair, caplog, msgspec.structs.replace(pair.card, workers=()), "denied_incompatible", "workers")


def assert_refused(pair, caplog, card, outcome, detail):
    """The sink asks a source whose card is ``card``, does not acquire, and computes."""
    asked = []
    endpoint = Endpoint(
        codec=MessageCodec(),
        secret=None,
        sender="peer",
        handler=lambda message: asked.append(message) or (HelloAck(card) if len(asked) == 1 else Refused("no")),
        now_s=now_s,
    )
    address = endpoint.bind("127.0.0.1", 0)
    thread = SideChannelThread(endpoint)
    thread.start()
    leg = to_params(DecodeLeg("x-1", Peer(address, card.engine_id, card.incarnation)))
    with caplog.at_level(logging.WARNING, "kvshuttle"):
        pair.finish_alone(pair.sink.add("refused", PROMPT, leg, max_tokens=3).request_id)
    assert thread.stop(5.0)
    assert_recomputed(pair, outcome)
    assert not any(isinstance(message, Acquire) for message in asked)
    assert any(f"{outcome} " in line and detail in line for line in caplog.messages)
    pair.assert_drained()


def test_a_secret_that_differs_is_as_good_as_no_answer(make_pair, monkeypatch):
    pair = make_pair()
    pair.prefill("x-1")
    leg = pair.leg("x-1")
    monkeypatch.setenv("KVSHUTTLE_SECRET", "a secret of the sink alone")
    start_sink(pair, extra=SHORT_ACQUIRE)
    pair.finish_alone(pair.sink.add("alone", PROMPT, leg, max_tokens=3).request_id)
    assert_recomputed(pair, "acquire_timed_out")
    monkeypatch.delenv("KVSHUTTLE_SECRET")
    counts = pair.source.half._side._endpoint.counts
    run_until(lambda: counts["wrong_tag"] >= 1, [], "the source to have got the message")
    assert pair.source.status().num_leases == 0


def test_an_address_that_nobody_has(make_pair):
    pair = make_pair(sink={"extra": SHORT_ACQUIRE})
    for number, address in enumerate(["127.0.0.1:1", "nowhere.invalid:5", "not an address", "", "[::1]:1", "a" * 500]):
        leg = to_params(DecodeLeg(f"x-{number}", Peer(address, "e", "i")))
        pair.finish_alone(pair.sink.add(f"r-{number}", [number] * 20, leg).request_id)
    assert sum(outcomes(pair).values()) == 6
    assert set(outcomes(pair)) <= {"acquire_timed_out", "peer_failed"}
    pair.assert_drained()


def test_failures_cost_the_client_no_more_than_the_acquire_timeout(make_pair):
    pair = make_pair(sink={"extra": SHORT_ACQUIRE})
    pair.prefill("x-1")
    leg = pair.leg("x-1")
    pair.kill(pair.source)
    started_at_s = time.monotonic()
    pair.finish_alone(pair.sink.add("r", PROMPT, leg, max_tokens=1).request_id)
    assert time.monotonic() - started_at_s < SHORT_ACQUIRE["acquire_timeout_s"] + 8.0


def test_a_load_failure_policy_of_fail_is_an_error_and_not_a_wrong_answer(make_pair):
    pair = make_pair()
    start_sink(pair, load_failure_policy="fail", transport=faulty(lambda: pair, "faulty", Faults(fail_transfer=1.0)))
    pair.prefill("x-1")
    request_id = pair.decode("x-1")
    run_until(lambda: pair.sink.has_finished(request_id), [pair.sink], "an error")
    assert pair.sink.answers[request_id].finish_reason == "error"
    assert pair.sink.answers[request_id].tokens == []
    pair.assert_drained()


@pytest.mark.skipif(
    not hasattr(KVConnectorBase_V1, "has_pending_block_frees"), reason="vLLM asks before it preempts from 0.30 on"
)
def test_a_running_request_gets_held_blocks_that_are_due_before_it_is_preempted(make_pair):
    pair = make_pair(source={"num_blocks": 8, "extra": {**PATIENT, "lease_s": 0.6}})
    pair.prefill("x-1", [1] * (2 * BLOCK_SIZE))
    runner = pair.source.add("runner", [2] * (5 * BLOCK_SIZE), max_tokens=10)
    pair.source.step()
    ledger = pair.source.half._holder.ledger
    run_until(lambda: (ledger.next_deadline_at_s() or 0) < now_s(), [], "the lease to be over")
    run_until(lambda: pair.source.has_finished("runner"), [pair.source], "the runner")
    assert runner.num_preemptions == 0
