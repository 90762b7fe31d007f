"""The facade: no hook raises whatever it is given, metadata is passed on once, and a load always gets an end."""

from types import SimpleNamespace

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.outputs import KVConnectorOutput

from kvshuttle.connector import connector as facade
from kvshuttle.connector.connector import ShuttleConnector
from kvshuttle.connector.readings import EngineClock, Reading
from kvshuttle.connector.step_metadata import FailedLoad, ReadOrder, StepMetadata, WorkerReport
from kvshuttle.handoff.block_plan import BlockPlan, BlockRun
from kvshuttle.handoff.claim_states import ClaimState
from kvshuttle.handoff.fetch_protocol import Outcome, PeerFailed
from kvshuttle.handoff.intake import Intake
from kvshuttle.handoff.intake_protocol import BlocksArrived, RegisterAnswered, SendProceed, SendRegister
from kvshuttle.handoff.messages import Acquired, Registered
from kvshuttle.handoff.params import DecodeLeg, Mode, Peer, to_params
from kvshuttle.transport.memory import MemoryFabric, MemoryTransport
from support.vllm_engine import BLOCK_SIZE, EngineOptions, RankConnector, kv_cache_config, vllm_config

SCHEDULER_HOOKS = {
    "on_new_request": 1,
    "get_num_new_matched_tokens": 2,
    "update_state_after_alloc": 3,
    "build_connector_meta": 1,
    "update_connector_output": 1,
    "request_finished": 2,
    "request_finished_all_groups": 2,
    "has_pending_block_frees": 0,
    "reset_cache": 0,
    "get_kv_connector_stats": 0,
    "get_loaded_kv_cache_group_ids": 1,
}
WORKER_HOOKS = {
    "handle_preemptions": 1,
    "start_load_kv": 1,
    "wait_for_layer_load": 1,
    "save_kv_layer": 3,
    "wait_for_save": 0,
    "get_transfer_results": 1,
    "get_finished": 1,
    "get_block_ids_with_load_errors": 0,
    "build_connector_worker_meta": 0,
    "get_kv_connector_stats": 0,
}
GARBAGE = [None, 0, -1, "x", b"", [], {}, object(), SimpleNamespace(request_id="r"), SimpleNamespace(request_id=[])]
SAFE = {
    "get_num_new_matched_tokens": (0, False),
    "request_finished": (False, None),
    "request_finished_all_groups": (False, None),
    "get_finished": (None, None),
    "get_block_ids_with_load_errors": set(),
}


@pytest.fixture
def options():
    fabric = MemoryFabric()
    return EngineOptions("e", lambda rank: MemoryTransport(fabric, f"agent-{rank}"), extra={"acquire_timeout_s": 30.0})


@pytest.fixture
def worker(options, tmp_path):
    import torch

    cache = kv_cache_config(options)
    connector = RankConnector(vllm_config(options, tmp_path), cache, rank=0, transport=lambda: options.transport(0))
    shape = (options.num_blocks, 2, BLOCK_SIZE, 8)
    connector.register_kv_caches({name: torch.zeros(shape) for name in cache.kv_cache_groups[0].layer_names})
    yield connector
    connector.shutdown()


@pytest.fixture
def scheduler(options, worker, tmp_path):
    connector = ShuttleConnector(vllm_config(options, tmp_path), KVConnectorRole.SCHEDULER, kv_cache_config(options))
    connector.set_xfer_handshake_metadata({0: worker.get_handshake_metadata()})
    yield connector
    connector.shutdown()


@pytest.mark.parametrize("hook", SCHEDULER_HOOKS)
def test_a_scheduler_hook_takes_garbage_without_raising(scheduler, worker, hook):
    for garbage in GARBAGE:
        result = getattr(scheduler, hook)(*[garbage] * SCHEDULER_HOOKS[hook])
        assert hook not in SAFE or result == SAFE[hook]
    # Nor on the half that it does not belong to.
    getattr(worker, hook)(*[None] * SCHEDULER_HOOKS[hook])


@pytest.mark.parametrize("hook", WORKER_HOOKS)
def test_a_worker_hook_takes_garbage_without_raising(scheduler, worker, hook):
    for garbage in GARBAGE:
        worker._connector_metadata = garbage
        result = getattr(worker, hook)(*[garbage] * WORKER_HOOKS[hook])
        assert hook not in SAFE or result == SAFE[hook]
    worker._connector_metadata = None
    getattr(scheduler, hook)(*[None] * WORKER_HOOKS[hook])


