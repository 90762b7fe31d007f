"""KV of an answered turn goes back to the prefill engine: as much of it as the next prompt really begins with."""

from support import quiet_vllm  # noqa: F401 - before anything that imports vLLM

# isort: split
import pytest

from kvshuttle.clock import now_s
from kvshuttle.handoff.break_even import threshold_tokens
from kvshuttle.handoff.messages import Release, Renew
from kvshuttle.handoff.params import History, Keep, LocalLeg, Mode, Peer, PrefillLeg, parse_result, to_params
from support.checked_model import answer
from support.conversation import Conversation, peer_of
from support.engine_pair import PATIENT
from support.side import ask_side
from support.vllm_engine import BLOCK_SIZE, run_until

EAGER = {**PATIENT, "kv_recompute_threshold": 0}
ROOMY = {"num_blocks": 400, "extra": EAGER}
NO_CACHE = {**ROOMY, "has_prefix_cache": False}
FIRST = [11 * index + 5 for index in range(100)]
NEW = [7 * index + 2 for index in range(37)]
BOTH = pytest.mark.parametrize("mode", [Mode.PULL, Mode.PUSH])


def fetched(pair):
    """Tokens that the prefill engine got from earlier turns."""
    return pair.source.count("transfer_tokens", "history")


def outcomes(engine):
    """How reads of history ended."""
    prefix = "transfers|history|"
    return {key.removeprefix(prefix): count for key, count in engine.metrics.data.items() if key.startswith(prefix)}


def retained(engine):
    """(handles, blocks) that an engine keeps for later turns."""
    status = engine.status()
    return status.num_retained_handles, status.num_retained_blocks


def let_go(pair, *conversations):
    """The router forgets conversations; nothing may stay behind then."""
    for conversation in conversations:
        ask_side(conversation.kept_at.address, Release(handles=(conversation.handle,)))
    pair.assert_drained()


def report(engine):
    """Let an idle engine step, so that its metrics come out."""
    engine.add(f"small-{engine.num_steps}", [1])
    run_until(engine.is_idle, [engine], "a small request")


