"""Which mode a request gets, from whom, and where one can see it."""

import json

import pytest

from support.fake_engine import hang
from support.router_cluster import cluster

COMPLETIONS = "/v1/completions"
BODY = {"model": "m", "prompt": "hello"}


@pytest.fixture(scope="module")
def shared():
    with cluster(1, 2) as running:
        yield running


@pytest.fixture
def auto(shared):
    for engine in [*shared.prefills, *shared.decodes]:
        engine.forget()
        engine.report = {}
    seen(shared)
    yield shared
    shared.wait_until_nothing_is_left()


def seen(one) -> None:
    """Wait until the router knows the reports that its engines give now."""

    def knows(engine, report) -> bool:
        return report is not None and all(getattr(report, name) == value for name, value in engine.load.items())

    engines = one.router.registry.engines
    one.wait_for(lambda: all(knows(engine, engines[engine.name].report) for engine in one.decodes))


def modes_of(one) -> list[str]:
    return [call.leg["mode"] for call in one.prefills[0].calls]


@pytest.mark.parametrize("given", ["push", "pull", " PULL "])
def test_a_request_may_choose_its_mode_and_engines_do_not_see_how(auto, given):
    mode = given.strip().lower()
    before = auto.metric("modes_total", mode=mode, reason="requested")
    assert auto.post(COMPLETIONS, BODY, {"X-Kvshuttle-Mode": given}).status == 200
    assert modes_of(auto) == [mode]
    assert auto.metric("modes_total", mode=mode, reason="requested") == before + 1
    for engine in [*auto.prefills, *auto.decodes]:
        assert all("x-kvshuttle-mode" not in call.headers for call in engine.calls)


@pytest.mark.parametrize("given", ["", "both", "push,pull", "\u00e9"])
def test_a_mode_that_does_not_exist_reaches_no_engine(auto, given):
    reply = auto.post(COMPLETIONS, BODY, {"X-Kvshuttle-Mode": given})
    assert reply.status == 400
    assert "x-kvshuttle-mode" in reply.json["error"]["message"]
    assert "auto, push, pull" in reply.json["error"]["message"]
    assert auto.prefills[0].calls == auto.decodes[0].calls == auto.decodes[1].calls == []


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_the_routers_own_mode_holds_unless_the_request_chooses(mode):
    with cluster(mode=mode) as one:
        assert one.post(COMPLETIONS, BODY).status == 200
        other = "pull" if mode == "push" else "push"
        assert one.post(COMPLETIONS, BODY, {"x-kvshuttle-mode": other}).status == 200
        assert one.post(COMPLETIONS, BODY, {"x-kvshuttle-mode": "auto"}).status == 200
        assert modes_of(one) == [mode, other, "push"]
        assert one.metric("modes_total", mode=mode, reason="configured") == 1
        assert one.metric("modes_total", mode=other, reason="requested") == 1
        assert one.metric("modes_total", mode="push", reason="decode_free") == 1


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        ({"num_waiting": 1}, "decode_queues"),
        ({"num_running": 4, "num_slots": 4}, "decode_slots"),
        ({"num_free_blocks": 0}, "decode_memory"),
    ],
)
def test_auto_pulls_while_all_decode_engines_are_busy_and_says_why(auto, report, reason, caplog):
    for engine in auto.decodes:
        engine.report = report
    seen(auto)
    before = auto.metric("modes_total", mode="pull", reason=reason)
    with caplog.at_level("INFO", logger="kvshuttle.router.requests"):
        assert auto.post(COMPLETIONS, BODY, {"x-request-id": "why-1"}).status == 200
        auto.wait_for(lambda: any("why-1" in record.getMessage() for record in caplog.records))
    (receipt,) = [json.loads(record.getMessage()) for record in caplog.records if "why-1" in record.getMessage()]
    assert (receipt["mode"], receipt["mode_reason"]) == ("pull", reason)
    assert modes_of(auto) == ["pull"]
    assert auto.metric("modes_total", mode="pull", reason=reason) == before + 1


def test_auto_pushes_to_the_one_that_is_free_however_little_the_busy_one_has(auto):
    free, busy = auto.decodes
    busy.report = {"num_waiting": 1}
    free.report = {"num_running": 8}
    seen(auto)
    for _ in range(3):
        assert auto.post(COMPLETIONS, BODY).status == 200
    assert [len(engine.calls) for engine in (free, busy)] == [3, 0]
    assert modes_of(auto) == ["push"] * 3


def test_waiting_for_kv_is_no_queue(auto):
    for engine in auto.decodes:
        engine.report = {"num_waiting": 3, "num_loading": 3}
    seen(auto)
    assert auto.post(COMPLETIONS, BODY).status == 200
    assert modes_of(auto) == ["push"]


def test_what_was_sent_since_the_last_report_counts():
    with cluster(probe_interval_s=30) as one:
        engine = one.router.registry.engines["decode-0"]
        one.wait_for(lambda: engine.report is not None)
        one.decodes[0].script.append(hang)
        # A hundred blocks of sixteen tokens.
        client = one.send_post(COMPLETIONS, {"model": "m", "prompt": [1] * 1500})
        one.wait_for(lambda: len(one.decodes[0].calls) == 1)
        assert one.post(COMPLETIONS, {"model": "m", "prompt": [1] * 90}).status == 200
        assert one.post(COMPLETIONS, {"model": "m", "prompt": [1] * 200}).status == 200
        assert modes_of(one) == ["push", "push", "pull"]
        assert one.metric("modes_total", mode="pull", reason="decode_memory") == 1
        client.close()


def test_a_request_that_goes_to_a_decode_engine_alone_has_no_mode(auto, caplog):
    total = sum(auto.metric("modes_total", mode=mode, reason="requested") for mode in ("push", "pull"))
    with caplog.at_level("INFO", logger="kvshuttle.router.requests"):
        several = {**BODY, "prompt": ["a", "b"]}
        assert auto.post(COMPLETIONS, several, {"x-kvshuttle-mode": "push", "x-request-id": "alone-1"}).status == 200
        auto.wait_for(lambda: any("alone-1" in record.getMessage() for record in caplog.records))
    (receipt,) = [json.loads(record.getMessage()) for record in caplog.records if "alone-1" in record.getMessage()]
    assert (receipt["route"], receipt["mode"], receipt["mode_reason"]) == ("local", "", "")
    assert auto.prefills[0].calls == []
    assert sum(auto.metric("modes_total", mode=mode, reason="requested") for mode in ("push", "pull")) == total
