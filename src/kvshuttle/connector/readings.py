"""What the reading side writes down of each decode leg and of each load that vLLM waits for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvshuttle.handoff.fetch_protocol import Fact
from kvshuttle.handoff.intake import Intake
from kvshuttle.handoff.params import History, Mode

if TYPE_CHECKING:
    from kvshuttle.handoff.block_plan import ReadReason
    from kvshuttle.handoff.fetch import Fetch
    from kvshuttle.handoff.fetch_protocol import Action
    from kvshuttle.handoff.intake_protocol import IntakeAction, IntakeFact
    from kvshuttle.handoff.params import DecodeLeg, Peer


Actions = tuple["Action | IntakeAction", ...]
"""What a machine wants done."""

INTERNAL_ERROR = "internal_error"
"""Why a load failed whose machine raised."""
HISTORY = "history"
"""The direction of KV that comes back for a later turn."""


def direction_of(leg: DecodeLeg | History) -> str:
    """The metric label of how a request gets its KV."""
    if isinstance(leg, History):
        return HISTORY
    return "push" if leg.mode is Mode.PUSH else "read"


@dataclass(frozen=True, slots=True)
class EngineClock:
    """``host_id``: names the monotonic clock of the scheduler half. ``is_shared``: its workers live by it too."""

    host_id: str
    is_shared: bool


@dataclass(slots=True, eq=False)
class Reading:
    """One request that gets KV from elsewhere. ``direction``: the metric label of how.

    ``num_local_tokens`` and ``offer_reason`` are those of the engine's last question.
    """

    request_id: str
    fetch: Fetch | Intake
    direction: str
    num_local_tokens: int = 0
    offer_reason: ReadReason | None = None
    is_counted: bool = False
    is_request_over: bool = False
    is_broken: bool = False
    """The machine raised, which is a bug: it is told nothing any more, and nothing is offered."""

    @property
    def source(self) -> Peer:
        """The holder."""
        return self.fetch.source

    @property
    def is_settled(self) -> bool:
        """The machine has ended, or has been left alone."""
        return self.is_broken or self.fetch.is_drained

    def on(self, fact: IntakeFact, now_s: float) -> Actions:
        """Tell the machine."""
        if isinstance(self.fetch, Intake):
            return self.fetch.on(fact, now_s=now_s)
        assert isinstance(fact, Fact), fact
        return self.fetch.on(fact, now_s=now_s)


@dataclass(slots=True, eq=False)
class Load:
    """What vLLM waits for. ``destination``: blocks that the read may write to. ``failure``: a rank's, or ""."""

    reading: Reading
    num_tokens: int
    destination: tuple[int, ...]
    admitted_at_s: float
    read_ends_at_s: float = -math.inf
    failure: str = ""

    @property
    def is_read(self) -> bool:
        """The workers were told to read."""
        return math.isfinite(self.read_ends_at_s)