def test_metadata_is_never_missing(scheduler):
    assert isinstance(scheduler.build_connector_meta(None), StepMetadata)
    assert isinstance(scheduler.build_connector_meta(SimpleNamespace(num_scheduled_tokens={})), StepMetadata)


def test_what_a_hook_caught_is_counted_under_its_name(scheduler, worker):
    scheduler.update_state_after_alloc(None, None, 1)
    assert scheduler.get_kv_connector_stats().data["internal_errors|update_state_after_alloc"] == 1
    worker.handle_preemptions(None)
    assert worker.get_kv_connector_stats().data["internal_errors|handle_preemptions"] == 1


def test_a_guard_answers_with_a_fresh_default():
    class Half:
        def count_internal_error(self, hook):
            pass

        @facade.guarded(dict)
        def hook(self):
            raise ZeroDivisionError

    assert Half().hook() == {}
    assert Half().hook() is not Half().hook()


def test_the_same_metadata_is_passed_on_once_however_many_hooks_show_it(worker):
    step = StepMetadata(failed_loads=[FailedLoad("r", "lease_lost", (1, 2))])
    for _ in range(2):
        worker.handle_preemptions(step)
        worker.bind_connector_metadata(step)
        worker.start_load_kv(None)
    results = worker.get_transfer_results(set())
    assert (results.finished_recving, results.failed_recving) == ({"r"}, {"r"})
    assert worker.build_connector_worker_meta().failed == {"r": "lease_lost"}
    worker.handle_preemptions(step)
    assert worker.get_transfer_results(set()).finished_recving == set()
    assert worker.build_connector_worker_meta() is None


def test_equal_metadata_of_another_step_is_another_step(worker):
    for _ in range(2):
        worker.handle_preemptions(StepMetadata(failed_loads=[FailedLoad("r", "x", (1,))]))
        assert worker.get_transfer_results(set()).finished_recving == {"r"}


def test_an_order_that_cannot_be_passed_on_is_given_up_in_the_end(worker, monkeypatch):
    order = ReadOrder("r", "inc", BlockPlan(0, 1, (BlockRun(1, 2, 1),)), 1.0, 1.0, 0.0, "elsewhere")
    worker.handle_preemptions(StepMetadata(reads=[order], peers={"inc": ()}))  # no card for this rank
    assert worker.get_transfer_results(set()).finished_recving == set()
    monkeypatch.setattr("kvshuttle.connector.worker_half.now_s", lambda: float("inf"))
    assert worker.get_transfer_results(set()).failed_recving == {"r"}


def test_up_to_029_results_and_failed_blocks_come_by_the_older_hooks(worker, monkeypatch):
    monkeypatch.setattr("kvshuttle.connector.vllm_compat.HAS_TRANSFER_RESULTS", False)
    assert worker.get_finished(set()) == (None, None)
    worker.handle_preemptions(StepMetadata(failed_loads=[FailedLoad("r", "lease_lost", (4, 5))]))
    assert worker.get_finished(set()) == (None, {"r"})
    assert worker.get_block_ids_with_load_errors() == {4, 5}
    assert worker.get_block_ids_with_load_errors() == set()


def test_up_to_029_the_pool_comes_by_the_older_hook(scheduler):
    pool = object()
    scheduler.bind_gpu_block_pool(pool)
    assert scheduler._scheduler._holder._pool is pool


def test_ranks_merge_their_reports():
    ours = WorkerReport(failed={"a": "x"})
    ours.undrained["a"] += 1
    theirs = WorkerReport(failed={"a": "y", "b": "z"})
    theirs.undrained["a"] += 1
    theirs.drained["c"] += 1
    merged = ours.aggregate(theirs)
    assert merged.failed == {"a": "x", "b": "z"}
    assert (merged.undrained, merged.drained) == ({"a": 2}, {"c": 1})


def test_nothing_is_passed_to_vllm_that_nobody_waits_for(scheduler):
    output = KVConnectorOutput(finished_recving={"never heard of"}, finished_sending={"nor of this"})
    scheduler.update_connector_output(output)
    assert not output.finished_recving
    assert not output.finished_sending
    assert scheduler.get_kv_connector_stats().data["internal_errors|unexpected_completion"] == 2