@BOTH
@pytest.mark.parametrize("source", [ROOMY, NO_CACHE], ids=["prefix cache", "no prefix cache"])
@pytest.mark.parametrize("sink", [ROOMY, NO_CACHE], ids=["D caches", "D does not"])
def test_from_the_second_turn_on_only_what_is_new_is_computed(make_pair, mode, source, sink):
    pair = make_pair(source=source, sink=sink)
    talk = Conversation(pair, mode)
    turn = talk.turn(FIRST, max_tokens=23)
    assert turn.num_computed == len(FIRST)
    for number in range(9):
        num_kept = turn.num_kept
        turn = talk.turn([*turn.history, *[number * 50 + token for token in NEW]], max_tokens=23)
        assert turn.num_computed == len(turn.prompt) - num_kept
        assert turn.num_cached == num_kept
        assert retained(pair.sink) == (1, turn.num_kept // BLOCK_SIZE)
    assert outcomes(pair.source) == {"read_ok": 9}
    let_go(pair, talk)
    report(pair.sink)
    assert (pair.sink.count("retentions", "kept"), pair.sink.count("retentions", "superseded")) == (10, 9)
    assert pair.sink.count("retentions", "released") == 1


@pytest.mark.parametrize("num_answer", range(26, 31))
def test_the_last_token_of_an_answer_has_no_kv_also_where_it_would_fill_a_block(make_pair, num_answer):
    pair = make_pair(source=NO_CACHE, sink=ROOMY)
    talk = Conversation(pair)
    first = talk.turn(FIRST, max_tokens=num_answer)
    assert retained(pair.sink) == (1, 8 if num_answer > 28 else 7)
    second = talk.turn([*first.history, *NEW])
    assert second.num_computed == len(second.prompt) - first.num_kept
    let_go(pair, talk)


def test_local_hits_and_fetched_tokens_are_told_apart(make_pair):
    pair = make_pair(source=ROOMY, sink=ROOMY)
    talk = Conversation(pair)
    first = talk.turn(FIRST, max_tokens=40)
    second = talk.turn([*first.history, *NEW])
    # P had the first prompt's full blocks, D the first turn's.
    num_had = len(FIRST) // BLOCK_SIZE * BLOCK_SIZE
    assert pair.source.count("local_hit_tokens", "prefill") == num_had
    assert fetched(pair) == first.num_kept - num_had
    assert pair.sink.count("local_hit_tokens", "decode") == first.num_kept
    assert second.num_cached == first.num_kept
    let_go(pair, talk)


# -- the history may change --------------------------------------------------------------------------


def edited(history):
    return [*history[:70], 9999, *history[71:], *NEW]


def stripped(history):
    """A reasoning block between prompt and answer is left out."""
    return [*history[:60], *history[80:], *NEW]


CHANGES = {
    "an edited word": edited,
    "stripped reasoning": stripped,
    "a rollback": lambda history: [*history[:50], *NEW],
    "a summary": lambda history: [1, 2, 3, *history[90:], *NEW],
    "a regenerate": lambda _: FIRST,
    "a cut within a block": lambda history: history[:75],
    "exactly what is kept": lambda history: history[: (len(history) - 1) // BLOCK_SIZE * BLOCK_SIZE],
    "nothing new": list,
    "another conversation": lambda _: [3 * token for token in FIRST],
}


@BOTH
@pytest.mark.parametrize("change", CHANGES)
def test_reuse_is_exactly_the_verified_common_prefix(make_pair, mode, change):
    pair = make_pair(source=NO_CACHE, sink=ROOMY)
    talk = Conversation(pair, mode)
    first = talk.turn(FIRST, max_tokens=30)
    prompt = CHANGES[change](first.history)
    second = talk.turn(prompt)
    common = 0
    while common < min(len(prompt), first.num_kept) and prompt[common] == first.history[common]:
        common += 1
    num_used = common // BLOCK_SIZE * BLOCK_SIZE
    # The last token of a prompt is always computed.
    assert second.num_computed == max(len(prompt) - num_used, 1)
    third = talk.turn([*second.history, *NEW])  # nor has anything wrong come into a cache
    assert third.num_computed == len(third.prompt) - second.num_kept
    let_go(pair, talk)


@BOTH
def test_two_branches_of_one_turn_both_reuse_it(make_pair, mode):
    pair = make_pair(source=NO_CACHE, sink=ROOMY)
    talk = Conversation(pair, mode)
    first = talk.turn(FIRST, max_tokens=30)
    branch = Conversation(pair, mode, name="branch")
    branch.handle = talk.handle
    prompts = [[*first.history, *NEW], [*first.history, *reversed(NEW)]]
    if mode is Mode.PUSH:
        pair.fabric.stop(pair.agent(pair.sink))  # so that neither supersedes the turn before both have acquired it
        legs = [each.begin(prompt) for each, prompt in zip((talk, branch), prompts, strict=True)]
        run_until(lambda: pair.sink.status().num_leases == 2, [pair.source, pair.sink], "two leases")
        pair.fabric.resume(pair.agent(pair.sink))
        pair.finish(*(decode for _, decode in legs))
        assert fetched(pair) == 2 * first.num_kept
    else:
        assert talk.turn(prompts[0]).num_computed == len(prompts[0]) - first.num_kept
        branch.turn(prompts[1])  # its handle was superseded meanwhile: recomputed, and right
    let_go(pair, talk, branch)


@pytest.mark.parametrize("fields", [{"cache_salt": "somebody else"}], ids=["salt"])
def test_a_handle_presented_under_another_salt_gives_nothing_and_leaves_no_trace(make_pair, fields):
    pair = make_pair(source=ROOMY, sink=ROOMY)
    talk = Conversation(pair)
    first = talk.turn(FIRST, max_tokens=30, cache_salt="mine")
    thief = Conversation(pair, name="thief")
    thief.handle = talk.handle
    for _ in range(2):
        stolen = thief.turn([*first.history, *NEW], **fields)
    assert fetched(pair) == 0
    assert outcomes(pair.source)["denied_no_common_prefix"] == 1
    assert stolen.num_cached == len(stolen.prompt) // BLOCK_SIZE * BLOCK_SIZE  # its own, of the first time
    let_go(pair, thief)


def test_a_handle_of_another_prompt_gives_nothing_and_leaves_no_trace(make_pair):
    pair = make_pair(source=ROOMY, sink=ROOMY)
    talk, other = Conversation(pair), Conversation(pair, name="other")
    talk.turn(FIRST, max_tokens=30)
    other.handle = talk.handle
    prompt = [2 * token + 1 for token in FIRST]
    assert other.turn(prompt).num_computed == len(prompt)
    assert fetched(pair) == 0
    # Asked again, by everybody: the answers are checked, and so is what they attend to.
    for tokens in (prompt, FIRST, [*prompt, *FIRST], [*FIRST, *prompt]):
        for engine in (pair.source, pair.sink):
            request_id = f"again-{engine.num_steps}"
            engine.add(request_id, tokens, max_tokens=3)
            run_until(lambda engine=engine, r=request_id: engine.has_finished(r), [engine], "an answer")
            assert engine.answers[request_id].tokens == answer(tokens, 3)
    let_go(pair, other)


# -- what is kept ------------------------------------------------------------------------------------


def keep_alone(engine, handle, prompt=FIRST, *, max_tokens=30, request_id="", supersedes=None, **fields):
    """A request to one engine alone, whose KV is to be kept."""
    request_id = request_id or f"alone-{handle}"
    leg = LocalLeg(keep=Keep(handle, supersedes))
    engine.add(request_id, prompt, to_params(leg), max_tokens=max_tokens, **fields)
    return request_id


def finish(engine, *request_ids):
    run_until(lambda: engine.has_finished(*request_ids), [engine], f"answers to {request_ids}")
    engine.step()


def reuse(pair, handle, prompt, *, kept_at=None, transfer_id="x-again"):
    """A prefill leg with history; returns how many of its tokens were computed."""
    before = pair.source.model.num_computed_tokens
    request_id = f"again-{pair.source.num_steps}-{transfer_id}"
    leg = PrefillLeg(transfer_id, history=History(handle, kept_at or peer_of(pair.sink)))
    pair.source.add(request_id, prompt, to_params(leg))
    run_until(lambda: pair.source.has_finished(request_id), [pair.source], "the prefill leg")
    pair.source.step()
    result = parse_result(pair.source.answers[request_id].kv_transfer_params)
    assert result is not None
    ask_side(pair.source.half.address, Release(handles=(transfer_id,)))
    return pair.source.model.num_computed_tokens - before


@pytest.fixture
def kept(make_pair):
    """A pair whose decode engine keeps a turn, and its tokens."""
    pair = make_pair(source=NO_CACHE, sink=ROOMY)
    request_id = keep_alone(pair.sink, "h")
    finish(pair.sink, request_id)
    return pair, [*FIRST, *pair.sink.answers[request_id].tokens]


NUM_KEPT = (100 + 30 - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_an_engine_that_keeps_idles(kept):
    pair, _ = kept
    assert pair.sink.is_idle()
    status = pair.sink.status()
    assert (status.num_retained_handles, status.num_retained_blocks) == (1, NUM_KEPT // BLOCK_SIZE)
    assert status.num_held_blocks == NUM_KEPT // BLOCK_SIZE
    # Free is what the next allocation can have.
    assert status.num_free_blocks == pair.sink.options.num_blocks - 1
    assert pair.sink.num_free_blocks == status.num_free_blocks - NUM_KEPT // BLOCK_SIZE


def test_a_handle_can_be_used_more_than_once_and_by_two_readers_at_a_time(kept):
    pair, history = kept
    other = pair.start("other", **NO_CACHE)
    leg = to_params(PrefillLeg("x", history=History("h", peer_of(pair.sink))))
    engines = [pair.source, other]
    for round_ in range(2):
        pair.fabric.stop(pair.agent(pair.sink))  # so that none has read before all have acquired
        for engine in engines:
            engine.add(f"r-{round_}", [*history, round_], leg)
        run_until(lambda: pair.sink.status().num_leases == 2, engines, "two leases")
        pair.fabric.resume(pair.agent(pair.sink))
        run_until(lambda r=f"r-{round_}": pair.source.has_finished(r), engines, "the one")
        run_until(lambda r=f"r-{round_}": other.has_finished(r), engines, "the other")
        run_until(lambda: pair.sink.status().num_leases == 0, [], "both leases to be given back")
    assert [outcomes(engine) for engine in engines] == [{"read_ok": 2}] * 2
    assert retained(pair.sink) == (1, NUM_KEPT // BLOCK_SIZE)


def test_the_decode_engine_answers_though_it_idles_or_sits_in_a_long_step(kept):
    pair, history = kept
    steps = pair.sink.num_steps
    assert reuse(pair, "h", [*history, 1]) == len(history) + 1 - NUM_KEPT
    assert pair.sink.num_steps == steps


def test_nothing_is_read_below_the_threshold(make_pair):
    pair = make_pair(source={**NO_CACHE, "extra": {**PATIENT, "kv_recompute_threshold": NUM_KEPT + 1}}, sink=ROOMY)
    request_id = keep_alone(pair.sink, "h")
    finish(pair.sink, request_id)
    prompt = [*FIRST, *pair.sink.answers[request_id].tokens, 1]
    assert reuse(pair, "h", prompt) == len(prompt)
    assert outcomes(pair.source) == {"below_threshold": 1}
    assert pair.source.metrics.data["recompute_threshold_tokens|sink"] == NUM_KEPT + 1


def test_an_automatic_threshold_starts_at_the_published_one_and_is_shown(make_pair):
    pair = make_pair(source={**NO_CACHE, "extra": {**PATIENT, "kv_recompute_threshold": "auto"}}, sink=ROOMY)
    request_id = keep_alone(pair.sink, "h")
    finish(pair.sink, request_id)
    prompt = [*FIRST, *pair.sink.answers[request_id].tokens, 1]
    reuse(pair, "h", prompt, transfer_id="x-1")
    assert pair.source.metrics.data["recompute_threshold_tokens|sink"] == 64
    assert outcomes(pair.source) == {"read_ok": 1}
    # By now a read and, with the next request, a prefill have been measured.
    reuse(pair, "nothing here", [5] * 256, transfer_id="x-2")
    pace = pair.source.half._pace
    compute, read = pace._compute, pace._reads["sink"]
    assert None not in (compute.per_token_s(now_s()), read.line(now_s()))
    expected = threshold_tokens(compute, read, now_s=now_s())
    reuse(pair, "h", prompt, transfer_id="x-3")
    shown = pair.source.metrics.data["recompute_threshold_tokens|sink"]
    assert 16 <= shown <= 65_536
    assert shown == expected


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"handle": "unknown"}, "denied_unknown_handle"),
        ({"incarnation": "an earlier life"}, "denied_other_incarnation"),
        ({"address": "127.0.0.1:1"}, "acquire_timed_out"),
    ],
)
def test_what_cannot_be_had_is_computed_and_counted_by_reason(make_pair, change, reason):
    extra = {**EAGER, "acquire_timeout_s": 0.5} if "address" in change else EAGER
    pair = make_pair(source={**NO_CACHE, "extra": extra}, sink=ROOMY)
    request_id = keep_alone(pair.sink, "h")
    finish(pair.sink, request_id)
    peer = peer_of(pair.sink)
    fields = {name: change.get(name, getattr(peer, name)) for name in peer.__struct_fields__}
    prompt = [*FIRST, *pair.sink.answers[request_id].tokens, 1]
    assert reuse(pair, change.get("handle", "h"), prompt, kept_at=Peer(**fields)) == len(prompt)
    assert outcomes(pair.source) == {reason: 1}


def test_a_restarted_decode_engine_is_a_miss(make_pair):
    pair = make_pair(source={**NO_CACHE, "extra": {**EAGER, "acquire_timeout_s": 2.0}}, sink=ROOMY)
    talk = Conversation(pair)
    first = talk.turn(FIRST, max_tokens=30)
    pair.kill(pair.sink)
    pair.sink = pair.start("sink", **ROOMY)
    second = talk.turn([*first.history, *NEW])
    assert second.num_computed == len(second.prompt)
    third = talk.turn([*second.history, *NEW])
    assert third.num_computed == len(third.prompt) - second.num_kept
    let_go(pair, talk)


def test_a_kept_turn_is_reused_within_its_time_and_not_after_it(make_pair):
    ttl = {**EAGER, "decoder_kv_blocks_ttl": 4.0, "submit_margin_s": 0.1}
    pair = make_pair(source={**NO_CACHE, "extra": ttl}, sink={**ROOMY, "extra": ttl})
    request_id = keep_alone(pair.sink, "h")
    finish(pair.sink, request_id)
    kept_at_s = now_s()
    prompt = [*FIRST, *pair.sink.answers[request_id].tokens, 1]
    run_until(lambda: now_s() > kept_at_s + 1.0, [pair.sink], "a quarter of its time to pass")
    assert reuse(pair, "h", prompt, transfer_id="x-1") == len(prompt) - NUM_KEPT
    run_until(lambda: now_s() > kept_at_s + 4.1, [pair.sink], "the end")
    busy = pair.sink.add("busy", [9] * 64)  # the engine's next step
    finish(pair.sink, busy.request_id)
    assert pair.sink.num_free_blocks == pair.sink.options.num_blocks - 1
    assert reuse(pair, "h", prompt, transfer_id="x-2") == len(prompt)
    assert outcomes(pair.source) == {"read_ok": 1, "denied_unknown_handle": 1}
    assert pair.sink.count("retentions", "expired") == 1


@pytest.mark.parametrize("is_renewed", [True, False])
def test_use_renews_where_that_is_wanted(make_pair, is_renewed):
    options = {**EAGER, "decoder_kv_blocks_ttl": 30.0, "is_retention_renewed_on_use": is_renewed}
    pair = make_pair(source=NO_CACHE, sink={**ROOMY, "extra": options})
    request_id = keep_alone(pair.sink, "h")
    finish(pair.sink, request_id)
    ledger = pair.sink.half._holder.ledger
    [holding] = ledger.shelf.find("h")
    ends_at_s = holding.ends_at_s
    reuse(pair, "h", [*FIRST, *pair.sink.answers[request_id].tokens, 1])
    assert (holding.ends_at_s > ends_at_s) is is_renewed


def test_the_routers_heartbeat_renews(kept):
    pair, _ = kept
    [holding] = pair.sink.half._holder.ledger.shelf.find("h")
    ends_at_s = holding.ends_at_s
    renewed = ask_side(pair.sink.half.address, Renew((), 1e6, handles=("h", "unknown")))
    assert 479 < renewed.handles_remaining_s[0] <= 480
    assert renewed.handles_remaining_s[1] < 0
    assert holding.ends_at_s > ends_at_s


def test_an_earlier_handle_goes_when_the_next_one_is_held_and_not_before(kept):
    pair, history = kept
    keep_alone(pair.sink, "h2", [*history, *NEW], supersedes="h")
    ledger = pair.sink.half._holder.ledger
    while not pair.sink.has_finished("alone-h2"):
        assert ledger.handles() == ("h",)
        pair.sink.step()
    assert ledger.handles() == ("h2",)
    assert reuse(pair, "h2", [*history, *NEW, 1]) < len(NEW) + BLOCK_SIZE + 1


def test_what_is_not_kept_does_not_supersede(kept):
    pair, _ = kept
    keep_alone(pair.sink, "h2", [1, 2, 3], supersedes="h", max_tokens=2)  # not one full block
    finish(pair.sink, "alone-h2")
    assert pair.sink.half._holder.ledger.handles() == ("h",)


def test_a_released_handle_is_gone_at_once_and_one_released_early_is_never_kept(kept):
    pair, history = kept
    ask_side(pair.sink.half.address, Release(handles=("h", "h2")))
    assert retained(pair.sink) == (0, 0)
    keep_alone(pair.sink, "h2", history)
    finish(pair.sink, "alone-h2")
    assert retained(pair.sink) == (0, 0)
    report(pair.sink)
    assert pair.sink.count("retentions", "not_wanted") == 1
    pair.assert_drained()


@pytest.mark.parametrize(
    ("stop", "is_disconnect_retained", "is_kept"),
    [((), False, False), ((), True, True), (("the end",), False, True)],
    ids=["left", "left, and kept by configuration", "a stop string"],
)
def test_what_a_client_left_is_kept_by_configuration_and_a_stop_string_is_an_end(
    make_pair, stop, is_disconnect_retained, is_kept
):
    extra = {**EAGER, "is_disconnect_retained": is_disconnect_retained}
    pair = make_pair(source=NO_CACHE, sink={**ROOMY, "extra": extra})
    request_id = keep_alone(pair.sink, "h", max_tokens=500, stop=stop)
    run_until(lambda: len(pair.sink.answers[request_id].tokens) > 40, [pair.sink], "some answer")
    pair.sink.abort(request_id)
    run_until(pair.sink.is_idle, [pair.sink], "the engine to idle")
    tokens = [*FIRST, *pair.sink.answers[request_id].tokens]
    if not is_kept:
        assert retained(pair.sink) == (0, 0)
        return
    num_kept = (len(tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert reuse(pair, "h", [*tokens, 1]) == len(tokens) + 1 - num_kept


@pytest.mark.parametrize("num_steps", range(0, 12, 2))
def test_a_decode_leg_aborted_at_any_moment_keeps_nothing_wrong(make_pair, num_steps):
    extra = {**EAGER, "is_disconnect_retained": True}
    pair = make_pair(source=NO_CACHE, sink={**ROOMY, "extra": extra})
    talk = Conversation(pair, Mode.PUSH)
    prefill, decode = talk.begin(FIRST, max_tokens=50)
    for _ in range(num_steps):
        pair.source.step()
        pair.sink.step()
    tokens = list(pair.sink.answers[decode].tokens)
    pair.sink.abort(decode)
    engines = [pair.source, pair.sink]
    run_until(lambda: pair.source.has_finished(prefill) and pair.sink.is_idle(), engines, "both legs to end")
    ask_side(pair.source.half.address, Release(handles=("x-c-0",)))  # as the router does for a client that left
    second = talk.turn([*FIRST, *tokens, *NEW])
    assert second.num_cached <= len(FIRST) + len(tokens)
    let_go(pair, talk)


@BOTH
@pytest.mark.parametrize("num_steps", range(0, 8, 2))
def test_a_prefill_leg_aborted_at_any_moment_leaves_nothing_lent(make_pair, mode, num_steps):
    pair = make_pair(source={**NO_CACHE, "max_num_batched_tokens": 32}, sink=ROOMY)
    talk = Conversation(pair, mode)
    first = talk.turn(FIRST, max_tokens=30)
    prompt = [*first.history, *NEW]
    leg = PrefillLeg("x-aborted", mode, History(talk.handle, talk.kept_at))
    pair.source.add("aborted", prompt, to_params(leg))
    for _ in range(num_steps):
        pair.source.step()
    if not pair.source.has_finished("aborted"):
        pair.source.abort("aborted")
    ask_side(pair.source.half.address, Release(handles=("x-aborted",)))
    second = talk.turn(prompt)
    assert second.num_computed == len(prompt) - first.num_kept
    let_go(pair, talk)


def test_a_decode_engine_killed_during_the_read_costs_a_recomputation(make_pair):
    short = {**EAGER, "read_timeout_s": 1.0, "acquire_timeout_s": 1.0}
    pair = make_pair(source={**NO_CACHE, "extra": short}, sink=ROOMY)
    request_id = keep_alone(pair.sink, "h")
    finish(pair.sink, request_id)
    prompt = [*FIRST, *pair.sink.answers[request_id].tokens, 1]
    pair.fabric.stop(pair.agent(pair.sink))
    pair.source.add("r", prompt, to_params(PrefillLeg("x", history=History("h", peer_of(pair.sink)))))
    run_until(lambda: pair.sink.status().num_leases == 1, [pair.source], "the lease")
    pair.source.step()
    pair.kill(pair.sink)
    run_until(lambda: pair.source.has_finished("r"), [pair.source], "the prefill leg")
    assert pair.source.model.num_computed_tokens == len(prompt)
    assert fetched(pair) == 0


def test_a_prefill_engine_killed_during_the_read_pins_nothing_beyond_the_time_of_the_handle(make_pair):
    ttl_s = 3.0
    ttl = {**EAGER, "decoder_kv_blocks_ttl": ttl_s, "lease_s": 60.0}
    pair = make_pair(source={**NO_CACHE, "extra": {**EAGER, "lease_s": 60.0}}, sink={**ROOMY, "extra": ttl})
    asked_at_s = now_s()
    finish(pair.sink, keep_alone(pair.sink, "h"))
    pair.fabric.stop(pair.agent(pair.sink))
    prompt = [*FIRST, *pair.sink.answers["alone-h"].tokens, 1]
    pair.source.add("r", prompt, to_params(PrefillLeg("x", history=History("h", peer_of(pair.sink)))))
    run_until(lambda: pair.sink.status().num_leases == 1, [pair.source], "the lease")
    pair.kill(pair.source)
    run_until(lambda: pair.sink.status().num_holdings == 0, [pair.sink], "the lease to end")
    # The first lease of a reader ends with the handle's time and FIRST_LEASE_S: long before its own, unrenewed.
    assert ttl_s <= now_s() - asked_at_s < ttl_s + 2.0 + 10.0
    report(pair.sink)
    assert pair.sink.num_free_blocks == pair.sink.options.num_blocks - 1


# -- one engine alone --------------------------------------------------------------------------------


def test_a_turn_to_the_decode_engine_alone_uses_its_own_cache_and_is_kept(kept):
    pair, history = kept
    before = pair.sink.model.num_computed_tokens
    keep_alone(pair.sink, "h2", [*history, 1, 2, 3], supersedes="h", max_tokens=2)
    finish(pair.sink, "alone-h2")
    assert pair.sink.model.num_computed_tokens - before == len(history) + 3 - NUM_KEPT + 1
    assert pair.sink.count("local_hit_tokens", "local") == NUM_KEPT
    assert pair.sink.half._holder.ledger.handles() == ("h2",)


def test_an_engine_alone_may_get_the_history_from_another_one(kept):
    pair, history = kept
    other = pair.start("other", **NO_CACHE)
    leg = LocalLeg(History("h", peer_of(pair.sink)), Keep("elsewhere"))
    other.add("r", [*history, 1, 2, 3], to_params(leg), max_tokens=4)
    finish(other, "r")
    assert other.answers["r"].tokens == answer([*history, 1, 2, 3], 4)
    assert other.model.num_computed_tokens == len(history) + 3 - NUM_KEPT + 3
    assert other.count("transfer_tokens", "history") == NUM_KEPT
    assert other.half._holder.ledger.handles() == ("elsewhere",)


def test_vllm_can_reset_its_cache_and_nothing_is_kept_then(kept):
    pair, _ = kept
    assert not pair.sink.scheduler.reset_prefix_cache(reset_connector=True)
    assert retained(pair.sink) == (0, 0)
    assert pair.sink.scheduler.reset_prefix_cache(reset_connector=True)
