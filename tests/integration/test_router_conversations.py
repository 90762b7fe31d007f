"""What legs say of history over the turns of conversations: nothing of KV happens here, only words."""

import json
import time
from urllib.parse import quote

import pytest

from kvshuttle.handoff.messages import Release, Renew
from kvshuttle.handoff.params import parse_leg
from support.fake_engine import DONE, default_behaviour, hang, reset_before_headers, sse, status, stream
from support.router_cluster import Cluster, cluster

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
API = "/v1/kvshuttle/conversations/"
ALICE, BOB = {"authorization": "Bearer alice"}, {"authorization": "Bearer bob"}


@pytest.fixture(scope="module", params=["pull", "push"])
def shared(request):
    with cluster(mode=request.param, is_reusing_history=True) as running:
        yield running


@pytest.fixture
def one(shared):
    for engine in (shared.prefills[0], shared.decodes[0]):
        engine.forget()
        engine.remaining_s.clear()
    return shared


class Talk:
    """A client that resends everything with each turn. ``say`` returns what the legs of its turn said of history."""

    def __init__(self, one: Cluster, opening: str, *, is_stream: bool = False, headers=None, **fields) -> None:
        self.one = one
        self.headers = headers or {}
        self.body = {"model": "m", "stream": is_stream, **fields}
        self.messages = [{"role": "system", "content": opening}]
        self.name = ""

    def say(self, text: str, status: int = 200):
        self.messages.append({"role": "user", "content": text})
        reply = self.one.post(CHAT, {**self.body, "messages": self.messages}, self.headers)
        assert reply.status == status
        self.name = reply.headers.get("x-kvshuttle-conversation", "")
        self.messages.append({"role": "assistant", "content": f"the answer to {text}"})
        return self.said()

    def said(self):
        prefill = next((call.leg for engine in self.one.prefills for call in engine.calls[-1:]), None)
        (decode,) = [engine.calls[-1].leg for engine in self.one.decodes if engine.calls][:1]
        return prefill and prefill.get("history"), decode and decode.get("keep")


def source(engine, incarnation="life-1"):
    return {"address": engine.side_address, "engine_id": f"engine-{engine.name}", "incarnation": incarnation}


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_unmodified_client_is_recognised_turn_after_turn(one, is_stream):
    talk = Talk(one, f"unmodified {is_stream}", is_stream=is_stream)
    history, keep = talk.say("a")
    assert (history, list(keep)) == (None, ["handle"])
    names, handles = {talk.name}, [keep["handle"]]
    for text in "bcde":
        history, keep = talk.say(text)
        assert history == {"handle": handles[-1], "source": source(one.decodes[0])}
        assert keep["supersedes"] == handles[-1]
        handles.append(keep["handle"])
        names.add(talk.name)
    assert len(set(handles)) == 5
    assert len(names) == 1
    assert one.decodes[0].released == []


@pytest.mark.parametrize("prompt", ["x" * 100, list(range(100))])
def test_a_growing_completion_prompt_is_recognised(one, prompt):
    legs = []
    for _ in range(3):
        assert one.post(COMPLETIONS, {"model": "m", "prompt": prompt}).status == 200
        legs.append((one.prefills[0].calls[-1].leg.get("history"), one.decodes[0].calls[-1].leg["keep"]))
        prompt = prompt + prompt[:30]
    assert legs[0][0] is None
    assert [history["handle"] for history, _ in legs[1:]] == [keep["handle"] for _, keep in legs[:2]]
    assert [keep["supersedes"] for _, keep in legs[1:]] == [keep["handle"] for _, keep in legs[:2]]