# -- a load always gets an end -----------------------------------------------------------------------


class Offered:
    """A decode leg as the scheduler half sees it; that of a pull has its lease."""

    def __init__(self, scheduler, mode=Mode.PULL):
        self.connector = scheduler
        self.half = scheduler._scheduler
        leg = DecodeLeg("x-1", Peer("127.0.0.1:1", "source", "inc"), mode=mode)
        self.request = SimpleNamespace(
            request_id="r",
            kv_transfer_params=to_params(leg),
            prompt_token_ids=list(range(40)),
            num_tokens=40,
            num_computed_tokens=0,
            status=None,
        )
        scheduler.on_new_request(self.request)
        self.reading = self.half._reader._readings["r"]
        if mode is Mode.PULL:
            self.grant()

    def grant(self, **changes):
        fields = {"lease_id": "l", "incarnation": "inc", "num_verified_tokens": 40, "block_ids": (1, 2, 3)}
        answer = Acquired(**{**fields, "remaining_s": 30.0, **changes})
        self.half._reader._asking._on_acquire_reply(self.reading, 0.0, answer)

    def offer(self, num_local_tokens=0):
        return self.connector.get_num_new_matched_tokens(self.request, num_local_tokens)

    def alloc(self, num_tokens, block_ids=(7, 8, 9)):
        blocks = SimpleNamespace(blocks=([SimpleNamespace(block_id=each) for each in block_ids],))
        self.connector.update_state_after_alloc(self.request, blocks, num_tokens)
        return self.connector.build_connector_meta(SimpleNamespace(num_scheduled_tokens={}))

    def settle(self, reason=""):
        report = WorkerReport(failed={"r": reason} if reason else {})
        output = KVConnectorOutput(finished_recving={"r"}, kv_connector_worker_meta=report)
        self.connector.update_connector_output(output)
        return output.finished_recving


@pytest.fixture
def offered(scheduler):
    return Offered(scheduler)


def test_asking_changes_nothing(offered):
    assert [offered.offer(0), offered.offer(16), offered.offer(0)] == [(40, True), (24, True), (40, True)]


def test_a_load_is_ordered_for_what_is_missing(offered):
    assert offered.offer(16) == (24, True)
    [order] = offered.alloc(24).reads
    assert order.plan == BlockPlan(1, 2, (BlockRun(2, 8, 2),))
    assert offered.settle() == {"r"}
    assert offered.reading.fetch.outcome is Outcome.READ_OK
    assert offered.offer(0) == (0, False)


def test_a_lease_that_went_between_the_offer_and_the_allocation_fails_the_load(offered):
    assert offered.offer() == (40, True)
    offered.half._reader.tick(offered.reading.fetch._held.last_submit_at_s)
    step = offered.alloc(40)
    assert not step.reads
    assert step.failed_loads == [FailedLoad("r", "lease_lost", (7, 8, 9))]
    assert offered.settle("lease_lost") == {"r"}
    assert offered.offer() == (0, False)


@pytest.mark.parametrize("block_ids", [(7, 8), (0, 7, 8), (7, 7, 8)], ids=["too few", "null block", "doubled"])
def test_a_load_that_cannot_be_planned_fails_and_is_not_offered_again(offered, block_ids):
    assert offered.offer() == (40, True)
    step = offered.alloc(40, block_ids)
    assert [load.reason for load in step.failed_loads] == ["internal_error"]
    assert offered.settle("internal_error") == {"r"}
    assert offered.offer() == (0, False)
    assert offered.connector.get_kv_connector_stats().data["internal_errors|LoadAdmitted"] == 1


class Pushed(Offered):
    """A decode leg whose blocks the holder was told of, and may write to once it has been told to proceed."""

    def __init__(self, scheduler):
        super().__init__(scheduler, mode=Mode.PUSH)
        self.quarantined = []
        self.reader = self.half._reader
        self.reader._holder.quarantine_soon = lambda *what: self.quarantined.append(what)
        self.asked = []
        self.reader._asking.ask = lambda _, action: self.asked.append(type(action))
        assert self.offer() == (40, True)
        self.alloc(40)
        assert self.asked == [SendRegister]

    def proceed(self):
        self.reader.tell(self.reading, RegisterAnswered(Registered("l", "inc", 30.0)))
        assert self.asked.pop() is SendProceed

    def break_at(self, name):
        """Whatever the machine is told next, it raises."""
        setattr(self.reading.fetch, name, lambda *_, **__: 1 / 0)


