"""What is kept for later turns gives way, oldest first, before any request waits or is preempted for it."""

from support import quiet_vllm  # noqa: F401 - before anything that imports vLLM

# isort: split
import pytest

from kvshuttle.handoff.messages import Acquire, Acquired, Release
from kvshuttle.handoff.params import History, Keep, LocalLeg, PrefillLeg, to_params
from support.checked_model import answer
from support.conversation import peer_of
from support.engine_pair import PATIENT
from support.side import ask_side
from support.vllm_engine import BLOCK_SIZE, run_until

NUM_BLOCKS = 101
KEEPING = {**PATIENT, "kv_recompute_threshold": 0, "retention_max_fraction": 0.9}
NOT_KEEPING = {**PATIENT, "retention_max_fraction": 0.0}
NUM_HANDLES = 15
HANDLE_BLOCKS = 6


def prompt_of(number, num_tokens=HANDLE_BLOCKS * BLOCK_SIZE):
    return [number * 1000 + index for index in range(num_tokens)]


def keep(engine, number, *, num_tokens=HANDLE_BLOCKS * BLOCK_SIZE):
    """Answer a request and keep its prompt's blocks."""
    request_id = f"keep-{number}-{engine.num_steps}"
    engine.add(request_id, prompt_of(number, num_tokens), to_params(LocalLeg(keep=Keep(f"h-{number}"))), max_tokens=1)
    run_until(lambda: engine.has_finished(request_id), [engine], "an answer")
    engine.step()


def handles(engine):
    return list(engine.half._holder.ledger.handles())


@pytest.fixture
def full(make_pair):
    """An engine whose pool is kept full to nine tenths, one like it that keeps nothing, and a reader."""
    pair = make_pair(
        source={"num_blocks": NUM_BLOCKS, "extra": KEEPING}, sink={"num_blocks": NUM_BLOCKS, "extra": NOT_KEEPING}
    )
    for number in range(NUM_HANDLES):
        for engine in (pair.source, pair.sink):
            keep(engine, number)
    status = pair.source.status()
    assert (status.num_retained_handles, status.num_retained_blocks) == (NUM_HANDLES, NUM_HANDLES * HANDLE_BLOCKS)
    assert pair.source.num_free_blocks == NUM_BLOCKS - 1 - NUM_HANDLES * HANDLE_BLOCKS
    assert status.num_free_blocks == NUM_BLOCKS - 1
    assert pair.sink.num_free_blocks == NUM_BLOCKS - 1
    return pair


LOADS = {
    "one long prompt": [(90 * BLOCK_SIZE, 8)],
    "many short ones": [(20, 40)] * 16,
    "long answers": [(3 * BLOCK_SIZE, 150)] * 6,
    "a mix": [(30 * BLOCK_SIZE, 30), (5, 100), (200, 60), (33, 90), (10 * BLOCK_SIZE, 5)],
    "more than fits": [(40 * BLOCK_SIZE, 40)] * 5,
    "as before": [(HANDLE_BLOCKS * BLOCK_SIZE, 30)] * NUM_HANDLES,
}