def test_the_next_turn_is_recognised_even_before_the_engine_has_ended_the_stream(one):
    async def linger(call) -> None:
        await call.wait_for_push() if call.leg["mode"] == "push" else None
        await call.begin_stream()
        for event in [sse("a"), DONE]:
            await call.chunk(event)
        await call.hang()

    talk = Talk(one, "lingering", is_stream=True)
    talk.messages.append({"role": "user", "content": "a"})
    one.decodes[0].script.append(linger)
    client = one.send_post(CHAT, {**talk.body, "messages": talk.messages})
    data = b""
    while b"[DONE]" not in data:
        data += client.recv(65536)
    (handle,) = [call.leg["keep"]["handle"] for call in one.decodes[0].calls]
    talk.messages.append({"role": "assistant", "content": "a"})
    history, _ = talk.say("b")
    assert history["handle"] == handle
    client.close()


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ({"X-Conversation-ID": "one"}, {}),
        ({"X-Session-ID": "two"}, {}),
        ({}, {"conversation_id": "three"}),
        ({}, {"prompt_cache_key": "four"}),
    ],
)
def test_a_conversation_that_its_client_names_is_found_though_its_beginning_has_changed(one, headers, fields):
    talk = Talk(one, "named", headers=headers, **fields)
    _, keep = talk.say("a")
    talk.messages[0]["content"] = "it is another time of day now"
    history, second = talk.say("b")
    assert history["handle"] == keep["handle"]
    assert "supersedes" not in second
    assert "conversation_id" not in one.prefills[0].calls[-1].body
    assert "conversation_id" not in one.decodes[0].calls[-1].body
    assert one.decodes[0].calls[-1].body.get("prompt_cache_key") == fields.get("prompt_cache_key")


def test_a_header_names_the_conversation_before_the_body_does(one):
    talk = Talk(one, "both", headers={"x-conversation-id": "h"}, conversation_id="b")
    talk.say("a")
    other = Talk(one, "something else", conversation_id="b")
    assert other.say("a")[0] is None
    assert one.get(API + "h").json["name"] == talk.name


@pytest.mark.parametrize("name", [None, "shared"])
def test_two_callers_never_meet_whatever_they_call_their_conversations(one, name):
    fields = {"conversation_id": name} if name else {}
    alice = Talk(one, f"two callers {name}", headers=ALICE, **fields)
    bob = Talk(one, f"two callers {name}", headers=BOB, **fields)
    _, of_alice = alice.say("a")
    history, of_bob = bob.say("a")
    assert history is None
    assert "supersedes" not in of_bob
    assert alice.say("b")[0]["handle"] == of_alice["handle"]
    assert bob.say("b")[0]["handle"] == of_bob["handle"]


def test_another_model_is_another_conversation():
    with cluster(is_reusing_history=True) as one:
        one.call(lambda: [one.router.registry.set_models(each, None) for each in one.router.registry.decodes])
        talk = Talk(one, "models")
        talk.say("a")
        talk.body["model"] = ""
        assert talk.say("b")[0] is None


def test_edited_regenerated_and_branched_turns_read_what_is_kept(one):
    talk = Talk(one, "changing")
    talk.say("a")
    _, trunk = talk.say("b")
    talk.messages = [*talk.messages[:3], {"role": "user", "content": "else"}]
    edited = Talk(one, "changing")
    edited.messages = talk.messages[:3]
    history, branch = edited.say("b, edited")
    assert history["handle"] == trunk["handle"]
    assert "supersedes" not in branch
    edited.messages = edited.messages[:-2]
    history, again = edited.say("b, edited")
    assert (history["handle"], again["supersedes"]) == (branch["handle"], branch["handle"])


@pytest.mark.parametrize(
    "change",
    [
        {"use_beam_search": True},
        {"max_tokens": 0},
        {"prompt_logprobs": 1},
        {"prompt": ["x" * 100, "y" * 100]},
        {"prompt_embeds": "x"},
        {"prompt": "short"},
    ],
)
def test_requests_without_a_recognisable_history_say_nothing_of_it(one, change):
    body = {"model": "m", "prompt": "z" * 100, **change}
    before = one.metric("histories_total", result="unnameable")
    for _ in range(2):
        assert one.post(COMPLETIONS, body).status == 200
    assert not {"history", "keep"} & {key for engine in (*one.prefills, *one.decodes) for key in last_leg(engine)}
    assert one.metric("histories_total", result="unnameable") == before + 2


def last_leg(engine):
    return (engine.calls and engine.calls[-1].leg) or {}


def test_clients_cannot_say_what_is_kept_or_read(one):
    forged = {"kvshuttle": {"leg": "decode", "keep": {"handle": "mine"}, "history": {"handle": "yours"}}}
    talk = Talk(one, "forged", kv_transfer_params=forged)
    history, keep = talk.say("a")
    assert history is None
    assert keep["handle"] != "mine"