@pytest.fixture
def pushed(scheduler):
    return Pushed(scheduler)


def test_blocks_of_a_failed_push_stay_out_of_use_where_its_machine_raised_at_its_end(pushed):
    pushed.proceed()
    pushed.break_at("_on_load_ended")
    assert pushed.settle("post_failed") == {"r"}
    assert pushed.quarantined == [("r", (7, 8, 9))]
    assert not pushed.reader._unsettled
    assert pushed.offer() == (0, False)


def test_a_machine_that_raised_before_its_holder_could_write_never_lets_it(pushed):
    pushed.break_at("_on_load_ended")
    assert pushed.settle("post_failed") == {"r"}
    assert pushed.quarantined == []
    pushed.reader.tell(pushed.reading, RegisterAnswered(Registered("l", "inc", 30.0)))
    assert pushed.asked == [SendRegister]


def test_a_push_whose_machine_raises_on_its_way_is_called_off_and_the_others_go_on(pushed):
    pushed.proceed()
    other = SimpleNamespace(reading=Reading("other", Heard(), "push"))
    pushed.reader._loads["other"] = other
    pushed.break_at("_after_claim")
    pushed.reader.note_pushes({"r", "other"}, {})
    assert pushed.quarantined == [("r", (7, 8, 9))]
    [failed] = pushed.connector.build_connector_meta(SimpleNamespace(num_scheduled_tokens={})).failed_loads
    assert failed == FailedLoad("r", "internal_error", (7, 8, 9), is_push=True)
    assert other.reading.fetch.heard == [BlocksArrived()]
    assert pushed.settle("internal_error") == {"r"}
    assert pushed.connector.get_kv_connector_stats().data["internal_errors|BlocksArrived"] == 1


class Heard(Intake):
    """A machine that only listens."""

    outcome, is_drained = None, False

    def __init__(self):
        self.heard = []

    def on(self, fact, *, now_s):
        self.heard.append(fact)
        return ()

    def tick(self, now_s):
        self.heard.append(now_s)
        return ()

    def next_deadline_at_s(self):
        return 0.0


def test_a_push_that_arrived_whole_after_its_machine_raised_is_not_used(pushed):
    pushed.proceed()
    pushed.break_at("_after_claim")
    pushed.reader.note_pushes({"r"}, {})
    assert not pushed.settle()
    assert pushed.settle("internal_error") == {"r"}


def test_a_read_goes_on_without_its_machine_and_is_not_used(offered, monkeypatch):
    offered.offer()
    assert len(offered.alloc(40).reads) == 1
    monkeypatch.setattr(offered.reading.fetch, "on", lambda *_, **__: 1 / 0)
    offered.half._reader.tell(offered.reading, PeerFailed("gone"))
    step = offered.connector.build_connector_meta(SimpleNamespace(num_scheduled_tokens={}))
    assert step.failed_loads == []  # the workers say when they are done
    assert not offered.settle()
    step = offered.connector.build_connector_meta(SimpleNamespace(num_scheduled_tokens={}))
    assert step.failed_loads == [FailedLoad("r", "internal_error", (7, 8, 9))]
    assert offered.settle("internal_error") == {"r"}


def test_a_machine_that_raises_while_it_is_asked_offers_nothing(offered, monkeypatch):
    monkeypatch.setattr(offered.reading.fetch, "next_deadline_at_s", lambda: 0.0)
    monkeypatch.setattr(offered.reading.fetch, "tick", lambda _: 1 / 0)
    assert offered.offer() == (0, False)
    stats = offered.connector.get_kv_connector_stats().data
    assert (stats["internal_errors|tick"], stats["transfers|read|internal_error"]) == (1, 1)


@pytest.mark.parametrize("mode", [Mode.PULL, Mode.PUSH])
def test_a_machine_that_raised_between_offer_and_allocation_fails_the_load(scheduler, monkeypatch, mode):
    offered = Offered(scheduler, mode)
    assert offered.offer() == (40, True)
    monkeypatch.setattr(offered.reading.fetch, "on", lambda *_, **__: 1 / 0)
    offered.half._reader.tell(offered.reading, PeerFailed("gone"))
    assert offered.alloc(40).failed_loads == [FailedLoad("r", "internal_error", (7, 8, 9))]
    assert offered.settle("internal_error") == {"r"}
    assert not offered.half._reader._unsettled
    assert offered.reading.is_settled


