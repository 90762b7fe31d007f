"""Turns of conversations on real engines: only what is new is computed, and never with anybody else's KV."""

from __future__ import annotations

import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import pytest

from e2e.test_engine_death import source_of
from e2e.test_equal_answers import assert_equal
from support.history_cluster import (
    ADAPTERS,
    COMPLETIONS,
    MAX_MODEL_LEN,
    NUM_SMALL_BLOCKS,
    TTL_S,
    ByHand,
    Client,
    Reply,
    assistant,
    counted,
    history_cluster,
    status_of,
    user,
)
from support.live import BLOCK_SIZE_TOKENS, MODE_HEADER, MODEL_NAME, PROSE, difference, post
from support.scores import ASK_SCORES_COMPLETION, assert_same
from support.tiny_model import make_talking_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from support.history_cluster import HistoryCluster, Message
    from support.live import Live

THRESHOLD_TOKENS = 64
"""``kv_recompute_threshold``: fewer missing tokens than this are computed."""
NUM_TURNS = 10
MAX_ATTEMPTS = 30
SENTENCES = [sentence + "." for sentence in PROSE.split(".") if sentence.strip()]
KEY_HEADER = "X-Conversation-ID"
NUM_SMALL_BUDGET = (NUM_SMALL_BLOCKS - 1) * 9 // 10
"""``retention_max_fraction`` of the small pool."""


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory, log_dir: Path) -> Iterator[HistoryCluster]:
    model = make_talking_model(tmp_path_factory.mktemp("talking-qwen3"), max_model_len=MAX_MODEL_LEN)
    with history_cluster(model, tmp_path_factory.mktemp("adapters"), log_dir / "history") as cluster:
        yield cluster


@pytest.fixture
def plain(history: HistoryCluster) -> Iterator[Client]:
    with Client(history.live.plain_url) as client:
        yield client


