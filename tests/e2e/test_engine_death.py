"""An engine that dies takes nothing with it: clients get an answer or an error, and KV moves again once it is back."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from kvshuttle.handoff.messages import PROTOCOL_VERSION, Hello, HelloAck
from kvshuttle.handoff.params import DecodeLeg, Peer, PrefillLeg, parse_result, to_params
from support.live import BLOCK_SIZE_TOKENS, HAND_OFFS, MODEL_NAME, Answer, difference, get, post
from support.scores import ASK_SCORES_COMPLETION, assert_same

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.live import Live

ANSWER_WITHIN_S = 15.0
KV_MOVES_WITHIN_S = 30.0
SUSPENDED_ANSWER_WITHIN_S = 45.0
"""The deadlines of a push, and the time that the decode engine needs for the prompt."""
MODES = ("pull", "push")


@pytest.fixture(autouse=True)
def _all_up_afterwards(live: Live) -> Iterator[None]:
    """A failed test must not take the next ones with it."""
    yield
    for name in live.fleet.dead():
        live.fleet.restart(name, timeout_s=300)


def completion(live: Live, num_tokens: int, *, max_tokens: int = 8) -> dict[str, object]:
    body = {"model": MODEL_NAME, "prompt": live.token_ids(num_tokens), "max_tokens": max_tokens, "temperature": 0}
    return body | ASK_SCORES_COMPLETION


def ask_within(live: Live, body: dict[str, object], deadline_s: float, *, mode: str) -> Answer:
    started_at_s = time.monotonic()
    answer = live.ask("/v1/completions", body, mode=mode)
    assert time.monotonic() - started_at_s < deadline_s
    return answer


def assert_right_or_5xx(live: Live, body: dict[str, object], answer: Answer) -> None:
    if answer.status == 200:
        assert_same(answer, live.ask_plain("/v1/completions", body))
    else:
        assert_clean_5xx(answer)


def assert_clean_5xx(answer: Answer) -> None:
    assert 500 <= answer.status < 600, answer.raw
    assert answer.body["error"]["message"]


def assert_alive(live: Live, *names: str) -> None:
    for name in names:
        assert live.fleet.check(name), name
    assert "router" not in live.fleet.dead()


def assert_kv_moves_again(live: Live, name: str, *modes: str) -> None:
    """Start the engine at its old ports, touch nothing else, and see KV move within the deadline."""
    live.fleet.restart(name, timeout_s=300)
    for mode in modes:
        wait_until_kv_moves(live, mode=mode)


def wait_until_kv_moves(live: Live, *, mode: str) -> None:
    deadline_at_s = time.monotonic() + KV_MOVES_WITHIN_S
    while True:
        body = completion(live, 2 * BLOCK_SIZE_TOKENS)
        before = live.moved()
        answer = live.ask("/v1/completions", body, mode=mode)
        moved = difference(live.moved(), before)
        if answer.status == 200 and moved[HAND_OFFS[mode]] == 1:
            assert_same(answer, live.ask_plain("/v1/completions", body))
            break
        assert time.monotonic() < deadline_at_s, (answer.status, moved)
    assert live.wait_settled(timeout_s=15) == {}


def test_killing_an_idle_prefill_engine(live: Live) -> None:
    live.fleet.kill("prefill-0")
    for mode in MODES:
        body = completion(live, 2 * BLOCK_SIZE_TOKENS)
        assert_right_or_5xx(live, body, ask_within(live, body, ANSWER_WITHIN_S, mode=mode))
    assert_alive(live, "decode-0")
    assert_kv_moves_again(live, "prefill-0", *MODES)


@pytest.mark.parametrize("mode", MODES)
def test_killing_the_prefill_engine_while_it_prefills(live: Live, mode: str) -> None:
    body = completion(live, 1900)
    before = live.pushed()["streamed"]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(live.ask, "/v1/completions", body, mode=mode)
        wait_until_running(live, "prefill-0")
        if mode == "push":
            wait_until_streaming(live, before)
        live.fleet.kill("prefill-0")
        answer = asked.result(timeout=ANSWER_WITHIN_S)
    assert_right_or_5xx(live, body, answer)
    assert_alive(live, "decode-0")
    assert_kv_moves_again(live, "prefill-0", mode)


def test_killing_the_prefill_engine_between_its_answer_and_the_read(live: Live) -> None:
    """The two legs are sent by hand, since the router leaves no time between them."""
    body = completion(live, 3 * BLOCK_SIZE_TOKENS + 7)
    peer = source_of(live, "prefill-0")
    leg = PrefillLeg(transfer_id="killed-between")
    prefilled = post(
        live.engine_url("prefill-0"),
        "/v1/completions",
        {**body, "max_tokens": 1, "kv_transfer_params": to_params(leg)},
    )
    assert parse_result(prefilled.body["kv_transfer_params"]) is not None
    live.fleet.kill("prefill-0")
    before = live.moved()
    started_at_s = time.monotonic()
    answer = post(
        live.engine_url("decode-0"),
        "/v1/completions",
        {**body, "kv_transfer_params": to_params(DecodeLeg(transfer_id="killed-between", source=peer))},
    )
    assert time.monotonic() - started_at_s < ANSWER_WITHIN_S
    assert_same(answer, live.ask_plain("/v1/completions", body))
    moved = difference(live.moved(), before)
    assert moved["transfers"] == 1
    assert moved["read_ok"] == 0
    assert_alive(live, "decode-0")
    assert_kv_moves_again(live, "prefill-0", "pull")


def test_killing_an_idle_decode_engine(live: Live) -> None:
    live.fleet.kill("decode-0")
    for mode in MODES:
        answer = ask_within(live, completion(live, 2 * BLOCK_SIZE_TOKENS), ANSWER_WITHIN_S, mode=mode)
        assert_clean_5xx(answer)
    assert_alive(live, "prefill-0")
    assert_kv_moves_again(live, "decode-0", *MODES)


@pytest.mark.parametrize(("mode", "moment"), [("pull", "decoding"), ("push", "decoding"), ("push", "being written to")])
def test_killing_the_decode_engine(live: Live, mode: str, moment: str) -> None:
    num_tokens = 1900 if moment == "being written to" else 2 * BLOCK_SIZE_TOKENS
    body = completion(live, num_tokens, max_tokens=400 if moment == "decoding" else 8)
    before = live.pushed()["streamed"]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(live.ask, "/v1/completions", body, mode=mode)
        if moment == "decoding":
            wait_until_running(live, "decode-0")
        else:
            wait_until_streaming(live, before)
        live.fleet.kill("decode-0")
        answer = asked.result(timeout=ANSWER_WITHIN_S)
    assert_clean_5xx(answer)
    assert_alive(live, "prefill-0")
    assert_kv_moves_again(live, "decode-0", mode)


def test_suspending_the_prefill_engine_while_it_streams(live: Live) -> None:
    body = completion(live, 1900)
    before = live.pushed()["streamed"]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(live.ask, "/v1/completions", body, mode="push")
        wait_until_streaming(live, before)
        with suspended(live, "prefill-0"):
            assert_right_or_5xx(live, body, asked.result(timeout=SUSPENDED_ANSWER_WITHIN_S))
    wait_until_kv_moves(live, mode="push")
    assert_alive(live, "prefill-0", "decode-0")


@contextlib.contextmanager
def suspended(live: Live, name: str) -> Iterator[None]:
    """All processes of an engine, as by SIGSTOP to its group."""
    group = live.fleet.pid(name)
    os.killpg(group, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(group, signal.SIGCONT)


def wait_until_streaming(live: Live, before_bytes: float, *, timeout_s: float = 20.0) -> None:
    """Until the prefill engine has written a first chunk of a prompt that it still computes."""
    deadline_at_s = time.monotonic() + timeout_s
    while live.pushed()["streamed"] == before_bytes:
        assert time.monotonic() < deadline_at_s, "nothing was streamed"
        threading.Event().wait(0.01)


def wait_until_running(live: Live, name: str, *, timeout_s: float = 10.0) -> None:
    """Poll the side channel, which answers while the engine computes, until the engine runs a request."""
    from kvshuttle.handoff.messages import Status, StatusReport
    from support.side import ask_side

    deadline_at_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_at_s:
        report = ask_side(live.fleet.plan_of(name).side_address, Status())
        assert isinstance(report, StatusReport)
        if report.num_running:
            return
        threading.Event().wait(0.02)
    raise AssertionError(f"{name} ran nothing within {timeout_s} s")


def source_of(live: Live, name: str) -> Peer:
    from support.side import ask_side

    address = live.fleet.plan_of(name).side_address
    ack = ask_side(address, Hello(protocol_version=PROTOCOL_VERSION, sender="test"))
    assert isinstance(ack, HelloAck)
    return Peer(address=address, engine_id=ack.card.engine_id, incarnation=ack.card.incarnation)


def test_the_router_itself_stays_up(live: Live) -> None:
    status, _ = get(live.url, "/health")
    assert status == 200