def test_an_attempt_that_fails_is_retried_with_the_history_and_its_handle_is_given_back(one):
    talk = Talk(one, "retried")
    _, first = talk.say("a")
    one.decodes[0].script.append(status(500))
    history, keep = talk.say("b")
    (failed,) = [call.leg["keep"] for call in one.decodes[0].calls[1:-1]]
    assert (failed["supersedes"], keep["supersedes"]) == (first["handle"], first["handle"])
    assert history["handle"] == first["handle"]
    assert failed["handle"] != keep["handle"]
    one.wait_for(lambda: failed["handle"] in one.decodes[0].released)
    assert keep["handle"] not in one.decodes[0].released


def test_a_prefill_leg_that_fails_with_a_history_is_tried_again_without(one):
    talk = Talk(one, "distrusted")
    talk.say("a")
    before = one.metric("histories_total", result="distrusted")
    one.prefills[0].script.append(status(500))
    history, keep = talk.say("b")
    assert "history" in one.prefills[0].calls[-2].leg
    assert history is None
    assert "supersedes" in keep
    assert one.metric("histories_total", result="distrusted") == before + 1
    assert talk.say("c")[0]["handle"] == keep["handle"]


def test_a_turn_that_no_engine_answers_loses_nothing(one):
    talk = Talk(one, "unanswered")
    _, first = talk.say("a")
    one.decodes[0].script.append(lambda call: call.json(429, {"error": "busy"}))
    talk.say("b", status=429)
    unanswered = one.decodes[0].calls[-1].leg["keep"]["handle"]
    one.wait_for(lambda: unanswered in one.decodes[0].released)
    talk.messages = talk.messages[:-2]
    history, keep = talk.say("b")
    assert (history["handle"], keep["supersedes"]) == (first["handle"], first["handle"])


@pytest.mark.parametrize("is_kept", [True, False])
def test_the_engine_is_asked_what_it_kept_of_a_turn_whose_client_left(one, is_kept):
    talk = Talk(one, f"left {is_kept}", is_stream=True)
    _, first = talk.say("a")
    one.decodes[0].remaining_s[first["handle"]] = 100.0

    async def stop_midway(call) -> None:
        if call.leg["mode"] != "push" or await call.wait_for_push():
            await stream([sse("x")], then="hang")(call)

    one.decodes[0].script.append(stop_midway)
    talk.messages.append({"role": "user", "content": "b"})
    client = one.send_post(CHAT, {**talk.body, "messages": talk.messages})
    assert client.recv(12) == b"HTTP/1.1 200"
    left = one.decodes[0].calls[-1].leg["keep"]["handle"]
    if is_kept:
        one.call(lambda: one.decodes[0].remaining_s.pop(first["handle"]))
        one.decodes[0].remaining_s[left] = 50.0
    num_before = len(one.channel.messages)
    client.close()

    def renewals():
        renewals = [each for _, each in one.channel.messages[num_before:] if isinstance(each, Renew)]
        return [each for each in renewals if left in each.handles]

    one.wait_for(lambda: len(renewals()) == 1)
    assert renewals()[0].handles == (left, first["handle"])
    talk.messages.append({"role": "assistant", "content": "x"})
    history, keep = talk.say("c")
    expected = left if is_kept else first["handle"]
    assert (history["handle"], keep["supersedes"]) == (expected, expected)
    if not is_kept:
        one.wait_for(lambda: left in one.decodes[0].released)
    assert (left in one.decodes[0].released) is not is_kept


def test_a_stream_that_breaks_off_leaves_the_turn_before(one):
    talk = Talk(one, "broken", is_stream=True)
    _, first = talk.say("a")

    async def break_off(call) -> None:
        if call.leg["mode"] != "push" or await call.wait_for_push():
            await stream([sse("x")], then="reset")(call)

    one.decodes[0].script.append(break_off)
    talk.messages.append({"role": "user", "content": "b"})
    client = one.send_post(CHAT, {**talk.body, "messages": talk.messages})
    while client.recv(65536):
        pass
    client.close()
    one.wait_for(lambda: one.health()["pairs"] == 1)
    talk.messages.pop()
    assert talk.say("b")[0]["handle"] == first["handle"]


