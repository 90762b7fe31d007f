import pickle
from collections import defaultdict
from typing import ClassVar

import msgspec
import pytest
from prometheus_client import Counter, Gauge, Histogram

from kvshuttle.connector.stats import SERIES, ShuttlePromMetrics, ShuttleStats


def test_nothing_recorded_is_nothing_to_report():
    stats = ShuttleStats()
    assert stats.is_empty()
    assert stats.take() is None


def test_taking_leaves_nothing_behind_and_shares_nothing():
    stats = ShuttleStats()
    stats.count("rejected_params")
    stats.observe("acquire_seconds", value=0.5)
    taken = stats.take()
    assert taken.data == {"rejected_params": 1, "acquire_seconds": [0.5]}
    stats.observe("acquire_seconds", value=0.7)
    assert taken.data["acquire_seconds"] == [0.5]
    assert stats.take().data == {"acquire_seconds": [0.7]}


def test_counting_nothing_records_nothing():
    stats = ShuttleStats()
    stats.count("transfer_tokens", "read", by=0)
    assert stats.take() is None


def test_a_gauge_is_reported_when_it_changes_and_only_then():
    stats = ShuttleStats()
    stats.set("held_blocks", 0)
    assert stats.take().data == {"held_blocks": 0}
    stats.set("held_blocks", 0)
    assert stats.take() is None
    stats.set("held_blocks", 5)
    stats.set("held_blocks", 5)
    assert stats.take().data == {"held_blocks": 5}


def test_counters_add_histograms_join_and_gauges_take_the_latest():
    ours = ShuttleStats({"transfers|read|read_ok": 1, "acquire_seconds": [1.0], "held_blocks": 3})
    theirs = ShuttleStats({"transfers|read|read_ok": 2, "acquire_seconds": [2.0], "held_blocks": 1, "leases_held": 4})
    before = msgspec.to_builtins(theirs.data)
    assert ours.aggregate(theirs) is ours
    assert ours.data == {
        "transfers|read|read_ok": 3,
        "acquire_seconds": [1.0, 2.0],
        "held_blocks": 1,
        "leases_held": 4,
    }
    assert theirs.data == before


def test_aggregating_into_an_empty_one_shares_no_lists():
    theirs = ShuttleStats({"acquire_seconds": [1.0]})
    ours = ShuttleStats().aggregate(theirs)
    ours.observe("acquire_seconds", value=2.0)
    assert theirs.data == {"acquire_seconds": [1.0]}


def test_the_log_line_has_sums_and_medians():
    stats = ShuttleStats({"transfers|read|read_ok": 3, "acquire_seconds": [3.0, 1.0, 2.0]})
    assert stats.reduce() == {"transfers|read|read_ok": 3, "acquire_seconds p50": 2.0}


def test_stats_travel_as_vllm_sends_them():
    stats = ShuttleStats()
    stats.count("transfer_bytes", "read", by=2**40)
    stats.observe("transfer_wire_seconds", "read", value=0.25)
    assert pickle.loads(pickle.dumps(stats)).data == stats.data
    payload = msgspec.msgpack.decode(msgspec.msgpack.encode(stats.data))
    assert ShuttleStats(payload).data == stats.data


class FakeMetric:
    """Registers itself as Prometheus would, and keeps what it is told."""

    registered: ClassVar = {}
    told: ClassVar = defaultdict(list)

    def __init__(self, name, documentation, labelnames, buckets=None):
        assert name not in self.registered, "Prometheus refuses a name that is taken"
        assert documentation
        self.registered[name] = tuple(labelnames)
        self.name = name

    def labels(self, *values):
        assert len(values) == len(self.registered[self.name])
        child = FakeMetric.__new__(type(self))
        child.name, child.values = self.name, values
        return child

    def inc(self, by):
        self.told[self.name, self.values].append(("inc", by))

    def set(self, value):
        self.told[self.name, self.values].append(("set", value))

    def observe(self, value):
        self.told[self.name, self.values].append(("observe", value))


@pytest.fixture
def prom():
    FakeMetric.registered.clear()
    FakeMetric.told.clear()

    class Config:
        kv_transfer_config = None

    kinds = {kind: type(kind.__name__, (FakeMetric,), {}) for kind in (Counter, Gauge, Histogram)}
    return ShuttlePromMetrics(Config(), kinds, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})


def test_every_series_is_registered_with_its_labels(prom):
    assert FakeMetric.registered == {
        f"kvshuttle:{name}": ("model_name", "engine", *series.labels) for name, series in SERIES.items()
    }


def test_observations_reach_the_series_of_their_engine(prom):
    payload = {"transfers|read|read_ok": 2, "acquire_seconds": [0.1, 0.2], "held_blocks": 7, "from_the_future|x": 1}
    prom.observe(payload, engine_idx=1)
    prom.observe({"transfers|read|read_ok": 1}, engine_idx=0)
    assert FakeMetric.told == {
        ("kvshuttle:transfers", ("m", "1", "read", "read_ok")): [("inc", 2)],
        ("kvshuttle:transfers", ("m", "0", "read", "read_ok")): [("inc", 1)],
        ("kvshuttle:acquire_seconds", ("m", "1")): [("observe", 0.1), ("observe", 0.2)],
        ("kvshuttle:held_blocks", ("m", "1")): [("set", 7)],
    }


def test_the_real_registry_takes_every_series():
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    for name, series in SERIES.items():
        extra = {"buckets": series.buckets} if series.buckets else {}
        series.kind(f"kvshuttle:{name}", series.text, ["model_name", *series.labels], registry=registry, **extra)
    assert len(list(registry.collect())) == len(SERIES)
