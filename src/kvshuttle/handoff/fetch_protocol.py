"""The vocabulary of a fetch: facts it is told, actions it asks for, how it ends, and the table of its states.

``TRANSITIONS`` is the protocol: the machine in ``fetch.py`` moves by it and nothing else, and
``docs/protocol.md`` is written from it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING

from kvshuttle.errors import ConfigError

if TYPE_CHECKING:
    from kvshuttle.handoff.block_plan import BlockPlan, ReadReason
    from kvshuttle.handoff.messages import Acquire, Acquired, Denied, Release, Renew, Renewed


class State(StrEnum):
    """Where a fetch stands."""

    NEW = "new"
    """Nothing sent yet."""
    ACQUIRING = "acquiring"
    """The acquire is on its way; the request waits."""
    LEASED = "leased"
    """The peer keeps the blocks; the engine has not admitted the load yet. Renewing."""
    READING = "reading"
    """The workers read. Renewing."""
    ABANDONED = "abandoned"
    """Not needed any more while the acquire is on its way: a lease it brings is given back."""
    DRAINING = "draining"
    """The request ended while the workers read: their end is awaited, then the lease is given back."""
    ENDED = "ended"
    """Nothing is held, lent or in flight; ``outcome`` says why. A lease that still turns up is given back."""


class Trigger(StrEnum):
    """What moves a fetch: a fact after inspection, or the clock."""

    START = "start"
    GRANTED = "granted"
    """Outside ACQUIRING and ABANDONED: late or doubled. A lease that is not the own one is given back."""
    DENIED = "denied"
    BAD_ANSWER = "bad_answer"
    PEER_FAILED = "peer_failed"
    """Outside ACQUIRING and ABANDONED: a renew got no answer; the next one is due before the lease ends."""
    ACQUIRE_TIMED_OUT = "acquire_timed_out"
    WAITED_TOO_LONG = "waited_too_long"
    RENEWED = "renewed"
    """A renew was answered. An answer to an older renew, or one that makes no sense, extends nothing."""
    LEASE_LOST = "lease_lost"
    LOAD_ADMITTED = "load_admitted"
    LOAD_TOO_LATE = "load_too_late"
    """The engine took an offer that a lost lease has made void."""
    LOAD_FAILED = "load_failed"
    """The driver confirms a ``FailLoad``."""
    NOTHING_TO_READ = "nothing_to_read"
    READ_ENDED = "read_ended"
    REQUEST_ENDED = "request_ended"


_S, _T = State, Trigger

TRANSITIONS: dict[tuple[State, Trigger], State] = {
    (_S.NEW, _T.START): _S.ACQUIRING,
    (_S.NEW, _T.NOTHING_TO_READ): _S.ENDED,
    (_S.NEW, _T.REQUEST_ENDED): _S.ENDED,
    (_S.ACQUIRING, _T.GRANTED): _S.LEASED,
    (_S.ACQUIRING, _T.DENIED): _S.ENDED,
    (_S.ACQUIRING, _T.BAD_ANSWER): _S.ENDED,
    (_S.ACQUIRING, _T.PEER_FAILED): _S.ENDED,
    (_S.ACQUIRING, _T.ACQUIRE_TIMED_OUT): _S.ENDED,
    (_S.ACQUIRING, _T.NOTHING_TO_READ): _S.ABANDONED,
    (_S.ACQUIRING, _T.REQUEST_ENDED): _S.ABANDONED,
    (_S.LEASED, _T.GRANTED): _S.LEASED,
    (_S.LEASED, _T.DENIED): _S.LEASED,
    (_S.LEASED, _T.RENEWED): _S.LEASED,
    (_S.LEASED, _T.PEER_FAILED): _S.LEASED,
    (_S.LEASED, _T.LEASE_LOST): _S.ENDED,
    (_S.LEASED, _T.WAITED_TOO_LONG): _S.ENDED,
    (_S.LEASED, _T.LOAD_ADMITTED): _S.READING,
    (_S.LEASED, _T.LOAD_TOO_LATE): _S.ENDED,
    (_S.LEASED, _T.NOTHING_TO_READ): _S.ENDED,
    (_S.LEASED, _T.REQUEST_ENDED): _S.ENDED,
    (_S.READING, _T.GRANTED): _S.READING,
    (_S.READING, _T.DENIED): _S.READING,
    (_S.READING, _T.RENEWED): _S.READING,
    (_S.READING, _T.PEER_FAILED): _S.READING,
    (_S.READING, _T.LEASE_LOST): _S.READING,
    (_S.READING, _T.READ_ENDED): _S.ENDED,
    (_S.READING, _T.REQUEST_ENDED): _S.DRAINING,
    (_S.ABANDONED, _T.GRANTED): _S.ENDED,
    (_S.ABANDONED, _T.DENIED): _S.ENDED,
    (_S.ABANDONED, _T.BAD_ANSWER): _S.ENDED,
    (_S.ABANDONED, _T.PEER_FAILED): _S.ENDED,
    (_S.ABANDONED, _T.ACQUIRE_TIMED_OUT): _S.ENDED,
    (_S.ABANDONED, _T.NOTHING_TO_READ): _S.ABANDONED,
    (_S.ABANDONED, _T.REQUEST_ENDED): _S.ABANDONED,
    (_S.DRAINING, _T.GRANTED): _S.DRAINING,
    (_S.DRAINING, _T.DENIED): _S.DRAINING,
    (_S.DRAINING, _T.RENEWED): _S.DRAINING,
    (_S.DRAINING, _T.PEER_FAILED): _S.DRAINING,
    (_S.DRAINING, _T.READ_ENDED): _S.ENDED,
    (_S.DRAINING, _T.REQUEST_ENDED): _S.DRAINING,
    (_S.ENDED, _T.GRANTED): _S.ENDED,
    (_S.ENDED, _T.DENIED): _S.ENDED,
    (_S.ENDED, _T.RENEWED): _S.ENDED,
    (_S.ENDED, _T.PEER_FAILED): _S.ENDED,
    (_S.ENDED, _T.LOAD_TOO_LATE): _S.ENDED,
    (_S.ENDED, _T.LOAD_FAILED): _S.ENDED,
    (_S.ENDED, _T.NOTHING_TO_READ): _S.ENDED,
    (_S.ENDED, _T.REQUEST_ENDED): _S.ENDED,
}
"""Every allowed move. A repeated fact changes nothing; anything else raises ``LocalProtocolError``."""


class Outcome(StrEnum):
    """How a fetch ended: the metric label. Only ``READ_OK`` means that the tokens are here."""

    READ_OK = "read_ok"
    FULL_LOCAL_HIT = "full_local_hit"
    LOCAL_COVERS_VERIFIED = "local_covers_verified"
    BELOW_THRESHOLD = "below_threshold"
    ENGINE_DECLINED = "engine_declined"
    """Tokens were offered and the engine admitted the request without them."""
    DENIED_UNKNOWN_HANDLE = "denied_unknown_handle"
    DENIED_OTHER_INCARNATION = "denied_other_incarnation"
    DENIED_INCOMPATIBLE = "denied_incompatible"
    DENIED_NO_COMMON_PREFIX = "denied_no_common_prefix"
    BAD_ANSWER = "bad_answer"
    PEER_FAILED = "peer_failed"
    ACQUIRE_TIMED_OUT = "acquire_timed_out"
    WAITED_TOO_LONG = "waited_too_long"
    """The engine did not admit the load within ``total_wait_s``."""
    LEASE_LOST = "lease_lost"
    READ_FAILED = "read_failed"
    READ_TOO_LATE = "read_too_late"
    """The read completed, but after the lease's end: its content cannot be trusted."""
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Deadlines of one fetch, in seconds, and the fewest tokens worth reading. Raises ``ConfigError``."""

    acquire_timeout_s: float
    lease_s: float
    read_timeout_s: float
    submit_margin_s: float
    total_wait_s: float = 300.0
    recompute_threshold_tokens: int = 0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name.endswith("_s") and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{each.name}: {value} is not a positive number of seconds")
        if self.submit_margin_s >= self.lease_s:
            raise ConfigError(f"submit_margin_s: {self.submit_margin_s} leaves nothing of lease_s {self.lease_s}")
        if self.recompute_threshold_tokens < 0:
            raise ConfigError(f"recompute_threshold_tokens: {self.recompute_threshold_tokens} is negative")


@dataclass(frozen=True, slots=True)
class Offer:
    """Answer to "how many tokens can you load?". ``num_tokens`` None: still acquiring, ask again.

    ``reason`` is None while pending and once the fetch has ended (its ``outcome`` tells more then).
    """

    num_tokens: int | None
    reason: ReadReason | None = None

    @property
    def is_pending(self) -> bool:
        """Ask again later."""
        return self.num_tokens is None


PENDING = Offer(None)


@dataclass(frozen=True, slots=True)
class AcquireAnswered:
    """The peer answered the acquire."""

    answer: Acquired | Denied


@dataclass(frozen=True, slots=True)
class PeerFailed:
    """An acquire or a renew got no usable answer: timed out, refused, undecodable."""

    detail: str


@dataclass(frozen=True, slots=True)
class RenewAnswered:
    """The peer answered the renew of that ``ordinal`` (from ``SendRenew``)."""

    ordinal: int
    answer: Renewed


@dataclass(frozen=True, slots=True)
class LoadAdmitted:
    """The engine took an offer of more than 0 tokens. ``destination_block_ids``: the request's whole block table."""

    num_local_tokens: int
    num_external_tokens: int
    destination_block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NothingToRead:
    """The engine admitted the request without a load. ``reason`` is the offer's."""

    reason: ReadReason | None = None