def test_a_conversation_can_be_seen_and_forgotten_by_its_caller_only(one):
    name = "my talk / 1?"
    talk = Talk(one, "seen", headers=ALICE, conversation_id=name)
    _, keep = talk.say("a")
    path = API + quote(name, safe="")
    seen = one.get(path, headers=ALICE).json
    (turn,) = seen.pop("turns")
    assert seen == {"id": name, "object": "kvshuttle.conversation", "name": talk.name, "num_running": 0}
    assert 0 < turn.pop("remaining_s") <= 480
    assert turn.pop("age_s") >= 0
    assert turn.pop("num_prompt_tokens_estimated") > 10
    assert turn == {"model": "m", "engine": "decode-0"}
    for headers in (BOB, {}):
        assert one.get(path, headers=headers).status == 404
        assert one.request("DELETE", path, None, headers).status == 404
    assert one.get(API + talk.name, headers=ALICE).json["name"] == talk.name
    assert one.decodes[0].released == []
    deleted = one.request("DELETE", path, None, ALICE)
    assert deleted.json == {
        "id": name,
        "object": "kvshuttle.conversation.deleted",
        "deleted": True,
        "num_released": 1,
    }
    one.wait_for(lambda: one.decodes[0].released == [keep["handle"]])
    assert one.get(path, headers=ALICE).status == 404
    assert one.request("DELETE", path, None, ALICE).status == 404
    assert talk.say("b")[0] is None


def test_a_derived_conversation_is_seen_by_the_name_that_its_answers_carry(one):
    talk = Talk(one, "derived")
    talk.say("a")
    assert len(one.get(API + talk.name).json["turns"]) == 1
    assert one.request("DELETE", API + talk.name, None, {}).json["num_released"] == 1
    assert talk.say("b")[0] is None


def test_a_turn_under_way_when_its_conversation_is_forgotten_leaves_nothing(one):
    talk = Talk(one, "under way", conversation_id="w")
    one.decodes[0].script.append(hang)
    talk.messages.append({"role": "user", "content": "a"})
    client = one.send_post(CHAT, {**talk.body, "messages": talk.messages})
    one.wait_for(lambda: len(one.decodes[0].calls) == 1)
    assert one.get(API + "w").json["num_running"] == 1
    assert one.request("DELETE", API + "w", None, {}).json["num_released"] == 0
    handle = one.decodes[0].calls[0].leg["keep"]["handle"]
    one.decodes[0].remaining_s[handle] = 100.0
    client.close()
    one.wait_for(lambda: handle in one.decodes[0].released)
    assert one.get(API + "w").status == 404


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("POST", API + "x", 405),
        ("PUT", API + "x", 405),
        ("GET", API, 404),
        ("GET", API + "unknown", 404),
        ("OPTIONS", API + "x", 204),
        ("HEAD", API + "x", 404),
    ],
)
def test_the_conversations_path_answers_as_others_do(one, method, path, expected):
    reply = one.request(method, path, b"" if method in ("POST", "PUT") else None, {})
    assert reply.status == expected
    if expected in (204, 405):
        assert reply.headers["allow"] == "GET, HEAD, DELETE, OPTIONS"


def test_the_log_line_tells_of_the_conversation_but_not_the_clients_word_for_it(one, caplog):
    talk = Talk(one, "logged", headers={"x-request-id": "log-c"}, conversation_id="a secret name")
    talk.say("a")
    with caplog.at_level("INFO", logger="kvshuttle.router.requests"):
        talk.say("b")
        one.wait_for(lambda: any("log-c" in record.getMessage() for record in caplog.records))
    (line,) = [record.getMessage() for record in caplog.records if "log-c" in record.getMessage()]
    receipt = json.loads(line)
    assert receipt["conversation"] == talk.name
    assert (receipt["history"], receipt["following"]) == ("continued", "followed")
    assert "secret" not in line


