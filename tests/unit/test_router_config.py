import pytest

from kvshuttle.config import EngineRole, EngineSpec, PrefillFailurePolicy, RouterConfig
from kvshuttle.errors import ConfigError

PAIR = {"prefill": ["http://127.0.0.1:8100,127.0.0.1:14579"], "decode": ["https://[::1],[::1]:14580"]}


def test_engines_are_read_from_url_and_side_channel():
    config = RouterConfig.from_mapping(PAIR)
    assert config.engines == (
        EngineSpec("prefill-0", EngineRole.PREFILL, "127.0.0.1", 8100, False, "127.0.0.1:14579"),
        EngineSpec("decode-0", EngineRole.DECODE, "::1", 443, True, "[::1]:14580"),
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "http://127.0.0.1:8100",
        "http://127.0.0.1:8100,",
        "http://127.0.0.1:8100,host",
        "http://127.0.0.1:8100,host:x",
        "http://127.0.0.1:8100,host:1/x",
        "127.0.0.1:8100,h:1",
        "ftp://h:1,h:1",
        "http://h:1/v1,h:1",
        "http://h:99999,h:1",
        "http://h:0,h:1",
        "http://a..b:1,h:1",
        "http://a b:1,h:1",
        "http://u:p@a:1,h:1",
        "http://h:1#f,h:1",
        "http://[::1:1,h:1",
        "http://h:1,u@b:2",
        "http://h:1,b:2?x",
        "http://h:1,b:2?",
        "http://h:1,b:2#",
        "http://h:1,b:2/",
        "http://h:1,@b:2",
        "http://h:1,:@b:2",
        "http://h:1,a..b:2",
        "http://,h:1",
    ],
)
def test_a_malformed_engine_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match="write http://"):
        EngineSpec.parse(text, EngineRole.DECODE, 0)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"prefil": []}, "prefil: unknown key"),
        ({"engines": []}, "engines: unknown key"),
        ({"prefill": []}, "at least one prefill engine"),
        ({"decode": []}, "at least one decode engine"),
        ({"decode": "http://h:1,h:1"}, "decode: a list"),
        ({"decode": PAIR["prefill"]}, "given twice"),
        ({"idle_timeout_s": 0}, "idle_timeout_s"),
        ({"idle_timeout_s": "1"}, "idle_timeout_s"),
        ({"drain_s": True}, "drain_s"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"max_body_bytes": 10}, "max_body_bytes"),
        ({"port": 70000}, "port"),
        ({"port": True}, "port"),
        ({"host": ""}, "host: a name or address"),
        ({"host": "[]"}, "host: a name or address"),
        ({"host": 1}, "host: a name or address"),
        ({"is_logging_requests": "no"}, "is_logging_requests: true or false"),
        ({"idle_timeout_s": float("inf")}, "idle_timeout_s"),
        ({"idle_timeout_s": float("nan")}, "idle_timeout_s"),
        ({"idle_timeout_s": 10**400}, "idle_timeout_s"),
        ({"max_attempts": True}, "max_attempts"),
        ({"unhealthy_after": True}, "unhealthy_after"),
        ({"max_body_bytes": 4096.0}, "max_body_bytes"),
        ({"prefill_keep_fields": "tools"}, "prefill_keep_fields: a list"),
        ({"prefill_keep_fields": [1]}, "prefill_keep_fields: a list"),
        ({"engine_api_key": 1}, "engine_api_key"),
        ({"decode": ["http://127.0.0.1:8100,127.0.0.1:2"]}, "http_address '127.0.0.1:8100' is given twice"),
        ({"unhealthy_after": -1}, "unhealthy_after"),
        ({"is_reusing_history": "yes"}, "is_reusing_history: true or false"),
        ({"history_ttl_s": 0}, "history_ttl_s"),
        ({"history_ttl_s": 1.0, "history_margin_s": 1.0}, "history_margin_s: less than history_ttl_s"),
        ({"max_conversations": 0}, "max_conversations"),
        ({"local_append_max_tokens": -1}, "local_append_max_tokens"),
        ({"prefill_failure_policy": "pray"}, "prefill_failure_policy: one of"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(change, match):
    with pytest.raises(ConfigError, match=match):
        RouterConfig.from_mapping({**PAIR, **change})


@pytest.mark.parametrize("key", ["secret\r\nx-evil: 1", "secret\n", "secret\0"])
def test_an_api_key_that_would_break_a_header_is_refused_and_not_shown(key):
    with pytest.raises(ConfigError, match="engine_api_key") as caught:
        RouterConfig.from_mapping({**PAIR, "engine_api_key": key})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(("given", "host"), [("[::1]", "::1"), ("::1", "::1"), ("localhost", "localhost")])
def test_brackets_around_an_address_are_stripped(given, host):
    assert RouterConfig.from_mapping({**PAIR, "host": given}).host == host


def test_settings_are_taken_by_name():
    config = RouterConfig.from_mapping(
        {**PAIR, "prefill_failure_policy": "retry_then_fail", "prefill_keep_fields": ["response_format"], "port": 0}
    )
    assert config.prefill_failure_policy is PrefillFailurePolicy.RETRY_THEN_FAIL
    assert config.prefill_keep_fields == ("response_format",)