@dataclass(frozen=True, slots=True)
class ReadEnded:
    """Every worker's read is over and touches no memory any more. ``is_ok``: all of them succeeded."""

    is_ok: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """The request finished, or was aborted, whatever the fetch was doing."""


Fact = AcquireAnswered | PeerFailed | RenewAnswered | LoadAdmitted | NothingToRead | ReadEnded | RequestEnded


@dataclass(frozen=True, slots=True)
class SendAcquire:
    """Ask the source; report ``AcquireAnswered``, or ``PeerFailed`` after at most ``timeout_s``."""

    message: Acquire
    timeout_s: float


@dataclass(frozen=True, slots=True)
class SendRenew:
    """Ask the source; report ``RenewAnswered`` with this ``ordinal``, or ``PeerFailed`` after ``timeout_s``."""

    message: Renew
    ordinal: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class SendRelease:
    """Tell the source, without waiting for its answer: a lost release costs it one lease duration."""

    message: Release


@dataclass(frozen=True, slots=True)
class StartRead:
    """Read ``plan`` within ``budget_s``, then report ``ReadEnded``: nothing is submitted or running after it."""

    plan: BlockPlan
    budget_s: float


@dataclass(frozen=True, slots=True)
class FailLoad:
    """The engine admitted a load that cannot be started any more: report it to the engine as failed."""

    outcome: Outcome


Action = SendAcquire | SendRenew | SendRelease | StartRead | FailLoad
