"""What an emulated step comes to: its duration, the stamps that it writes and checks, and the next tokens."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvshuttle.emulate.model_dir import FIRST_WORD, NUM_WORDS, WRONG_KV
from kvshuttle.emulate.pattern import next_token, prefix_sums, prompt_key
from kvshuttle.emulate.trace import Pass, PassedRequest, append_pass

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from kvshuttle.emulate.pattern import Stamps
    from kvshuttle.emulate.profile import Profile

logger = logging.getLogger(__name__)

CHECKED_TOKENS_EACH_STEP = 64
MIN_STEPS_TO_CHECK = 8
MAX_STEPS_TO_CHECK = 64
"""A request's whole context is checked before its first token, and again so often that it comes to so many tokens a
step, within these bounds: one of up to 500 tokens after 8 more, one of 4k or longer after 64. A check costs half a
millisecond at least where a model has many layers."""


@dataclass(frozen=True, slots=True, eq=False)
class BatchRow:
    """One request of a batch: positions ``[start, end)`` are computed in this step.

    ``token_ids``: all tokens up to ``end``. ``block_ids``: at least the blocks of ``[0, end)``. ``last_index``: where
    its last token stands in the batch.
    """

    request_id: str
    start: int
    end: int
    num_prompt_tokens: int
    token_ids: NDArray[np.int32]
    prompt_token_ids: NDArray[np.int32]
    block_ids: NDArray[np.int32]
    last_index: int

    @property
    def is_decode(self) -> bool:
        """One token behind the prompt."""
        return self.start >= self.num_prompt_tokens and self.end == self.start + 1

    @property
    def samples(self) -> bool:
        """The step computes the last token that is known, so the next one is drawn."""
        return self.end >= self.num_prompt_tokens


@dataclass(slots=True)
class _Known:
    """What the emulation remembers of a request between steps."""

    key: str
    end: int = -1
    prefix_sum: int = 0
    """At ``end - 1``."""
    steps_to_check: int = 0
    wrong_at: int = -1


@dataclass(frozen=True, slots=True)
class Step:
    """A step that has begun: what to answer, and how long it is to last."""

    tokens: list[int]
    planned_s: float
    """On a machine of its own."""
    slowdown: float
    """How many times slower it goes on while another engine of the machine computes."""
    started_at_s: float
    busy_s: float
    requests: tuple[PassedRequest, ...]


@dataclass(slots=True)
class Emulation:
    """One worker's emulated accelerator. ``trace_path``: where to append its passes, None for nowhere."""

    profile: Profile
    stamps: Stamps
    trace_path: Path | None
    now_s: Callable[[], float]
    num_wrong: int = 0
    """Requests whose KV was found wrong."""
    _known: dict[str, _Known] = field(default_factory=dict)

    def clear(self) -> None:
        """Mark all KV memory as never written."""
        self.stamps.clear()

    def step(self, rows: Sequence[BatchRow], *, started_at_s: float) -> Step:
        """Write and check what a step over ``rows`` writes and reads. The caller lets the time pass, then finishes."""
        self._forget_others(rows)
        tokens = [self._compute(row) for row in rows]
        chunks = [(row.start, row.end - row.start) for row in rows if not row.is_decode]
        contexts = [row.end for row in rows if row.is_decode]
        requests = tuple(
            PassedRequest(known.key, row.start, row.end, row.num_prompt_tokens, known.wrong_at)
            for row in rows
            for known in (self._known[row.request_id],)
        )
        planned_s = self.profile.step_s(chunks, contexts)
        # The last token alone of a prompt that was handed over is work as for a decoded one.
        slowdown = self.profile.slowdown(computes_prompts=any(num > 1 for _, num in chunks))
        return Step(tokens, planned_s, slowdown, started_at_s, self.now_s() - started_at_s, requests)

    def finish(self, step: Step, *, lasting_s: float) -> None:
        """The step's time has passed: put it into the trace. ``lasting_s``: how long it had to last."""
        if self.trace_path is None:
            return
        forward = Pass(step.started_at_s, self.now_s(), lasting_s, step.busy_s, step.requests)
        append_pass(self.trace_path, forward)

    def _compute(self, row: BatchRow) -> int:
        """Stamp what is new, check what it attends to, and return the next token."""
        known = self._known.get(row.request_id)
        if known is None:
            known = _Known(prompt_key(int(prefix_sums(row.prompt_token_ids)[-1])))
            self._known[row.request_id] = known
        is_continued = known.end == row.start
        # Where vLLM took its blocks away meanwhile, everything is new again.
        known.steps_to_check = known.steps_to_check if is_continued else 0
        first = row.start if is_continued else 0
        sums = prefix_sums(row.token_ids[first:], start=first, before=known.prefix_sum if is_continued else 0)
        self.stamps.write(sums[row.start - first :], row.block_ids, start=row.start)
        known.end, known.prefix_sum = row.end, int(sums[-1])
        if row.samples:
            self._check(row, known)
        if known.wrong_at >= 0:
            return WRONG_KV
        return next_token(known.prefix_sum, first=FIRST_WORD, num_tokens=NUM_WORDS)

    def _check(self, row: BatchRow, known: _Known) -> None:
        if known.steps_to_check > 0 or known.wrong_at >= 0:
            known.steps_to_check -= 1
            return
        steps = row.end // CHECKED_TOKENS_EACH_STEP
        known.steps_to_check = min(max(steps, MIN_STEPS_TO_CHECK), MAX_STEPS_TO_CHECK) - 1
        mismatch = self.stamps.check(prefix_sums(row.token_ids), row.block_ids)
        if mismatch is None:
            return
        known.wrong_at = mismatch.position
        self.num_wrong += 1
        logger.error("kvshuttle: emulated model: request %s has wrong KV: %s", row.request_id, mismatch)

    def _forget_others(self, rows: Sequence[BatchRow]) -> None:
        """Requests that are not in the batch have ended, or lost their blocks: both begin anew."""
        here = {row.request_id for row in rows}
        for request_id in [each for each in self._known if each not in here]:
            del self._known[request_id]
