"""A running pair of engines in one cell of a benchmark of conversations: what they hold, have counted, and let go."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvshuttle.bench.inspection import Pool, card_of, pool_of
from kvshuttle.bench.plan import BLOCK_SIZE_TOKENS
from kvshuttle.bench.router_calls import forget, wait_for_pair
from kvshuttle.bench.talk import API_KEY
from kvshuttle.bench.turns_plan import TurnsSystem
from kvshuttle.clock import now_s
from kvshuttle.errors import TransportError
from kvshuttle.launcher.chat import fetch_metrics, stream_chat
from kvshuttle.launcher.metrics import total_of

if TYPE_CHECKING:
    from kvshuttle.bench.turns_fleet import Subject
    from kvshuttle.bench.turns_plan import TurnsCell
    from kvshuttle.launcher.plan import ProcessPlan

_FRONT_TIMEOUT_S = 60.0
_SETTLE_TIMEOUT_S = 15.0
_SETTLE_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Counters:
    """What engines have counted so far."""

    local_hit_tokens: int
    history_tokens: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class RunningPair:
    """P, D and what stands in front of them. ``num_blocks``: of P's pool and of D's, as they were started."""

    subject: Subject
    cell: TurnsCell
    prefill: ProcessPlan
    decode: ProcessPlan
    url: str
    num_blocks: tuple[int, int]

    @property
    def is_ours(self) -> bool:
        """Whether our connector is between them, and our router in front."""
        return self.cell.system is TurnsSystem.SHUTTLE

    @property
    def keeper_url(self) -> str:
        """Who publishes how many blocks are kept for later turns: vLLM's connector does not, the proxy does for it."""
        return self.decode.url if self.is_ours else self.url

    def wait(self) -> None:
        """Until requests can be handed off. Raises ``PeerUnreachable``."""
        if self.is_ours:
            wait_for_pair(self.url, timeout_s=_FRONT_TIMEOUT_S)

    def pools(self) -> tuple[Pool, Pool]:
        """P's and D's KV memory. Raises ``TransportError``."""
        if self.is_ours:
            prefill, decode = (pool_of(card_of(engine.side_address)) for engine in (self.prefill, self.decode))
            return prefill, decode
        assert self.subject.profile is not None, "vLLM's connector is measured with emulated engines"
        block_bytes = self.subject.profile.geometry.kv_bytes_per_token * BLOCK_SIZE_TOKENS
        prefill, decode = (Pool(number, BLOCK_SIZE_TOKENS, block_bytes) for number in self.num_blocks)
        return prefill, decode

    def counters(self) -> Counters:
        """As of now: engines publish after a step, so each takes one more."""
        self._nudge(self.prefill)
        self._nudge(self.decode)
        prefill, decode = fetch_metrics(self.prefill.url), fetch_metrics(self.decode.url)
        if self.is_ours:
            local = total_of(prefill, "kvshuttle:local_hit_tokens_total", leg="prefill")
            history = total_of(prefill, "kvshuttle:transfer_tokens_total", direction="history")
        else:
            local = total_of(prefill, "vllm:prefix_cache_hits_total")
            history = total_of(prefill, "vllm:external_prefix_cache_hits_total")
        preemptions = sum(total_of(text, "vllm:num_preemptions_total") for text in (prefill, decode))
        return Counters(int(local), int(history), int(preemptions))

    def forget(self, names: set[str]) -> None:
        """Have D let go of conversations, so that the next cell begins with nothing kept. Raises ``TransportError``.

        vLLM's connector cannot be told to: it has engines of its own in each cell in which it keeps anything.
        """
        if not self.is_ours:
            return
        forget(self.url, names - {""}, api_key=API_KEY)
        deadline_at_s = now_s() + _SETTLE_TIMEOUT_S
        while True:
            self._nudge(self.decode)
            left = total_of(fetch_metrics(self.decode.url), "kvshuttle:retained_blocks")
            if not left:
                return
            if now_s() > deadline_at_s:
                raise TransportError(f"{self.cell.text}: D still keeps {left:.0f} blocks that nobody wants")
            time.sleep(_SETTLE_POLL_S)

    def _nudge(self, engine: ProcessPlan) -> None:
        stream_chat(engine.url, self.subject.name, [{"role": "user", "content": "Hi"}], max_tokens=2)