def test_metrics_count_histories_turns_and_where_they_went(one):
    names = {
        "new": ("histories_total", {"result": "new"}),
        "continued": ("histories_total", {"result": "continued"}),
        "followed": ("history_placements_total", {"outcome": "followed"}),
        "superseded": ("turns_dropped_total", {"reason": "superseded"}),
        "placed": ("placements_total", {"leg": "decode", "reason": "history"}),
        "entered": ("turns_entered_total", {}),
        "turns": ("turns", {}),
    }
    before = {key: one.metric(name, **labels) for key, (name, labels) in names.items()}
    talk = Talk(one, "metrics")
    for text in "abc":
        talk.say(text)
    grown = {key: one.metric(name, **labels) - before[key] for key, (name, labels) in names.items()}
    assert grown == {"new": 1, "continued": 2, "followed": 2, "superseded": 2, "placed": 2, "entered": 3, "turns": 1}


# --- engines that come and go -----------------------------------------------------------------------


def test_a_decode_engine_that_was_restarted_is_not_asked_for_what_it_had():
    with cluster(is_reusing_history=True) as one:
        talk = Talk(one, "restart")
        talk.say("a")
        one.decodes[0].incarnation = "life-2"
        lives = one.router.registry.decodes[0]
        one.wait_for(lambda: lives.card is not None and lives.card.incarnation == "life-2")
        history, keep = talk.say("b")
        assert history is None
        assert "supersedes" not in keep
        assert one.metric("histories_total", result="other_incarnation") == 1
        assert one.metric("turns_dropped_total", reason="other_incarnation") == 1
        assert talk.say("c")[0] == {"handle": keep["handle"], "source": source(one.decodes[0], "life-2")}


def test_a_turn_whose_engine_is_down_is_decoded_elsewhere_and_without_history():
    with cluster(1, 2, is_reusing_history=True) as two:
        talk = Talk(two, "down")
        talk.say("a")
        (holder,) = [engine for engine in two.decodes if engine.calls]
        (other,) = [engine for engine in two.decodes if not engine.calls]
        two.run(holder.kill())
        two.wait_for(lambda: two.health()["pairs"] == 1)
        assert talk.say("b")[0] is None
        assert list(other.calls[-1].leg["keep"]) == ["handle"]
        assert two.metric("histories_total", result="engine_down") == 1


def test_a_router_that_was_restarted_misses_once():
    with cluster(is_reusing_history=True) as one:
        talk = Talk(one, "router restart")
        talk.say("a")
        one.run(one.router.stop(0.2))
        one.run(restart_router(one))
        one.wait_for(lambda: one.health()["pairs"] == 1)
        history, keep = talk.say("b")
        assert history is None
        assert talk.say("c")[0]["handle"] == keep["handle"]


async def restart_router(one) -> None:
    one.router = type(one.router)(one.router.config, one.channel)
    one.port = await one.router.start()


@pytest.mark.parametrize("mode", ["push", "pull", "auto"])
def test_turns_go_back_to_the_engine_that_keeps_their_history_unless_it_is_busy(mode):
    with cluster(1, 3, mode=mode, is_reusing_history=True) as three:
        talk = Talk(three, "steered")
        talk.say("a")
        (holder,) = [engine for engine in three.decodes if engine.calls]
        for text in "bcdefgh":
            talk.say(text)
        assert [len(engine.calls) for engine in three.decodes if engine is not holder] == [0, 0]
        holder.report = {"num_waiting": 3}
        engine = three.router.registry.engines[holder.name]
        three.wait_for(lambda: engine.report is not None and engine.report.num_waiting == 3)
        last = holder.calls[-1].leg["keep"]["handle"]
        talk.say("i")
        (new,) = [engine for engine in three.decodes if engine is not holder and engine.calls]
        assert three.prefills[0].calls[-1].leg["history"] == {"handle": last, "source": source(holder)}
        assert "supersedes" not in new.calls[-1].leg["keep"]
        assert three.metric("history_placements_total", outcome="busy") == 1
        three.wait_for(lambda: holder.released == [last])
        talk.say("j")
        assert len(new.calls) == 2


def test_an_engine_that_failed_the_turn_is_not_followed_again():
    with cluster(1, 2, is_reusing_history=True) as two:
        talk = Talk(two, "failing")
        talk.say("a")
        (holder,) = [engine for engine in two.decodes if engine.calls]
        (other,) = [engine for engine in two.decodes if not engine.calls]
        holder.script.append(reset_before_headers)
        talk.say("b")
        assert len(other.calls) == 1
        assert two.metric("history_placements_total", outcome="avoided") == 1