def test_a_machine_whose_deadline_cannot_be_told_is_left_alone_and_the_others_go_on(pushed):
    other = Reading("other", Heard(), "push")
    pushed.reader._unsettled["other"] = other
    pushed.break_at("next_deadline_at_s")
    assert pushed.reader.tick(7.0) == 0.0
    assert pushed.reading.is_broken
    assert other.fetch.heard == [7.0]
    assert pushed.settle("internal_error") == {"r"}
    assert pushed.reader.tick(8.0) == 0.0


def test_a_load_that_had_failed_already_fails_once_when_its_machine_raises(offered):
    assert offered.offer() == (40, True)
    reader = offered.half._reader
    reader.tick(offered.reading.fetch._held.last_submit_at_s)
    assert [load.reason for load in offered.alloc(40).failed_loads] == ["lease_lost"]
    offered.reading.fetch.on = lambda *_, **__: 1 / 0
    reader.tell(offered.reading, PeerFailed("gone"))
    assert reader.step.failed_loads == []
    assert offered.settle("lease_lost") == {"r"}


class Kept(Pushed):
    """The same with the real quarantine, and blocks that know how often they are pinned."""

    def __init__(self, scheduler):
        super().__init__(scheduler)
        del self.reader._holder.quarantine_soon
        self.holder = self.reader._holder
        self.pool = BlockPool(num_gpu_blocks=10, enable_caching=False, hash_block_size=BLOCK_SIZE)
        self.holder.bind_pool(self.pool)
        self.pool.get_new_blocks(9)

    def pins(self):
        """References to the destination besides its request's own, after the engine's next hook."""
        self.holder.return_freed(0.0)
        return [self.pool.blocks[block_id].ref_cnt - 1 for block_id in (7, 8, 9)]


@pytest.fixture
def kept(scheduler):
    return Kept(scheduler)


def test_a_push_that_arrived_whole_leaves_nothing_out_of_use_though_its_machine_raised(kept):
    kept.proceed()
    kept.break_at("_after_claim")
    kept.reader.note_pushes({"r"}, {})
    assert kept.pins() == [1, 1, 1]
    assert not kept.settle()
    assert kept.pins() == [0, 0, 0]
    assert kept.holder.drop_all(0.0)


def test_a_read_in_place_of_a_push_does_not_say_that_the_push_is_over(kept):
    kept.proceed()
    kept.break_at("_after_claim")
    kept.reader.note_pushes({"r"}, {})
    kept.reader._loads["r"].read_ends_at_s = 1e9
    assert not kept.settle()
    assert kept.pins() == [1, 1, 1]


def test_blocks_of_a_quarantined_push_are_kept_once_when_its_machine_raises_too(kept):
    kept.proceed()
    kept.holder.quarantine_soon("r", (7, 8, 9))
    assert kept.pins() == [1, 1, 1]
    kept.break_at("_after_claim")
    kept.reader.note_pushes({"r"}, {})
    assert kept.pins() == [1, 1, 1]
    assert kept.holder.num_quarantined_blocks == 3


def test_a_machine_that_raises_when_all_is_over_gives_its_blocks_back(kept):
    kept.proceed()
    kept.holder.quarantine_soon("r", (7, 8, 9))
    assert kept.pins() == [1, 1, 1]
    kept.reading.fetch.claim.state = ClaimState.OVER
    kept.break_at("_after_claim")
    kept.reader.note_pushes({"r"}, {})
    assert kept.pins() == [0, 0, 0]


def test_a_machine_that_raises_holds_up_no_deadline_of_others_and_no_end_of_its_request(pushed):
    other = Reading("other", Heard(), "push")
    pushed.reader._unsettled["other"] = other
    pushed.break_at("tick")
    pushed.break_at("_on_request_ended")
    deadline_at_s = pushed.reading.fetch.next_deadline_at_s()
    pushed.reader.tick(deadline_at_s + 1.0)
    assert other.fetch.heard == [deadline_at_s + 1.0]
    pushed.reader.end("r")
    assert "r" not in pushed.reader._readings


