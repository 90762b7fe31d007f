"""One cluster for all e2e tests of the bundled model; slow to start, so it is shared."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvshuttle.config import LauncherConfig
from kvshuttle.launcher.model import SMOLLM2, cache_dir_from, ensure_model
from support.live import CHUNK_TOKENS, MODEL_NAME, Live, live_cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

LEASE_S = 6.0
"""Short, so that tests of what outlives a reader are short; more than the slowest wait between the legs here."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here starts engines, and a test may wait for one to start again.

    Tests with engines of their own come first: those are stopped before the shared ones start, or memory runs out.
    """
    for item in items:
        if _is_e2e(item):
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.timeout(600))
    items.sort(key=lambda item: _is_e2e(item) + (_is_e2e(item) and "live" in getattr(item, "fixturenames", ())))


def _is_e2e(item: pytest.Item) -> bool:
    return "e2e" in Path(item.fspath).parts


@pytest.fixture(scope="session")
def log_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where engines log; kept on failure, and printed there."""
    chosen = os.environ.get("KVSHUTTLE_TEST_LOGS")
    return Path(chosen) if chosen else tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def live(log_dir: Path) -> Iterator[Live]:
    """1 prefill and 1 decode engine with the bundled model in float32, the router, and a plain engine."""
    model = ensure_model(SMOLLM2, cache_dir_from(os.environ), env=os.environ, report=print)
    args = ("--max-num-batched-tokens", str(CHUNK_TOKENS), "--max-num-seqs", "16")
    config = LauncherConfig(
        port=0,
        dtype="float32",
        kv_cache_gib=1,
        max_model_len=2048,
        # These tests are about single hand-offs, and want nothing held when one is over.
        router_args=("--no-reuse-history",),
        engine_args=args,
        connector_options={"lease_s": LEASE_S},
    )
    with live_cluster(config, model, log_dir, plain_args=args) as cluster:
        assert cluster.fleet.plan.model_name == MODEL_NAME
        yield cluster
