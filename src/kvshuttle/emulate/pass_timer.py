"""Times a real model's passes from inside the worker: what an emulated model replaces, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvshuttle.emulate.pattern import prefix_sums, prompt_key
from kvshuttle.emulate.trace import Pass, PassedRequest, append_pass

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kvshuttle.emulate.steps import BatchRow


class PassTimer:
    """Puts a ``Pass`` into ``trace_path`` for each forward pass whose logits are computed.

    A pass begins with the forward pass and ends with the logits; ``planned_s`` is what the two took together, without
    what vLLM and its connector do in between.
    """

    def __init__(self, trace_path: Path, now_s: Callable[[], float]) -> None:
        self._trace_path = trace_path
        self._now_s = now_s
        self._keys: dict[str, str] = {}
        self._started_at_s = 0.0
        self._forward_s = 0.0
        self._requests: tuple[PassedRequest, ...] = ()

    def timed_forward(self, forward: Callable[..., Any], rows: Callable[[], Sequence[BatchRow]]) -> Callable[..., Any]:
        """``forward``, timed. ``rows``: the batch at hand, none in a trial run."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._requests = self._passed(rows())
            self._started_at_s = self._now_s()
            hidden = forward(*args, **kwargs)
            self._forward_s = self._now_s() - self._started_at_s
            return hidden

        return timed

    def timed_logits(self, compute_logits: Callable[..., Any]) -> Callable[..., Any]:
        """``compute_logits``, timed; then the pass is over."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            started_at_s = self._now_s()
            logits = compute_logits(*args, **kwargs)
            ended_at_s = self._now_s()
            if self._requests:
                took_s = self._forward_s + ended_at_s - started_at_s
                append_pass(self._trace_path, Pass(self._started_at_s, ended_at_s, took_s, 0.0, self._requests))
                self._requests = ()
            return logits

        return timed

    def _passed(self, rows: Sequence[BatchRow]) -> tuple[PassedRequest, ...]:
        self._keys = {row.request_id: self._keys.get(row.request_id) or _key_of(row) for row in rows}
        return tuple(
            PassedRequest(self._keys[row.request_id], row.start, row.end, row.num_prompt_tokens) for row in rows
        )


def _key_of(row: BatchRow) -> str:
    return prompt_key(int(prefix_sums(row.prompt_token_ids)[-1]))