@pytest.mark.parametrize("load", LOADS)
def test_every_request_is_admitted_and_answered_in_the_same_step_as_if_nothing_were_kept(full, load):
    keeping, plain = full.source, full.sink
    requests = [f"load-{index}" for index in range(len(LOADS[load]))]
    for engine in (keeping, plain):
        for index, (num_tokens, max_tokens) in enumerate(LOADS[load]):
            number = index if load == "as before" else 100 + index
            engine.add(requests[index], prompt_of(number, num_tokens), max_tokens=max_tokens)
    seen = {engine: {} for engine in (keeping, plain)}
    while not (keeping.has_finished(*requests) and plain.has_finished(*requests)):
        assert abs(keeping.num_steps - plain.num_steps) < 50, "one of the two goes on without the other"
        for engine, steps in seen.items():
            engine.step()
            for request_id in requests:
                steps.setdefault((request_id, len(engine.answers[request_id].tokens)), engine.num_steps)
                steps.setdefault((request_id, str(engine.requests[request_id].status)), engine.num_steps)
    began = {engine: min(steps.values()) for engine, steps in seen.items()}
    times = [{key: at - began[engine] for key, at in steps.items()} for engine, steps in seen.items()]
    assert times[0] == times[1]
    preemptions = [sum(engine.num_preemptions(each) for each in requests) for engine in (keeping, plain)]
    assert preemptions[0] == preemptions[1]
    if load not in ("more than fits", "as before"):
        assert preemptions[0] == 0
    for request_id in requests:
        tokens = keeping.answers[request_id].tokens
        assert tokens == answer(keeping.prompts[request_id], len(tokens))
    if load != "as before":
        assert keeping.count("retentions", "pressure") > 0
        # The oldest have gone.
        left = handles(keeping)
        assert left == [f"h-{number}" for number in range(NUM_HANDLES)][NUM_HANDLES - len(left) :]


def test_a_small_request_costs_no_more_handles_than_it_needs(full):
    full.source.add("small", prompt_of(100, 10), max_tokens=5)
    run_until(lambda: full.source.has_finished("small"), [full.source], "an answer")
    assert len(handles(full.source)) == NUM_HANDLES


def test_the_kept_history_of_a_turn_does_not_go_for_the_turn_that_uses_it(full):
    engine = full.source
    prompt = [*prompt_of(14), *prompt_of(200, 20)]
    engine.add("next", prompt, to_params(LocalLeg(keep=Keep("next", "h-14"))), max_tokens=20)
    before = engine.model.num_computed_tokens
    run_until(lambda: engine.has_finished("next"), [engine], "an answer")
    assert engine.model.num_computed_tokens - before == 20 + 19
    assert "next" in handles(engine)
    assert "h-14" not in handles(engine)
    assert len(handles(engine)) >= NUM_HANDLES - 1


def test_what_is_being_read_does_not_give_way_before_its_lease_ends(full):
    engine = full.source
    reader = full.start("reader", num_blocks=60, extra=KEEPING)
    full.fabric.stop(full.agent(engine))
    leg = to_params(PrefillLeg("x", history=History("h-0", peer_of(engine))))
    reader.add("r", [*prompt_of(0), 1], leg)
    run_until(lambda: engine.status().num_leases == 1, [reader], "the lease")
    reader.step()
    engine.add("long", prompt_of(100, 90 * BLOCK_SIZE), max_tokens=8)
    run_until(lambda: engine.has_finished("long"), [engine], "an answer")
    assert handles(engine) == ["h-0"]
    full.fabric.resume(full.agent(engine))
    run_until(lambda: reader.has_finished("r"), [reader], "the read")
    assert reader.count("transfer_tokens", "history") == HANDLE_BLOCKS * BLOCK_SIZE


def test_use_makes_a_handle_the_last_to_give_way(full):
    engine = full.source
    lent = ask_side(engine.half.address, acquire_of(engine, 0))
    assert isinstance(lent, Acquired)
    ask_side(engine.half.address, Release(lease_ids=(lent.lease_id,), drop=False))
    engine.add("long", prompt_of(100, 80 * BLOCK_SIZE), max_tokens=2)
    run_until(lambda: engine.has_finished("long"), [engine], "an answer")
    assert handles(engine)[0] == "h-0"
    assert "h-1" not in handles(engine)


def test_nothing_gives_way_for_a_request_that_would_not_fit_anyway(full):
    engine = full.source
    engine.add("runner", prompt_of(100, 40 * BLOCK_SIZE), max_tokens=300)
    for _ in range(8):
        engine.step()
    assert engine.answers["runner"].tokens
    left = handles(engine)
    engine.add("too much", prompt_of(101, 70 * BLOCK_SIZE), max_tokens=2)
    for _ in range(5):
        engine.step()
        assert not engine.answers["too much"].tokens
    assert handles(engine) == left


