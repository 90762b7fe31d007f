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
        ({"unhealthy_after": -1}, "unhealthy_after"),
        ({"prefill_failure_policy": "pray"}, "prefill_failure_policy: one of"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(change, match):
    with pytest.raises(ConfigError, match=match):
        RouterConfig.from_mapping({**PAIR, **change})


def test_settings_are_taken_by_name():
    config = RouterConfig.from_mapping(
        {**PAIR, "prefill_failure_policy": "retry_then_fail", "prefill_keep_fields": ["response_format"], "port": 0}
    )
    assert config.prefill_failure_policy is PrefillFailurePolicy.RETRY_THEN_FAIL
    assert config.prefill_keep_fields == ("response_format",)
