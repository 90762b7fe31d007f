"""What reads and writes of a worker have in common: how a block plan is posted, counted, and announced to the peer."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvshuttle.clock import now_s
from kvshuttle.connector.kv_layout import KvMemory, plan_spans
from kvshuttle.errors import KvshuttleError
from kvshuttle.transport import Operation, PeerName, Transfer, Transport

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvshuttle.handoff.block_plan import BlockPlan
    from kvshuttle.handoff.cards import WorkerCard

logger = logging.getLogger(__name__)

HINT_S = {Operation.READ: 1.0, Operation.WRITE: 0.05}
"""How long a peer keeps polling quickly after a hint. A hint is sent with each transfer, and again while it lasts.

Quick polling is a quarter of a core, and each turn takes the GIL from the engine, so for a write it is little more than
one takes. A peer that is read from goes on for longer: UCX may abort it when its reader dies while it does not poll
(docs/decisions, 0005).
"""


@dataclass(slots=True, eq=False)
class Posted:
    """A transfer that was handed to the transport. ``address``: the peer's worker, which is told of it."""

    transfer: Transfer
    address: str
    posted_at_s: float
    post_s: float
    num_bytes: int
    num_descriptors: int
    hint_s: float
    next_hint_at_s: float

    def hint_again(self, hint: Callable[[str], None]) -> None:
        """Tell the peer that it still goes on, if it is time to."""
        if now_s() >= self.next_hint_at_s:
            self.next_hint_at_s = now_s() + self.hint_s / 2
            hint(self.address)


class Poster:
    """Posts plans between this worker's memory and its peers'. ``hint``: tells a peer that it is about to be busy."""

    def __init__(self, memory: KvMemory, transport: Transport, hint: Callable[[str], None]) -> None:
        self._memory = memory
        self._transport = transport
        self._hint = hint

    def post(
        self,
        operation: Operation,
        worker: WorkerCard,
        name: PeerName,
        plan: BlockPlan,
        *,
        notification: bytes = b"",
    ) -> Posted:
        """Post ``plan``. ``name``: how the transport knows ``worker``. Raises what it and ``plan_spans`` raise."""
        started_at_s = now_s()
        is_read = operation is Operation.READ
        regions = self._memory.regions
        sides = (worker.regions, regions) if is_read else (regions, worker.regions)
        source, destination = plan_spans(plan, *sides)
        local, remote = (destination, source) if is_read else (source, destination)
        self._hint(worker.address)
        transfer = self._transport.post(
            operation,
            name,
            local,
            remote,
            device=self._memory.device,
            device_id=self._memory.device_id,
            remote_device_id=worker.device_id,
            notification=notification,
        )
        return Posted(
            transfer=transfer,
            address=worker.address,
            posted_at_s=started_at_s,
            post_s=now_s() - started_at_s,
            num_bytes=int(local[:, 1].sum()),
            num_descriptors=len(local),
            hint_s=HINT_S[operation],
            next_hint_at_s=started_at_s + HINT_S[operation] / 2,
        )


def disconnect(transport: Transport, name: PeerName) -> None:
    """Make the transport forget a peer: its pending transfers fail, and the next one connects anew."""
    try:
        transport.remove_peer(name)
    except KvshuttleError as error:
        logger.warning("kvshuttle: %s", error)