def test_beyond_the_budget_the_oldest_idle_ones_go_first(make_pair):
    budget = {**KEEPING, "retention_max_blocks": 10 * HANDLE_BLOCKS}
    pair = make_pair(source={"num_blocks": 300, "extra": budget})
    for number in range(16):
        keep(pair.source, number)
    assert handles(pair.source) == [f"h-{number}" for number in range(6, 16)]
    keep(pair.source, 99, num_tokens=61 * BLOCK_SIZE)  # alone more than the budget
    assert handles(pair.source) == [f"h-{number}" for number in range(6, 16)]
    keep(pair.source, 50, num_tokens=60 * BLOCK_SIZE)
    assert handles(pair.source) == ["h-50"]
    pair.source.add("small", [1])
    run_until(pair.source.is_idle, [pair.source], "a small request")
    assert pair.source.count("retentions", "budget") == 16
    assert pair.source.count("retentions", "over_budget") == 1
    assert pair.source.metrics.data["retained_blocks"] == 60
    assert pair.source.metrics.data["retained_handles"] == 1


def test_blocks_that_handles_share_count_once_against_the_budget(make_pair):
    budget = {**KEEPING, "retention_max_blocks": 10 * HANDLE_BLOCKS}
    pair = make_pair(source={"num_blocks": 300, "extra": budget})
    shared = prompt_of(1, 40 * BLOCK_SIZE)
    for number in range(10):
        leg = to_params(LocalLeg(keep=Keep(f"h-{number}")))
        pair.source.add(f"r-{number}", [*shared, *prompt_of(number, 2 * BLOCK_SIZE)], leg)
        run_until(lambda n=number: pair.source.has_finished(f"r-{n}"), [pair.source], "an answer")
    assert len(handles(pair.source)) == 10
    assert pair.source.status().num_retained_blocks == 60


def test_a_running_request_that_finds_no_block_gets_one_that_is_kept(full, monkeypatch):
    engine = full.source
    monkeypatch.setattr(engine.half._keeper, "make_headroom", lambda *_: None)
    engine.add("runner", prompt_of(100, 8 * BLOCK_SIZE), max_tokens=100)
    run_until(lambda: engine.has_finished("runner"), [engine], "an answer")
    assert engine.num_preemptions("runner") == 0
    tokens = engine.answers["runner"].tokens
    assert tokens == answer(engine.prompts["runner"], len(tokens))


def test_a_load_that_is_admitted_at_once_takes_the_place_of_what_is_kept(full):
    """The reader allocates for the whole prompt before a byte has come."""
    engine = full.source
    other = full.start("other", num_blocks=200, extra=KEEPING)
    keep(other, 77, num_tokens=80 * BLOCK_SIZE)
    leg = to_params(PrefillLeg("x", history=History("h-77", peer_of(other))))
    engine.add("r", [*prompt_of(77, 80 * BLOCK_SIZE), *prompt_of(5, 40)], leg)
    before = engine.model.num_computed_tokens
    run_until(lambda: engine.has_finished("r"), [engine], "the prefill leg")
    assert engine.model.num_computed_tokens - before == 40
    assert engine.num_preemptions("r") == 0


def acquire_of(engine, number):
    """What a reader asks for handle ``number``."""
    from kvshuttle.blocks import ContentIdentity, token_chain

    chain = token_chain(prompt_of(number), BLOCK_SIZE, ContentIdentity())
    card = engine.card
    return Acquire(
        handle=f"h-{number}",
        reader="test",
        incarnation=card.incarnation,
        fingerprint=card.fingerprint,
        block_size_tokens=BLOCK_SIZE,
        num_tokens=chain.num_tokens,
        links=chain.links,
        tail=chain.tail,
        duration_s=5.0,
    )
