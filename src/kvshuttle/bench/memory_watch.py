"""Watches the memory of two engines while something else drives them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from kvshuttle.bench.kept_handles import RETAINED_METRIC
from kvshuttle.bench.turns_records import MemoryRecord
from kvshuttle.clock import now_s
from kvshuttle.errors import PeerUnreachable
from kvshuttle.launcher.chat import fetch_metrics
from kvshuttle.launcher.metrics import total_of

if TYPE_CHECKING:
    from kvshuttle.launcher.plan import ProcessPlan

_EVERY_S = 1.0


@dataclass(slots=True)
class MemoryWatch:
    """Looks once a second, and for a last time at its end. ``records`` may be read when it has ended.

    ``keeper_url``: who publishes ``kvshuttle:retained_blocks``. ``began_at_s``: from when on looks are dated.
    """

    cell: str
    prefill: ProcessPlan
    decode: ProcessPlan
    keeper_url: str
    began_at_s: float
    records: list[MemoryRecord] = field(default_factory=list)
    _is_over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, name="memory-watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        assert self._thread is not None
        self._thread.join()

    def _run(self) -> None:
        is_over = False
        while not is_over:
            is_over = self._is_over.wait(_EVERY_S)
            try:
                self.records.append(self._look())
            except PeerUnreachable:
                continue  # an engine too busy to answer; there is another look

    def _look(self) -> MemoryRecord:
        prefill, decode = fetch_metrics(self.prefill.url), fetch_metrics(self.decode.url)
        keeper = decode if self.keeper_url == self.decode.url else fetch_metrics(self.keeper_url)
        return MemoryRecord(
            self.cell,
            at_s=now_s() - self.began_at_s,
            retained_blocks=int(total_of(keeper, RETAINED_METRIC)),
            held_blocks=int(total_of(prefill, "kvshuttle:held_blocks")),
            prefill_usage=total_of(prefill, "vllm:kv_cache_usage_perc"),
            decode_usage=total_of(decode, "vllm:kv_cache_usage_perc"),
        )
