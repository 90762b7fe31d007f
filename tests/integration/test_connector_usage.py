"""What a prefill engine says it did not compute is just that, whatever happens to the request meanwhile."""

from support import quiet_vllm  # noqa: F401 - before anything that imports vLLM

# isort: split
import itertools

import pytest

from kvshuttle.handoff.messages import Release
from kvshuttle.handoff.params import History, Keep, LocalLeg, Mode, PrefillLeg, parse_result, to_params
from support.conversation import peer_of
from support.engine_pair import PATIENT
from support.side import ask_side
from support.vllm_engine import BLOCK_SIZE, run_until

EAGER = {**PATIENT, "kv_recompute_threshold": 0}
CACHE = {"num_blocks": 400, "max_num_batched_tokens": 32, "extra": EAGER}
NO_CACHE = {**CACHE, "has_prefix_cache": False}
FIRST = [11 * index + 5 for index in range(100)]
NEW = [7 * index + 2 for index in range(77)]
NUM_FIRST = 100 // BLOCK_SIZE * BLOCK_SIZE
NUM_KEPT = (100 + 30 - 1) // BLOCK_SIZE * BLOCK_SIZE
BOTH = pytest.mark.parametrize("mode", [Mode.PULL, Mode.PUSH])


class Watch:
    """Notes at which tokens the forward passes of a prompt begin."""

    def __init__(self, engine):
        self.engine = engine
        self.passes = []
        self._forward = engine.model.forward
        engine.model.forward = self._noting

    def _noting(self, token_ids, block_ids, *, start, end):
        self.passes.append((tuple(token_ids), start))
        return self._forward(token_ids, block_ids, start=start, end=end)

    def starts(self, prompt):
        return [start for token_ids, start in self.passes if token_ids[: len(prompt)] == tuple(prompt)]


@pytest.fixture
def pair_of(make_pair):
    """A pair whose sink keeps a turn, a watch on its source, and the turn's tokens."""

    def make(source):
        pair = make_pair(source=source, sink=CACHE)
        pair.sink.add("turn", FIRST, to_params(LocalLeg(keep=Keep("h"))), max_tokens=30)
        run_until(lambda: pair.sink.has_finished("turn"), [pair.sink], "the first turn")
        pair.sink.step()
        return pair, Watch(pair.source), [*FIRST, *pair.sink.answers["turn"].tokens]

    return make


def compute(engine, prompt):
    """So that it is in the prefix cache."""
    request_id = f"before-{engine.num_steps}"
    engine.add(request_id, prompt)
    run_until(lambda: engine.has_finished(request_id), [engine], "the one before")


def begin(pair, prompt, mode=Mode.PULL, *, name="r", is_with_history=True):
    history = History("h", peer_of(pair.sink)) if is_with_history else None
    pair.source.add(name, prompt, to_params(PrefillLeg(f"x-{name}", mode, history)))


def said(pair, *names):
    """What prefill legs say when they are over; what they hold is let go of."""
    run_until(lambda: pair.source.has_finished(*names), [pair.source], "the prefill legs")
    results = [parse_result(pair.source.answers[name].kv_transfer_params) for name in names]
    ask_side(pair.source.half.address, Release(handles=tuple(f"x-{name}" for name in names)))
    return [result and result.num_cached_tokens for result in results]


@BOTH
@pytest.mark.parametrize("is_with_history", [True, False], ids=["history", "no history"])
@pytest.mark.parametrize(
    ("source", "before", "num_local"),
    [(NO_CACHE, (), 0), (CACHE, (), 0), (CACHE, FIRST, NUM_FIRST), (CACHE, [*FIRST[:40], 1, 2, 3], 32)],
    ids=["no cache", "cold cache", "local hit", "small local hit"],
)
def test_it_is_the_local_hit_and_what_was_read(pair_of, mode, source, before, num_local, is_with_history):
    pair, watch, turn = pair_of(source)
    if before:
        compute(pair.source, before)
    prompt = [*turn, *NEW]
    begin(pair, prompt, mode, is_with_history=is_with_history)
    assert said(pair, "r") == [watch.starts(prompt)[0]] == [NUM_KEPT if is_with_history else num_local]


@BOTH
@pytest.mark.parametrize("num_tokens", [6 * BLOCK_SIZE, 6 * BLOCK_SIZE + 1, 6 * BLOCK_SIZE + 7])
def test_of_a_prompt_that_was_here_already_it_is_all_but_what_the_last_token_needs(pair_of, mode, num_tokens):
    pair, watch, turn = pair_of(CACHE)
    prompt = turn[:num_tokens]
    compute(pair.source, prompt)
    watch.passes.clear()
    begin(pair, prompt, mode, is_with_history=False)
    assert said(pair, "r") == watch.starts(prompt) == [(num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE]


def test_of_a_prompt_that_was_kept_whole_it_is_all_but_the_last_token(pair_of):
    pair, watch, turn = pair_of(NO_CACHE)
    prompt = turn[:NUM_KEPT]
    begin(pair, prompt)
    assert said(pair, "r") == watch.starts(prompt) == [NUM_KEPT - 1]


@BOTH
@pytest.mark.parametrize(("source", "num_local"), [(NO_CACHE, 0), (CACHE, NUM_FIRST)], ids=["no cache", "local hit"])
def test_what_could_not_be_read_does_not_count(pair_of, mode, source, num_local):
    pair, watch, turn = pair_of({**source, "extra": {**EAGER, "read_timeout_s": 0.5}})
    if num_local:
        compute(pair.source, FIRST)
    prompt = [*turn, *NEW]
    pair.fabric.stop(pair.agent(pair.sink))
    begin(pair, prompt, mode)
    assert said(pair, "r") == [watch.starts(prompt)[0]] == [num_local]
    pair.fabric.resume(pair.agent(pair.sink))


@BOTH
@pytest.mark.parametrize("source", [NO_CACHE, CACHE], ids=["no cache", "cache"])
def test_what_was_read_and_lost_in_a_preemption_was_computed_after_all(pair_of, mode, source):
    pair, watch, turn = pair_of(source)
    prompt = [*turn, *NEW]
    begin(pair, prompt, mode)
    run_until(lambda: watch.starts(prompt), [pair.source], "the first of its own tokens")
    assert watch.starts(prompt) == [NUM_KEPT]
    assert pair.source.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert said(pair, "r") == [0]
    assert pair.source.num_preemptions("r") == 1
    assert watch.starts(prompt)[1] == 0


@BOTH
def test_what_a_preempted_request_finds_of_its_own_was_computed_for_it(pair_of, mode):
    pair, watch, _ = pair_of({**CACHE, "num_blocks": 30})
    source = pair.source
    occupants = [source.add(f"o-{n}", [n] * (BLOCK_SIZE // 2), max_tokens=1000).request_id for n in range(1, 11)]
    run_until(lambda: all(source.answers[each].tokens for each in occupants), [source], "all to run")
    prompt = [900 + index for index in range(15 * BLOCK_SIZE)]
    # It fits when it is admitted, and not any more when each of the others needs a second block.
    begin(pair, prompt, mode, is_with_history=False)
    run_until(lambda: source.num_preemptions("r"), [source], "a preemption")
    for each in occupants:
        source.abort(each)
    assert said(pair, "r") == [0]
    starts = watch.starts(prompt)
    assert [start for before, start in itertools.pairwise(starts) if 0 < start <= before], "it found nothing of its own"
