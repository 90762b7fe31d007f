"""How long an engine's steps took: from the trace of a worker that times itself, or from vLLM's own metrics."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol

from kvshuttle.clock import now_s
from kvshuttle.emulate.fit import TimedChunk
from kvshuttle.errors import ConfigError, TransportError
from kvshuttle.launcher.chat import fetch_metrics
from kvshuttle.launcher.metrics import total_of

if TYPE_CHECKING:
    from kvshuttle.bench.tracer import Tracer
    from kvshuttle.emulate.trace import Pass

_PREFILL = "vllm:request_prefill_time_seconds"
_BETWEEN_TOKENS = "vllm:inter_token_latency_seconds"
_SETTLE_S = 5.0
_POLL_S = 0.05


class StepTimes(Protocol):
    """One engine that nobody else uses."""

    what: str
    """What its times are of, for reports."""
    knows_passes: ClassVar[bool]
    """Whether each single pass is known, and when it was."""

    def begin(self) -> None:
        """Forget what was before."""

    def chunks(self, num_tokens: int) -> list[TimedChunk]:
        """Since ``begin`` one prompt of so many tokens was computed, and no more."""

    def resumed(self) -> list[TimedChunk]:
        """Since ``begin`` a prompt was handed over: its chunks behind KV from elsewhere. None where not known."""

    def decode_ms(self, num_seqs: int) -> list[float]:
        """Since ``begin`` so many requests were decoded at a time: milliseconds of steps with all of them."""

    def passes(self) -> list[Pass]:
        """Since ``begin``: every pass. None where they are not known."""


@dataclass(slots=True)
class TracedTimes:
    """Of forward passes and logits alone, by the engine's trace."""

    tracer: Tracer
    what: str = "forward pass and logits, timed inside the worker"
    knows_passes: ClassVar[bool] = True

    def begin(self) -> None:
        """Forget what was before."""
        self.tracer.take()

    def chunks(self, num_tokens: int) -> list[TimedChunk]:  # noqa: ARG002 - the trace tells
        """Every pass of the prompt."""
        return [
            TimedChunk(request.start, request.end - request.start, forward.planned_s * 1000)
            for forward in self.tracer.take()
            for request in forward.requests[:1]
            if len(forward.requests) == 1 and request.start < request.num_prompt_tokens
        ]

    def resumed(self) -> list[TimedChunk]:
        """Chunks that begin behind the prompt's first token."""
        return [chunk for chunk in self.chunks(0) if chunk.before]

    def passes(self) -> list[Pass]:
        """As the trace has them."""
        return self.tracer.take()

    def decode_ms(self, num_seqs: int) -> list[float]:
        """Passes of all requests in which each decodes."""
        return [
            forward.planned_s * 1000
            for forward in self.tracer.take()
            if len(forward.requests) == num_seqs
            and all(request.start >= request.num_prompt_tokens for request in forward.requests)
        ]


@dataclass(slots=True)
class MeteredTimes:
    """Of whole steps, by vLLM's metrics, less ``overhead_ms`` for what is not the forward pass."""

    url: str
    overhead_ms: float
    what: str = "whole steps by vLLM's metrics"
    knows_passes: ClassVar[bool] = False
    _before: dict[str, float] = field(default_factory=dict)

    def begin(self) -> None:
        """Forget what was before."""
        self._before = self._counted()

    def chunks(self, num_tokens: int) -> list[TimedChunk]:
        """From its scheduling to the first token, in the engine. Raises ``TransportError`` where others were, too."""
        took_ms, num_prompts = self._mean_ms(_PREFILL, 1)
        if num_prompts > 1:
            raise TransportError(f"{self.url}: computed other prompts meanwhile; it must have nothing to do")
        return [TimedChunk(0, num_tokens, took_ms)]

    def resumed(self) -> list[TimedChunk]:
        """Metrics do not tell them apart."""
        return []

    def passes(self) -> list[Pass]:
        """Metrics are sums."""
        return []

    def decode_ms(self, num_seqs: int) -> list[float]:
        """The mean step, among them a few that also computed the last token of a prompt."""
        return [self._mean_ms(_BETWEEN_TOKENS, num_seqs)[0]]

    def _mean_ms(self, series: str, num_at_least: int) -> tuple[float, float]:
        """Milliseconds, and of how many. Raises ``TransportError``, or ``ConfigError`` when nothing of them is left."""
        deadline_at_s = now_s() + _SETTLE_S
        while True:
            counted = self._counted()
            num = counted[f"{series}_count"] - self._before[f"{series}_count"]
            if num >= num_at_least:
                break
            if now_s() > deadline_at_s:
                raise TransportError(f"{self.url}/metrics: {series} does not count requests")
            time.sleep(_POLL_S)
        mean_s = (counted[f"{series}_sum"] - self._before[f"{series}_sum"]) / num
        if mean_s * 1000 <= self.overhead_ms:
            raise ConfigError(
                f"--step-overhead-ms: less than a whole step, which took {mean_s * 1000:.3g} ms on {self.url}, got"
                f" {self.overhead_ms:g}"
            )
        return mean_s * 1000 - self.overhead_ms, num

    def _counted(self) -> dict[str, float]:
        text = fetch_metrics(self.url)
        names = [f"{series}_{part}" for series in (_PREFILL, _BETWEEN_TOKENS) for part in ("sum", "count")]
        return {name: total_of(text, name) for name in names}
