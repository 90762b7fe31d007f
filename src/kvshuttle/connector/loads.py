"""What one worker owes vLLM: an end for each load that was ordered, exactly once, and never a lie about memory.

Three things may come for a load: a result, an order that it be failed, or nothing at all because the comm thread is
dead or stuck in a call, which only the time can tell. A result that comes after its load was given up no longer says
how the load ended, only whether the read can still write.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvshuttle.connector.reads import DrainedRead, ReadResult

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvshuttle.connector.reads import ReadOutcome
    from kvshuttle.connector.step_metadata import FailedLoad

_STUCK_GRACE_S = 5.0
"""The comm thread ends a read when its budget is over. This much later it must be stuck in a transport call."""


@dataclass(slots=True)
class StepResults:
    """What a step may tell.

    ``ended``: loads that are over; those of them that failed are in ``failures``. ``undrained``, ``drained``: see
    ``WorkerReport``. ``failed_block_ids``: destinations of what failed.
    """

    ended: list[ReadResult] = field(default_factory=list)
    undrained: Counter[str] = field(default_factory=Counter)
    drained: Counter[str] = field(default_factory=Counter)
    failed_block_ids: set[int] = field(default_factory=set)

    @property
    def failures(self) -> dict[str, str]:
        """Request id to reason."""
        return {result.request_id: result.reason for result in self.ended if result.reason}


@dataclass(frozen=True, slots=True)
class _Pending:
    block_ids: tuple[int, ...]
    give_up_at_s: float


class Loads:
    """Not thread-safe: it belongs to the worker's main thread."""

    def __init__(self) -> None:
        self._pending: dict[str, _Pending] = {}
        self._to_fail: list[FailedLoad] = []
        self._given_up: set[str] = set()

    def __repr__(self) -> str:
        return f"<Loads pending={len(self._pending)} given_up={len(self._given_up)}>"

    def expect(self, request_id: str, *, block_ids: tuple[int, ...], budget_s: float, now_s: float) -> None:
        """A read is ordered. ``block_ids``: its destination."""
        self._pending[request_id] = _Pending(block_ids, now_s + budget_s + _STUCK_GRACE_S)

    def expect_push(self, request_id: str, *, block_ids: tuple[int, ...]) -> None:
        """A push is expected, for as long as the scheduler half waits for it."""
        self._pending[request_id] = _Pending(block_ids, float("inf"))

    def is_pending(self, request_id: str) -> bool:
        """Whether this load has not been reported."""
        return request_id in self._pending

    def fail(self, load: FailedLoad) -> None:
        """No read is ordered, and the load fails at the next ``settle``."""
        self._pending[load.request_id] = _Pending(load.block_ids, float("inf"))
        self._to_fail.append(load)

    def settle(self, outcomes: Iterable[ReadOutcome], *, is_comm_alive: bool, now_s: float) -> StepResults:
        """Take in what came since the last call."""
        results = StepResults()
        for outcome in outcomes:
            if isinstance(outcome, DrainedRead):
                self._on_drained(outcome.request_id, results)
            else:
                self._on_result(outcome, results)
        to_fail, self._to_fail = self._to_fail, []
        for load in to_fail:
            self._on_result(ReadResult(load.request_id, load.reason, is_called_off=True), results)
        for request_id, pending in tuple(self._pending.items()):
            if now_s >= pending.give_up_at_s or not is_comm_alive:
                self._given_up.add(request_id)
                reason = "comm_thread_stuck" if is_comm_alive else "comm_thread_dead"
                self._end(ReadResult(request_id, reason, is_drained=False), results)
        return results

    def _on_result(self, result: ReadResult, results: StepResults) -> None:
        if result.request_id in self._pending:
            self._end(result, results)
        elif result.request_id in self._given_up and result.is_drained:
            self._on_drained(result.request_id, results)

    def _on_drained(self, request_id: str, results: StepResults) -> None:
        self._given_up.discard(request_id)
        results.drained[request_id] += 1

    def _end(self, result: ReadResult, results: StepResults) -> None:
        pending = self._pending.pop(result.request_id)
        results.ended.append(result)
        if not result.is_drained:
            results.undrained[result.request_id] += 1
        if result.reason:
            results.failed_block_ids.update(pending.block_ids)
