import math

import pytest

from kvshuttle.config import ConnectorConfig
from kvshuttle.errors import ConfigError


def test_the_defaults_are_valid():
    assert ConnectorConfig.from_extra_config({}) == ConnectorConfig()


def test_values_are_taken_and_lists_become_tuples():
    config = ConnectorConfig.from_extra_config({"lease_s": 10, "nixl_backends": ["LIBFABRIC"], "side_channel_port": 0})
    assert (config.lease_s, config.nixl_backends, config.side_channel_port) == (10, ("LIBFABRIC",), 0)


def test_an_unknown_key_is_named_with_those_that_are_known():
    with pytest.raises(ConfigError, match=r"kv_connector_extra_config\.lease: unknown key; known are .*lease_s"):
        ConnectorConfig.from_extra_config({"lease": 10})


BAD = [
    *[
        (name, value)
        for name in ("lease_s", "acquire_timeout_s", "read_timeout_s", "total_wait_s", "submit_margin_s")
        for value in (0, -1, "10", None, True, math.nan)
    ],
    ("submit_margin_s", 10.0),
    ("side_channel_port", -1),
    ("side_channel_port", 65536),
    ("side_channel_port", "14579"),
    ("recompute_threshold_tokens", -1),
    ("recompute_threshold_tokens", 1.5),
    ("kv_recompute_threshold", -1),
    ("kv_recompute_threshold", "automatic"),
    ("kv_recompute_threshold", 1.5),
    ("kv_recompute_threshold", True),
    ("decoder_kv_blocks_ttl", 0),
    ("decoder_kv_blocks_ttl", "480"),
    ("retention_max_blocks", -1),
    ("retention_max_blocks", 0.5),
    ("retention_max_fraction", 1.1),
    ("retention_max_fraction", -0.1),
    ("retention_max_fraction", True),
    ("is_retention_renewed_on_use", 1),
    ("is_disconnect_retained", "yes"),
    ("nixl_backends", []),
    ("nixl_backends", [1]),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_value_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=name):
        ConnectorConfig.from_extra_config({name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lease_s", math.inf),
        ("side_channel_host", 5),
        ("advertise_host", None),
        ("model_identity", 7),
        ("nixl_backends", "UCX"),
        ("nixl_backend_params", []),
        ("nixl_progress_thread", "yes"),
        ("side_channel_port", True),
    ],
)
def test_a_value_that_would_only_fail_later_is_refused_now(name, value):
    with pytest.raises(ConfigError, match=name):
        ConnectorConfig.from_extra_config({name: value})
