"""An idle engine is idle."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import psutil

from support.live import MODEL_NAME

if TYPE_CHECKING:
    from support.live import Live

IDLE_S = 60.0
MAX_CORE_SHARE = 0.05


def cpu_s(pid: int) -> float:
    """Processor seconds used so far by a process and its descendants."""
    process = psutil.Process(pid)
    return sum(sum(each.cpu_times()[:2]) for each in (process, *process.children(recursive=True)))


def test_engines_idle_after_traffic(live: Live) -> None:
    body = {"model": MODEL_NAME, "prompt": live.token_ids(300), "max_tokens": 8, "temperature": 0}
    assert live.ask("/v1/completions", body).status == 200
    assert live.wait_settled(timeout_s=10) == {}
    names = ("prefill-0", "decode-0")
    before = {name: cpu_s(live.fleet.pid(name)) for name in names}
    time.sleep(IDLE_S)
    for name in names:
        share = (cpu_s(live.fleet.pid(name)) - before[name]) / IDLE_S
        assert share < MAX_CORE_SHARE, f"{name} used {share:.1%} of a core"
