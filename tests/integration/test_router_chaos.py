"""Many clients, engines that fail in every way, and what must hold afterwards."""

import contextlib
import json
import random
import threading

import pytest

from support.fake_engine import (
    DEFAULT_EVENTS,
    default_behaviour,
    hang,
    reset_after_headers,
    reset_before_headers,
    sse,
    status,
    stream,
)
from support.router_cluster import cluster

COMPLETIONS = "/v1/completions"
NUM_CLIENTS = 8
NUM_REQUESTS = 25


async def break_off(call) -> None:
    """After the first data event, where that is possible."""
    if call.body.get("stream"):
        await stream([sse("x"), b'data: {"ha'], then="reset")(call)
    else:
        await call.reset()


async def hang_if_streamed(call) -> None:
    """Whole answers have only the total limit, so that each of these would take as long as all else together."""
    await (hang(call) if call.body.get("stream") else call.reset())


def scripted(rng: random.Random, faults: list, share: float):
    """Endless: mostly well, sometimes a fault."""

    class Script:
        def popleft(self):
            return rng.choice(faults) if rng.random() < share else default_behaviour

        def __bool__(self) -> bool:
            return True

    return Script()


def use(one, seed: int, outcomes: list) -> None:
    rng = random.Random(seed)
    for number in range(NUM_REQUESTS):
        is_stream = rng.random() < 0.6
        body = {"model": "m", "prompt": f"{seed} " * 30 + "more " * number, "stream": is_stream}
        with contextlib.closing(one.send_post(COMPLETIONS, body, "connection: close\r\n")) as client:
            if rng.random() < 0.2:
                client.settimeout(rng.random() * 0.1)
                with contextlib.suppress(OSError):
                    client.recv(1)
                continue
            data = b""
            while piece := client.recv(65536):
                data += piece
            outcomes.append((is_stream, data))


@pytest.mark.parametrize(
    ("seed", "mode", "is_reusing"), [(1, "pull", False), (2, "push", False), (3, "auto", False), (4, "auto", True)]
)
def test_whatever_fails_answers_are_whole_or_marked_and_nothing_stays_held(seed, mode, is_reusing):
    rng = random.Random(seed)
    print(f"seed={seed}")
    faults = [status(500), status(503), reset_before_headers]
    prefill_faults = [*faults, hang]
    decode_faults = [*faults, hang_if_streamed, reset_after_headers, break_off]
    knobs = {"mode": mode, "total_timeout_s": 20, "max_attempts": 4, "is_reusing_history": is_reusing}
    with cluster(2, 2, **knobs, prefill_timeout_s=0.3, first_byte_timeout_s=0.3) as one:
        for prefill in one.prefills:
            prefill.script = scripted(random.Random(rng.random()), prefill_faults, 0.15)
        for decode in one.decodes:
            decode.script = scripted(random.Random(rng.random()), decode_faults, 0.25)
        outcomes: list = []
        clients = [threading.Thread(target=use, args=(one, seed * 100 + n, outcomes)) for n in range(NUM_CLIENTS)]
        for client in clients:
            client.start()
        for client in clients:
            client.join(60)
        check_answers(outcomes)
        one.wait_until_nothing_is_left()
        check_handles(one)
        check_turns(one, is_reusing=is_reusing)


def check_answers(outcomes: list) -> None:
    good = b"".join(DEFAULT_EVENTS)
    assert outcomes
    for is_stream, data in outcomes:
        head, _, rest = data.partition(b"\r\n\r\n")
        code = int(head.split()[1])
        if code != 200:
            assert code in (502, 503, 504), data
            assert json.loads(rest)["error"]["code"] == code
        elif not is_stream:
            assert json.loads(rest)["choices"][0]["text"] == "hello world"
        elif data.endswith(b"0\r\n\r\n"):
            assert b"".join(piece.partition(b"\r\n")[2] for piece in chunks(rest)) == good
        else:
            assert b"EngineFailedError" in data
            assert b"[DONE]" not in data


def chunks(body: bytes) -> list[bytes]:
    """Each chunk with its size line, whatever its data holds."""
    found = []
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        found.append(size + b"\r\n" + rest[:length])
        body = rest[length + 2 :]
    return found


def check_handles(one) -> None:
    """Every transfer was either fetched by a decode leg that got its answer begun, or given back."""
    prefill_ids = [call.leg["transfer_id"] for engine in one.prefills for call in engine.calls]
    assert len(prefill_ids) == len(set(prefill_ids))
    legs = [call for engine in one.decodes for call in engine.calls if call.leg and "transfer_id" in call.leg]
    decoded = {call.leg["transfer_id"] for call in legs if not call.was_aborted}
    # A pushed decode leg may be on its way before its prefill leg, and alone when its client leaves just then.
    assert {call.leg["transfer_id"] for call in legs if call.leg["mode"] == "pull"} <= set(prefill_ids)

    def left_over() -> set[str]:
        released = {handle for engine in one.prefills for handle in engine.released}
        return set(prefill_ids) - decoded - released

    one.wait_for(lambda: not left_over())


def check_turns(one, *, is_reusing: bool) -> None:
    """Every handle that an engine was asked to keep is in the table, superseded, or given back in the end."""
    table = one.router.conversations.table
    calls = [call for engine in one.decodes for call in engine.calls if call.leg and "keep" in call.leg]
    asked = {call.leg["keep"]["handle"] for call in calls}
    superseded = {call.leg["keep"].get("supersedes") for call in calls}
    assert bool(asked) is bool(table) is is_reusing
    one.wait_for(lambda: asked == asked & (set(table._turns) | superseded | given_back(one)))
    assert not set(table._turns) & given_back(one)


def given_back(one) -> set[str]:
    return {handle for engine in one.decodes for handle in engine.released}