@pytest.mark.parametrize("role", ["prefills", "decodes"])
def test_an_engine_whose_card_does_not_speak_of_turns_is_told_nothing_it_would_refuse(role):
    with cluster(is_reusing_history=True) as one:
        older = getattr(one, role)[0]
        older.features = ()
        older.incarnation = "life-2"
        engine = getattr(one.router.registry, role)[0]
        one.wait_for(lambda: engine.card is not None and engine.card.incarnation == "life-2")
        talk = Talk(one, "old")
        talk.say("a")
        history, keep = talk.say("b")
        assert history is None
        assert (keep is None) is (role == "decodes")
        for call in older.calls:
            assert not {"history", "keep"} & call.leg.keys()
        expected = {"prefills": "cannot_read", "decodes": "new"}[role]
        assert one.metric("histories_total", result=expected) >= 1


def test_an_engine_alone_whose_card_does_not_speak_of_turns_gets_no_leg_at_all():
    with cluster(1, 1, is_reusing_history=True, disaggregate_from_tokens=10_000) as one:
        older = one.decodes[0]
        older.features = ("a feature of later", "turns of another kind")
        older.incarnation = "life-2"
        one.wait_for(lambda: one.router.registry.decodes[0].card.incarnation == "life-2")
        Talk(one, "alone and old").say("a")
        assert older.calls[-1].leg is None


def test_without_reuse_nothing_is_said_or_remembered():
    with cluster(is_reusing_history=False) as one:
        talk = Talk(one, "off", conversation_id="x")
        talk.say("a")
        assert talk.say("b") == (None, None)
        assert talk.name == ""
        assert one.get(API + "x").status == 404
        assert one.metric("histories_total", result="off") == 2


# --- to the decode engine alone ---------------------------------------------------------------------


def test_requests_to_a_decode_engine_alone_keep_and_read_as_well():
    with cluster(1, 2, is_reusing_history=True, disaggregate_from_tokens=10_000) as two:
        talk = Talk(two, "alone")
        talk.say("a")
        (holder,) = [engine for engine in two.decodes if engine.calls]
        (other,) = [engine for engine in two.decodes if not engine.calls]
        first = holder.calls[-1].leg
        assert (first["leg"], list(first)) == ("local", ["leg", "keep"])
        talk.say("b")
        second = holder.calls[-1].leg
        assert second["keep"]["supersedes"] == first["keep"]["handle"]
        assert "history" not in second
        holder.script.append(status(500))
        talk.say("c")
        third = other.calls[-1].leg
        assert third["history"] == {"handle": second["keep"]["handle"], "source": source(holder)}
        assert "supersedes" not in third["keep"]
        assert two.prefills[0].calls == []


def test_a_short_turn_goes_to_the_engine_that_keeps_its_history_alone_where_that_is_wanted():
    with cluster(1, 2, is_reusing_history=True, local_append_max_tokens=50) as two:
        talk = Talk(two, "append")
        talk.say("x" * 400)
        (holder,) = [engine for engine in two.decodes if engine.calls]
        (other,) = [engine for engine in two.decodes if not engine.calls]
        num_prefills = len(two.prefills[0].calls)
        talk.say("short")
        assert holder.calls[-1].leg["leg"] == "local"
        assert len(two.prefills[0].calls) == num_prefills
        assert two.metric("decisions_total", route="local", reason="local_append") == 1
        talk.say("y" * 400)
        assert len(two.prefills[0].calls) == num_prefills + 1
        holder.script.append(status(500))
        talk.say("short again")
        assert holder.calls[-1].leg["leg"] == "local"
        assert other.calls[-1].leg["leg"] == "decode"
        assert len(two.prefills[0].calls) == num_prefills + 2


def test_a_busy_engine_gets_no_short_turns_for_itself():
    with cluster(1, 2, is_reusing_history=True, local_append_max_tokens=50) as two:
        talk = Talk(two, "busy append")
        talk.say("a")
        (holder,) = [engine for engine in two.decodes if engine.calls]
        holder.report = {"num_waiting": 3}
        engine = two.router.registry.engines[holder.name]
        two.wait_for(lambda: engine.report is not None and engine.report.num_waiting == 3)
        talk.say("b")
        assert len(holder.calls) == 1
        assert len(two.prefills[0].calls) == 2


