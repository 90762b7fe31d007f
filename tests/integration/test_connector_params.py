"""Whatever a client puts into ``kv_transfer_params``: no hook raises, nothing is moved, the answer is the model's.

It is an object or nothing, with integers of at most 64 bits: vLLM sees to that before its scheduler relies on it.
"""

from support import quiet_vllm  # noqa: F401 - before anything that imports vLLM

# isort: split
import copy

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.engine_pair import PATIENT, PROMPT
from support.vllm_engine import run_until

SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=20)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner), max_leaves=12
)
NAMES = ["leg", "transfer_id", "source", "mode", "address", "engine_id", "keep", "history", "handle", "supersedes", "x"]
OURS = st.dictionaries(st.sampled_from(NAMES), JSON | st.dictionaries(st.sampled_from(NAMES), JSON))
PARAMS = st.dictionaries(st.text(max_size=8), JSON, max_size=4) | st.fixed_dictionaries({"kvshuttle": JSON | OURS})
LEGS = st.sampled_from(["prefill", "decode", "prefilled", "local", "", None, 1, ["decode"], "DECODE"])
SETTINGS = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.fixture
def pair(make_pair):
    pair = make_pair(sink={"extra": {**PATIENT, "acquire_timeout_s": 0.5}})
    pair.prefill("held")
    return pair


def assert_served_without_a_transfer(pair, params):
    number = len(pair.sink.answers)
    request_id = f"request-{number}"
    prompt = PROMPT[: 1 + number % 40]
    pair.sink.add(request_id, prompt, params, max_tokens=2)
    run_until(lambda: pair.sink.has_finished(request_id), [pair.sink], f"an answer with {params!r}")
    pair.check_answer(request_id)
    assert pair.sink.count("transfer_bytes", "read") == 0
    assert not [key for key in pair.sink.metrics.data if key.startswith("internal_errors")]


@SETTINGS
@given(params=PARAMS)
def test_arbitrary_json_is_served_without_a_transfer(pair, params):
    assert_served_without_a_transfer(pair, params)


@SETTINGS
@given(data=st.data())
def test_a_leg_with_one_wrong_field_is_served_without_a_transfer(pair, data):
    params = copy.deepcopy(pair.leg("held"))
    leg = params["kvshuttle"]
    target = data.draw(st.sampled_from([leg, leg["source"]]))
    field = data.draw(st.sampled_from(sorted(set(target) - {"mode"})))
    change = data.draw(st.sampled_from(["remove", "replace", "add"]))
    if change == "remove":
        del target[field]
    elif change == "add":
        target[f"{field}2"] = data.draw(JSON)
    else:
        good = target[field]
        strange = JSON.filter(lambda value: value != good and not _is_address(value))
        target[field] = data.draw(LEGS.filter(lambda value: value != good) if field == "leg" else strange)
    if params["kvshuttle"].get("leg") == "prefill":
        del params["kvshuttle"]["leg"]  # with no source it would be a good leg of the other kind
    assert_served_without_a_transfer(pair, params)


@pytest.mark.parametrize(
    "params",
    [
        {"kvshuttle": {"leg": "decode"}},
        {"kvshuttle": {"leg": "decode", "transfer_id": "held", "source": None}},
        {"kvshuttle": {"leg": "prefill", "transfer_id": ""}},
        {"kvshuttle": {"leg": "prefill", "transfer_id": "x" * 129}},
        {"kvshuttle": {"leg": "prefill", "transfer_id": "x", "mode": "teleport"}},
        {"kvshuttle": {"leg": "prefill", "transfer_id": "x", "extra": 1}},
        {"kvshuttle": []},
        {"kvshuttle": "decode"},
    ],
)
def test_malformed_legs_are_counted_and_hold_nothing(pair, params):
    assert_served_without_a_transfer(pair, params)
    assert pair.sink.count("rejected_params") == 1
    assert pair.sink.status().num_holdings == 0


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": True, "remote_host": "x"}])
def test_params_of_others_are_none_of_our_business(pair, params):
    assert_served_without_a_transfer(pair, params)
    assert pair.sink.count("rejected_params") == 0


def test_a_prompt_without_token_ids_is_computed(pair):
    torch = pytest.importorskip("torch")
    request = pair.sink.add("embeds", None, pair.leg("held"), prompt_embeds=torch.zeros(20, 4))
    request.prompt_token_ids = None
    run_until(lambda: pair.sink.has_finished("embeds"), [pair.sink], "an answer")
    assert pair.sink.count("transfers", "read", "prompt_without_tokens") == 1
    assert pair.sink.count("transfer_bytes", "read") == 0


def _is_address(value):
    # Text that names a listening port would be asked, and then not answer; that is another test.
    return isinstance(value, str) and ":" in value