def test_a_load_that_was_never_offered_is_not_waited_for_by_mistake(offered):
    offered.offer(16)
    [failed] = offered.alloc(40).failed_loads  # 16 + 40 tokens of a prompt of 40
    assert failed.reason == "internal_error"


def test_an_offer_beyond_the_request_never_reaches_vllm(offered):
    offered.request.num_tokens = 39
    assert offered.offer() == (0, False)


def test_a_completion_is_passed_on_once(offered):
    offered.offer()
    offered.alloc(40)
    assert offered.settle() == {"r"}
    assert not offered.settle()


def test_a_good_read_of_a_lost_lease_is_withheld_and_then_fails(offered):
    offered.offer()
    offered.alloc(40)
    offered.reading.fetch._held.is_lost = True
    assert not offered.settle()
    step = offered.connector.build_connector_meta(SimpleNamespace(num_scheduled_tokens={}))
    assert step.failed_loads == [FailedLoad("r", "read_too_late", (7, 8, 9))]
    assert offered.settle("read_too_late") == {"r"}
    assert offered.connector.get_kv_connector_stats().data["transfers|read|read_too_late"] == 1


@pytest.mark.parametrize(("is_shared", "is_trusted"), [(True, True), (False, False)])
def test_workers_of_another_clock_are_not_believed_when_the_lease_is_over(offered, monkeypatch, is_shared, is_trusted):
    reader = offered.half._reader
    reader._clock = EngineClock("here", is_shared=is_shared)
    offered.offer()
    offered.alloc(40)
    ends_at_s = offered.reading.fetch._held.ends_at_s
    monkeypatch.setattr("kvshuttle.connector.reader.now_s", lambda: ends_at_s + 1.0)
    assert offered.settle() == ({"r"} if is_trusted else set())


def test_a_request_that_ended_meanwhile_is_passed_on_whatever_came_of_its_read(offered):
    offered.offer()
    offered.alloc(40)
    assert offered.connector.request_finished_all_groups(offered.request, ([],)) == (False, None)
    offered.reading.fetch._held.is_lost = True
    assert offered.settle() == {"r"}
    assert repr(offered.half._reader) == "<Reader readings=0 unsettled=0 loads=0 peers=0>"


def test_a_preempted_request_is_not_fetched_again(offered):
    offered.offer()
    offered.alloc(40)
    offered.settle()
    offered.request.num_tokens = 45
    assert offered.offer(32) == (0, False)
    offered.alloc(0)
    assert offered.connector.get_kv_connector_stats().data["transfers|read|read_ok"] == 1


def test_a_question_ends_with_its_deadline_though_the_side_channel_is_stuck(scheduler, monkeypatch):
    offered = Offered.__new__(Offered)
    monkeypatch.setattr(Offered, "grant", lambda self: None)
    offered.__init__(scheduler)
    assert offered.offer() == (None, False)
    deadline_at_s = offered.reading.fetch.next_deadline_at_s()
    monkeypatch.setattr("kvshuttle.connector.reader.now_s", lambda: deadline_at_s)
    assert offered.offer() == (0, False)
    assert offered.reading.fetch.outcome is Outcome.ACQUIRE_TIMED_OUT


def test_a_worker_that_does_not_know_the_peer_has_it_introduced_again(offered):
    reader = offered.half._reader
    reader._asking.peers.meet("127.0.0.1:1", reader._card, reader.step, in_use=(), now_s=0.0)
    reader._readings["r"].fetch.source = Peer("127.0.0.1:1", "source", reader._card.incarnation)
    offered.offer()
    offered.alloc(40)
    offered.settle("peer_unknown")
    assert len(reader._asking.peers) == 0
    assert reader.take_step().gone == [reader._card.incarnation]


def test_hooks_of_an_idle_step_cost_little(scheduler):
    import timeit

    output = SimpleNamespace(num_scheduled_tokens={})

    def step():
        scheduler.build_connector_meta(output)
        scheduler.update_connector_output(KVConnectorOutput())
        scheduler.get_kv_connector_stats()

    assert min(timeit.repeat(step, number=200, repeat=5)) / 200 < 0.0005


def test_a_settled_request_costs_the_clock_nothing(offered):
    reader = offered.half._reader
    assert reader.tick(0.0) is not None
    offered.offer()
    offered.alloc(40)
    offered.settle()
    assert list(reader._readings) == ["r"]
    assert not reader._unsettled
    assert reader.tick(float("inf")) is None