# --- time and room ----------------------------------------------------------------------------------


def pass_time(one, duration_s: float) -> None:
    """Let so much time pass for the router's turns."""
    conversations = one.router.conversations

    def shift() -> None:
        was_now_s = conversations._now_s
        conversations._now_s = lambda: was_now_s() + duration_s

    one.call(shift)


def test_a_turn_is_not_offered_after_its_time():
    with cluster(is_reusing_history=True, history_ttl_s=60.0, history_margin_s=0.1) as one:
        talk = Talk(one, "late")
        talk.say("a")
        assert talk.say("b")[0] is not None
        pass_time(one, 60.0)
        assert talk.say("c")[0] is None
        assert one.metric("histories_total", result="expired") == 1


def test_an_idle_router_lets_go_of_turns_whose_time_is_over():
    with cluster(is_reusing_history=True, history_ttl_s=60.0, history_margin_s=0.1) as one:
        Talk(one, "over").say("a")
        assert one.metric("turns") == 1
        pass_time(one, 60.0)
        assert one.metric("turns") == 0
        assert one.metric("turns_dropped_total", reason="expired") == 1


def test_turns_are_renewed_at_their_engines_where_that_is_wanted_and_dropped_when_they_are_gone():
    ttl_s = 2.0

    async def keep_it(call) -> None:
        one.decodes[0].remaining_s[call.leg["keep"]["handle"]] = ttl_s
        await default_behaviour(call)

    with cluster(is_reusing_history=True, history_ttl_s=ttl_s, history_margin_s=0.1, is_history_renewed=True) as one:
        talk, gone = Talk(one, "renewed"), Talk(one, "gone")
        one.decodes[0].script.append(keep_it)
        _, keep = talk.say("a")
        kept_at_s = time.monotonic()
        gone.say("a")
        one.wait_for(lambda: time.monotonic() > kept_at_s + ttl_s + 0.5)
        assert talk.say("b")[0]["handle"] == keep["handle"]
        assert gone.say("b")[0] is None
        assert one.metric("turns_dropped_total", reason="gone") >= 1
        renewals = [each for _, each in one.channel.messages if isinstance(each, Renew)]
        assert all(each.duration_s == ttl_s and each.lease_ids == () for each in renewals)


def test_a_table_that_is_full_has_the_oldest_turn_released():
    with cluster(is_reusing_history=True, max_conversations=2) as one:
        talks = [Talk(one, f"full {number}") for number in range(3)]
        handles = [talk.say("a")[1]["handle"] for talk in talks]
        one.wait_for(lambda: one.decodes[0].released == handles[:1])
        assert one.metric("turns") == 2
        assert talks[0].say("b")[0] is None
        assert talks[2].say("b")[0]["handle"] == handles[2]


def test_many_turns_over_failing_engines_never_name_a_handle_that_was_given_back():
    with cluster(2, 2, is_reusing_history=True, max_attempts=6, quarantine_s=0.05) as two:
        talks = [Talk(two, f"many {number}", is_stream=bool(number % 2)) for number in range(4)]
        for number in range(40):
            engines = [two.prefills, two.decodes][number % 2]
            if number % 3 == 0:
                engines[number % 2].script.append([status(500), reset_before_headers][number % 2])
            talks[number % 4].say(f"turn {number}")
        released = {
            handle for _, message in two.channel.messages if isinstance(message, Release) for handle in message.handles
        }
        legs = [call.leg for engine in two.prefills for call in engine.calls]
        for call in (call for engine in (*two.prefills, *two.decodes) for call in engine.calls):
            assert parse_leg(call.body["kv_transfer_params"]) is not None
        read = [leg["history"]["handle"] for leg in legs if "history" in leg]
        assert len(read) > 30
        for engine in (*two.prefills, *two.decodes):
            engine.script.clear()
        for talk in talks:
            history, _ = talk.say("last")
            assert history["handle"] not in released
        two.wait_until_nothing_is_left()