def prose(rng: random.Random, num_tokens: int) -> str:
    """Text of about so many tokens."""
    return " ".join(rng.choice(SENTENCES) for _ in range(max(num_tokens // 30, 1)))


def by_hand(live: Live) -> ByHand:
    return ByHand(live, source_of(live, live.prefill_names[0]), source_of(live, live.decode_names[0]))


def completion(live: Live, num_tokens: int, *, max_tokens: int = 8) -> dict[str, Any]:
    body = {"model": MODEL_NAME, "prompt": live.token_ids(num_tokens), "max_tokens": max_tokens, "temperature": 0}
    return body | ASK_SCORES_COMPLETION


def whole_blocks(num_tokens: int) -> int:
    return num_tokens // BLOCK_SIZE_TOKENS * BLOCK_SIZE_TOKENS


# -- turns --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cache", "num_new_tokens", "min_tokens"), [("cold", 620, 6000), ("warm", 250, 2400)])
def test_ten_turns_compute_what_is_new_and_are_pushed(
    history: HistoryCluster, plain: Client, cache: str, num_new_tokens: int, min_tokens: int
) -> None:
    live, rng = history.behind(cache), random.Random(f"ten turns, {cache}")
    with Client(live.url) as client:
        assert_turns(
            live, client, plain, rng, num_turns=NUM_TURNS, num_new_tokens=num_new_tokens, min_tokens=min_tokens
        )


def test_turns_that_are_pulled_compute_what_is_new(history: HistoryCluster, plain: Client) -> None:
    live, rng = history.behind("cold"), random.Random("pulled turns")
    with Client(live.url, headers={MODE_HEADER: "pull"}) as client:
        assert_turns(live, client, plain, rng, num_turns=3, num_new_tokens=300, min_tokens=900)


def assert_turns(
    live: Live,
    client: Client,
    plain: Client,
    rng: random.Random,
    *,
    num_turns: int,
    num_new_tokens: int,
    min_tokens: int,
) -> None:
    messages: list[Message] = []
    last: Reply | None = None
    for number in range(num_turns):
        messages.append(user(f"{number}. {prose(rng, num_new_tokens)}"))
        with counted(live) as work:
            reply = client.say(messages)
        assert_same(reply, plain.say(messages))
        num_known = last.num_tokens if last else 0
        num_new = reply.num_prompt_tokens - num_known
        assert work.prefill["computed"] <= num_new + BLOCK_SIZE_TOKENS + THRESHOLD_TOKENS
        # The decode engine has the history itself, so that only the rest is handed off.
        assert work.decode["computed"] == 0
        assert work.decode["loaded"] <= num_new + BLOCK_SIZE_TOKENS
        assert work.prefill["local"] + work.prefill["fetched"] == whole_blocks(max(num_known - 1, 0))
        num_not_computed = work.prefill["local"] + work.prefill["fetched"]
        assert reply.num_cached_tokens == num_not_computed
        messages.append(assistant(reply))
        last = reply
    assert last is not None
    assert last.num_prompt_tokens >= min_tokens


# -- the history changes ------------------------------------------------------------------------------


def edit_a_word(messages: list[Message]) -> list[Message]:
    words = messages[1]["content"].split()
    words[len(words) * 3 // 4] = "zebra"
    return [messages[0], user(" ".join(words)), *messages[2:]]


def strip_reasoning(messages: list[Message]) -> list[Message]:
    answer = messages[2]["content"]
    return [*messages[:2], {"role": "assistant", "content": answer[len(answer) // 2 :]}, *messages[3:]]


def summarise(messages: list[Message]) -> list[Message]:
    return [messages[0], user("In short: " + messages[1]["content"][:400])]


def roll_back(messages: list[Message]) -> list[Message]:
    return messages[:3]


def regenerate(messages: list[Message]) -> list[Message]:
    return messages[:4]


def replace_system_prompt(messages: list[Message]) -> list[Message]:
    return [{"role": "system", "content": "You answer as a captain would."}, *messages[1:]]


CHANGES: dict[str, Callable[[list[Message]], list[Message]]] = {
    "an edited word": edit_a_word,
    "stripped reasoning": strip_reasoning,
    "a summary": summarise,
    "a rollback": roll_back,
    "a regenerate": regenerate,
    "another system prompt": replace_system_prompt,
    "nothing": lambda messages: messages,
}


@pytest.mark.parametrize("change", CHANGES)
def test_reuse_is_exactly_the_common_prefix(history: HistoryCluster, plain: Client, change: str) -> None:
    live, rng = history.behind("cold"), random.Random(change)
    with Client(live.url, headers={KEY_HEADER: change}) as client:
        messages = two_turns(client, rng)
        kept = kept_tokens(live, messages)
        changed = CHANGES[change](messages)
        if change != "a regenerate":
            changed = [*changed, user(prose(rng, 100))]
        with counted(live) as work:
            reply = client.say(changed)
        assert_same(reply, plain.say(changed))
        prompt = rendered(live, changed)
        num_common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(kept, prompt, strict=False)))
        num_usable = whole_blocks(min(num_common, len(prompt) - 1))
        assert work.prefill["fetched"] == (num_usable if num_usable >= THRESHOLD_TOKENS else 0)
        assert work.prefill["computed"] == len(prompt) - work.prefill["fetched"]
        # Whatever was reused left nothing wrong behind.
        assert_same(reply, client.say(changed))


def two_turns(client: Client, rng: random.Random) -> list[Message]:
    """A system prompt, two questions of some blocks and their answers."""
    messages = [{"role": "system", "content": f"You are passenger {rng.randrange(10**6)}."}]
    for num_tokens in (300, 160):
        messages.append(user(prose(rng, num_tokens)))
        messages.append(assistant(client.say(messages)))
    return messages


def rendered(live: Live, messages: list[Message]) -> list[int]:
    tokens: list[int] = post(live.plain_url, "/tokenize", {"model": MODEL_NAME, "messages": messages}).body["tokens"]
    return tokens


def kept_tokens(live: Live, messages: list[Message]) -> list[int]:
    """Tokens of the full blocks of a conversation that ends with an answer; the last one of it has no KV."""
    body = {"model": MODEL_NAME, "prompt": messages[-1]["content"], "add_special_tokens": False}
    answer = post(live.plain_url, "/tokenize", body).body["tokens"]
    tokens = [*rendered(live, messages[:-1]), *answer]
    return tokens[: whole_blocks(len(tokens) - 1)]


def test_two_branches_from_one_turn_at_the_same_time(history: HistoryCluster, plain: Client) -> None:
    live, rng = history.behind("cold"), random.Random("branches")
    with Client(live.url) as client, ThreadPoolExecutor(2) as pool:
        messages = two_turns(client, rng)
        branches = [[*messages, user(prose(rng, 90))] for _ in range(2)]
        with counted(live, num_requests=2) as work:
            replies = list(pool.map(client.say, branches))
        assert work.prefill["fetched"] == 2 * len(kept_tokens(live, messages))
        for branch, reply in zip(branches, replies, strict=True):
            assert_same(reply, plain.say(branch))
            more = [*branch, assistant(reply), user(prose(rng, 60))]
            with counted(live) as work:
                assert_same(client.say(more), plain.say(more))
            assert work.prefill["fetched"] == len(kept_tokens(live, more[:-1]))


@pytest.mark.parametrize("other", ["salt", "adapter", "adapter of an adapter's"])
def test_nothing_is_reused_under_another_salt_or_adapter(history: HistoryCluster, other: str) -> None:
    """Told by hand, since the router does not even look for a turn of another model."""
    live = history.behind("cold")
    hand, body = by_hand(live), completion(live, 3 * BLOCK_SIZE_TOKENS + 9)
    kept, asked = {
        "salt": ({"cache_salt": "one"}, {"cache_salt": "two"}),
        "adapter": ({}, {"model": ADAPTERS[0]}),
        "adapter of an adapter's": ({"model": ADAPTERS[0]}, {"model": ADAPTERS[1]}),
    }[other]
    handle = hand.keep(body | kept)
    reference = live.ask_plain(COMPLETIONS, body | asked)
    if other != "salt":
        assert reference.text != live.ask_plain(COMPLETIONS, body | kept).text, "the adapters must make a difference"
    for attempt, num_expected in ((body | asked, 0), (body | kept, 3 * BLOCK_SIZE_TOKENS)):
        with counted(live) as work:
            answer = hand.ask(attempt, handle)
        assert_equal(answer, live.ask_plain(COMPLETIONS, attempt))
        assert work.prefill["fetched"] == num_expected
    for answer in hand.ask_each_alone(body | asked):
        assert_equal(answer, reference)
    hand.release([handle])


def test_a_handle_lends_only_what_a_prompt_has_in_common_with_it_and_leaves_no_trace(history: HistoryCluster) -> None:
    """The prefill engine has a prefix cache here, which wrong KV would stay in."""
    live = history.behind("warm")
    hand, kept = by_hand(live), completion(live, 4 * BLOCK_SIZE_TOKENS)
    handle = hand.keep(kept)
    strangers = [*reversed(live.token_ids(4 * BLOCK_SIZE_TOKENS + 5))]
    for num_common in (0, 100, 2 * BLOCK_SIZE_TOKENS + 50):
        body = kept | {"prompt": kept["prompt"][:num_common] + strangers[num_common:]}
        reference = live.ask_plain(COMPLETIONS, body)
        with counted(live) as work:
            assert_equal(hand.ask(body, handle), reference)
        assert work.prefill["fetched"] == whole_blocks(num_common)
        for answer in hand.ask_each_alone(body):
            assert_equal(answer, reference)
    for answer in hand.ask_each_alone(kept):
        assert_equal(answer, live.ask_plain(COMPLETIONS, kept))
    hand.release([handle])


def test_two_callers_with_one_conversation_id_share_nothing(history: HistoryCluster, plain: Client) -> None:
    live, rng = history.behind("cold"), random.Random("callers")
    header = {KEY_HEADER: "the same"}
    with (
        Client(live.url, api_key="hers", headers=header) as hers,
        Client(live.url, api_key="his", headers=header) as his,
    ):
        messages = two_turns(hers, rng)
        for mine in ([*messages[:3], user(prose(rng, 100))], [user(prose(rng, 300))]):
            with counted(live) as work:
                assert_same(his.say(mine), plain.say(mine))
            # What he has said himself may be read for his second question, and has nothing in common with it.
            assert work.prefill["fetched"] == 0
        more = [*messages, user(prose(rng, 100))]
        with counted(live) as work:
            assert_same(hers.say(more), plain.say(more))
        assert work.prefill["fetched"] == len(kept_tokens(live, messages))


# -- time and room ------------------------------------------------------------------------------------


def test_a_turn_is_reused_until_its_time_is_over_and_then_computed(history: HistoryCluster, plain: Client) -> None:
    live, rng = history.behind("brief"), random.Random("time")
    with Client(live.url) as client:
        messages = two_turns(client, rng)
        time.sleep(TTL_S - 4)
        messages.append(user(prose(rng, 100)))
        with counted(live) as work:
            reply = client.say(messages)
        assert_same(reply, plain.say(messages))
        assert work.prefill["fetched"] == len(kept_tokens(live, messages[:-1]))
        messages.append(assistant(reply))
        keep_busy(live, for_s=TTL_S + 2)
        messages.append(user(prose(rng, 100)))
        with counted(live) as work:
            assert_same(client.say(messages), plain.say(messages))
        assert work.prefill["fetched"] == 0


def test_a_handle_is_unknown_when_its_time_is_over(history: HistoryCluster) -> None:
    live = history.behind("brief")
    hand, body = by_hand(live), completion(live, 4 * BLOCK_SIZE_TOKENS)
    handle = hand.keep(body)
    keep_busy(live, for_s=TTL_S + 2)
    longer = body | {"prompt": body["prompt"] + live.token_ids(70)}
    with counted(live) as work:
        assert_equal(hand.ask(longer, handle), live.ask_plain(COMPLETIONS, longer))
    assert work.prefill["fetched"] == 0
    assert_nothing_pinned(live)


def keep_busy(live: Live, *, for_s: float) -> None:
    """Other traffic, past the router: it leaves nothing behind."""
    ends_at_s = time.monotonic() + for_s
    while time.monotonic() < ends_at_s:
        live.nudge()


def assert_nothing_pinned(live: Live) -> None:
    """After the time of all that was kept there, and the engine's next step."""
    (name,) = live.decode_names
    body = {"model": MODEL_NAME, "prompt": "Hi", "max_tokens": 2, "temperature": 0}
    assert post(live.engine_url(name), COMPLETIONS, body).status == 200
    report, metrics = status_of(live, name), live.metrics(name)
    assert report.num_holdings == report.num_held_blocks == report.num_retained_blocks == report.num_leases == 0
    assert metrics.sum("kvshuttle:retained_blocks") == 0
    if live.fleet.check(live.prefill_names[0]):
        # Blocks of a hand-off from a dead writer wait for word of it, which only its next life can give.
        assert metrics.sum("vllm:kv_cache_usage_perc") == metrics.sum("kvshuttle:quarantined_blocks") == 0


def test_what_is_kept_gives_way_to_new_load_without_any_preemption(history: HistoryCluster) -> None:
    live = history.behind("small")
    hand, name = by_hand(live), "decode-1"
    bodies = [completion(live, 9 * BLOCK_SIZE_TOKENS + 20) for _ in range(4)]
    kept = [(body, hand.keep(body)) for body in bodies]
    assert status_of(live, name).num_retained_blocks == NUM_SMALL_BUDGET
    before = live.metrics(name)
    # With their answers they need 30 blocks of 40, all at once.
    bodies = [completion(live, 4 * BLOCK_SIZE_TOKENS - 9, max_tokens=100) for _ in range(6)]
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(lambda body: live.ask(COMPLETIONS, body), bodies))
    for body, answer in zip(bodies, answers, strict=True):
        assert_equal(answer, live.ask_plain(COMPLETIONS, body))
    after = live.metrics(name)
    assert after.sum("vllm:num_preemptions_total") == before.sum("vllm:num_preemptions_total")
    assert after.sum("kvshuttle:retentions_total", outcome="pressure") > 0
    is_kept = [left_s > 0 for left_s in hand.remaining_s([handle for _, handle in kept])]
    assert not is_kept[0]
    assert is_kept == sorted(is_kept), "those used longest ago go first"
    # What is gone is computed.
    body, handle = kept[0]
    longer = body | {"prompt": body["prompt"] + live.token_ids(70)}
    assert_equal(hand.ask(longer, handle), live.ask_plain(COMPLETIONS, longer))
    hand.release([handle for _, handle in kept])


def test_of_sixteen_idle_conversations_beyond_the_budget_the_oldest_go_first(history: HistoryCluster) -> None:
    live = history.behind("small")
    hand = by_hand(live)
    handles = [hand.keep(completion(live, 3 * BLOCK_SIZE_TOKENS + 30, max_tokens=2)) for _ in range(16)]
    is_kept = [left_s > 0 for left_s in hand.remaining_s(handles)]
    num_kept = sum(is_kept)
    assert num_kept == NUM_SMALL_BUDGET // 3
    assert is_kept == [False] * (16 - num_kept) + [True] * num_kept
    assert live.metrics("decode-1").sum("kvshuttle:retentions_total", outcome="budget") > 0
    hand.release(handles)


# -- deaths -------------------------------------------------------------------------------------------


def test_a_router_that_is_restarted_between_turns_misses_once(history: HistoryCluster, plain: Client) -> None:
    live, rng = history.behind("cold"), random.Random("router")
    with Client(live.url) as client:
        messages = two_turns(client, rng)
    history.router("cold").restart("router", timeout_s=60)
    with Client(live.url) as client:
        assert_goes_on(live, client, plain, messages, rng)


def test_a_decode_engine_killed_between_turns_costs_a_miss(history: HistoryCluster, plain: Client) -> None:
    """The other one answers meanwhile, and the killed one takes part again when it is back."""
    live, rng = history.behind("either"), random.Random("decode engine")
    with Client(live.url) as client:
        before = [live.metrics(name).num_requests() for name in live.decode_names]
        messages = two_turns(client, rng)
        served = [live.metrics(name).num_requests() - num for name, num in zip(live.decode_names, before, strict=True)]
        assert sorted(served) == [0, 2], "the second turn goes to the engine that keeps the first"
        killed = live.decode_names[served.index(2)]
        history.live.fleet.kill(killed)
        try:
            messages = assert_goes_on(live, client, plain, messages, rng)
        finally:
            history.live.fleet.restart(killed, timeout_s=300)
        assert_goes_on(live, client, plain, messages, rng)


def assert_goes_on(
    live: Live, client: Client, plain: Client, messages: list[Message], rng: random.Random
) -> list[Message]:
    """A next turn is right, with a miss allowed, and the one after it reads history."""
    for is_miss_allowed in (True, False):
        messages = [*messages, user(prose(rng, 150))]
        before = live.metrics(live.prefill_names[0]).prompts()
        reply = client.say(messages)
        assert_same(reply, plain.say(messages))
        work = difference(live.metrics(live.prefill_names[0]).prompts(), before)
        assert is_miss_allowed or work["fetched"] == len(kept_tokens(live, messages[:-1]))
        messages = [*messages, assistant(reply)]
    return messages


def test_a_prefill_engine_killed_while_it_reads_leaves_nothing_pinned(history: HistoryCluster, plain: Client) -> None:
    live, rng = history.behind("brief"), random.Random("prefill engine")
    fleet, (prefill,) = history.live.fleet, live.prefill_names
    with Client(live.url) as client:
        messages = [user(prose(rng, 4500))]
        messages.append(assistant(client.say(messages)))
        reply = None
        for _ in range(MAX_ATTEMPTS):
            messages.append(user(prose(rng, 60)))
            reply = say_and_kill_the_reader(live, client, messages)
            messages.append(assistant(reply))
            if not fleet.check(prefill):
                break
        killed_at_s = time.monotonic()
        assert reply is not None
        assert not fleet.check(prefill), f"{MAX_ATTEMPTS} reads were over before they could be stopped"
        # The decode engine computes it, and has most of it.
        assert_same(reply, plain.say(messages[:-1]))
        time.sleep(max(0.0, killed_at_s + TTL_S + 2 - time.monotonic()))
        assert_nothing_pinned(live)
        fleet.restart(prefill, timeout_s=300)
        assert_goes_on(live, client, plain, messages, rng)
        time.sleep(TTL_S + 2)
        assert_nothing_pinned(live)


def say_and_kill_the_reader(live: Live, client: Client, messages: list[Message]) -> Reply:
    """A turn during which the prefill engine is killed, if it can be caught with a lease on the history."""
    (prefill,), (decode,) = live.prefill_names, live.decode_names
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.say, messages)
        while not asked.done():
            if not status_of(live, decode).num_leases:
                continue
            # Suspended, it cannot end its read between the look and the kill.
            os.killpg(live.fleet.pid(prefill), signal.SIGSTOP)
            if status_of(live, decode).num_leases:
                live.fleet.kill(prefill)
                break
            os.killpg(live.fleet.pid(prefill), signal.SIGCONT)
        return asked.result(timeout=60)


def test_no_engine_has_met_a_bug(history: HistoryCluster) -> None:
    for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
        assert history.live.metrics(name).sum("kvshuttle:internal_errors_total") == 0, name
