"""What the two halves tell each other each engine step; pickled by vLLM between its processes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

if TYPE_CHECKING:
    from kvshuttle.handoff.block_plan import BlockPlan
    from kvshuttle.handoff.cards import WorkerCard
    from kvshuttle.handoff.progress import Progress, Restarted


@dataclass(frozen=True, slots=True)
class ReadOrder:
    """Read ``plan`` from the peer named ``incarnation`` for ``request_id``, within ``budget_s`` of ``issued_at_s``, and
    submit nothing later than ``submit_within_s`` after that.

    ``issued_at_s`` is the host's monotonic clock: both halves of an engine normally share a host, which
    ``host`` tells; on another host the worker takes a fixed allowance off both instead.
    """

    request_id: str
    incarnation: str
    plan: BlockPlan
    budget_s: float
    submit_within_s: float
    issued_at_s: float
    host: str
    is_instead_of_push: bool = False
    """Only where the load has not been reported: it may have arrived in the meantime."""


@dataclass(frozen=True, slots=True)
class PushExpectation:
    """Report the load of ``request_id`` when everything under ``registration_id`` is in ``block_ids``."""

    request_id: str
    registration_id: str
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FailedLoad:
    """A load that vLLM waits for and that will not be read: the workers report it as failed, vLLM's only way in.

    ``block_ids``: its destination.
    """

    request_id: str
    reason: str
    block_ids: tuple[int, ...]
    is_push: bool = False
    """Only where the load has not been reported: it may have arrived in the meantime."""


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler half to worker halves, every step.

    ``peers``: cards of engines not named before, by incarnation. ``gone``: incarnations to forget, before that.
    ``restarted`` holds before this step's forward pass, ``progress`` after it. ``sources_over``: to be forgotten.
    """

    reads: list[ReadOrder] = field(default_factory=list)
    failed_loads: list[FailedLoad] = field(default_factory=list)
    peers: dict[str, tuple[WorkerCard, ...]] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)
    pushes: list[PushExpectation] = field(default_factory=list)
    restarted: list[Restarted] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)
    sources_over: list[str] = field(default_factory=list)


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Worker halves to scheduler half, when there is something to say.

    ``failed``: request id to what went wrong. ``undrained``: failed reads that may still touch their
    destination, one count a rank; ``drained``: the same, once they cannot any more. ``arriving``: pushes of which
    something has arrived. ``push_failed``: pushes that will not be committed, and why.
    """

    failed: dict[str, str] = field(default_factory=dict)
    undrained: Counter[str] = field(default_factory=Counter)
    drained: Counter[str] = field(default_factory=Counter)
    arriving: set[str] = field(default_factory=set)
    push_failed: dict[str, str] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Merge the reports of two ranks of one step."""
        assert isinstance(other, WorkerReport)
        return WorkerReport(
            failed={**other.failed, **self.failed},
            undrained=self.undrained + other.undrained,
            drained=self.drained + other.drained,
            arriving=self.arriving | other.arriving,
            push_failed={**other.push_failed, **self.push_failed},
        )


@dataclass
class WorkerHandshake(KVConnectorHandshakeMetadata):
    """Worker half to scheduler half, once, after the KV caches exist. ``host_id``: names the clock it lives by."""

    card: WorkerCard
    kv_layout: str
    host_id: str
