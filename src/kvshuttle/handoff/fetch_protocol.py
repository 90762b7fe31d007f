"""The vocabulary of a fetch: facts it is told, actions it asks for, limits, offers, and how it ends."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING

from kvshuttle.errors import ConfigError

if TYPE_CHECKING:
    from kvshuttle.handoff.block_plan import BlockPlan, ReadReason
    from kvshuttle.handoff.messages import Acquire, Acquired, Denied, Release, Renew, Renewed


class Outcome(StrEnum):
    """How a fetch ended: the metric label. Only ``READ_OK`` means that the tokens are here."""

    READ_OK = "read_ok"
    """Read in time."""
    FULL_LOCAL_HIT = "full_local_hit"
    """Everything but the last token was here."""
    LOCAL_COVERS_VERIFIED = "local_covers_verified"
    """The peer had nothing that was not here."""
    BELOW_THRESHOLD = "below_threshold"
    """Computing the difference was cheaper."""
    ENGINE_DECLINED = "engine_declined"
    """Tokens were offered and the engine admitted the request without them."""
    DENIED_UNKNOWN_HANDLE = "denied_unknown_handle"
    """The peer holds nothing under this handle, or no longer."""
    DENIED_OTHER_INCARNATION = "denied_other_incarnation"
    """The peer was restarted."""
    DENIED_INCOMPATIBLE = "denied_incompatible"
    """The peer's KV cannot be used here."""
    DENIED_NO_COMMON_PREFIX = "denied_no_common_prefix"
    """The peer holds other tokens."""
    BAD_ANSWER = "bad_answer"
    """The peer's grant made no sense."""
    PEER_FAILED = "peer_failed"
    """The side channel gave up on the peer."""
    ACQUIRE_TIMED_OUT = "acquire_timed_out"
    """The peer did not answer within ``acquire_timeout_s``."""
    WAITED_TOO_LONG = "waited_too_long"
    """The engine did not admit the load within ``total_wait_s``."""
    LEASE_LOST = "lease_lost"
    """The lease ended, or came too close to its end, before the read could start."""
    READ_FAILED = "read_failed"
    """The workers could not read."""
    READ_TOO_LATE = "read_too_late"
    """The read completed, but after the lease's end: its content cannot be trusted."""
    ABORTED = "aborted"
    """The request ended first."""


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
    """Every worker is done with the read. ``is_ok``: all of them succeeded.

    Blocks that a failed read may still write to are kept out of use by the driver, beyond this machine's life.
    """

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
    """Read ``plan`` and report ``ReadEnded``.

    What has not been submitted within ``submit_within_s`` from now must not be any more; what has not completed within
    ``budget_s`` from now has failed.
    """

    plan: BlockPlan
    budget_s: float
    submit_within_s: float


@dataclass(frozen=True, slots=True)
class FailLoad:
    """The engine admitted a load that cannot be started any more: report it to the engine as failed."""

    outcome: Outcome


Action = SendAcquire | SendRenew | SendRelease | StartRead | FailLoad
