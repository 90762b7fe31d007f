"""The vocabulary of an intake, beside that of a fetch: facts it is told, actions it asks for, limits, how it ends."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from kvshuttle.errors import ConfigError
from kvshuttle.handoff.fetch_protocol import (
    AcquireAnswered,
    FetchLimits,
    LoadAdmitted,
    NothingToRead,
    PeerFailed,
    ReadEnded,
    RenewAnswered,
    RequestEnded,
    SendAcquire,
    SendRelease,
    SendRenew,
    StartRead,
)

if TYPE_CHECKING:
    from kvshuttle.handoff.fetch_protocol import Outcome
    from kvshuttle.handoff.messages import (
        Declined,
        Proceed,
        Proceeding,
        Register,
        Registered,
        Withdraw,
        Withdrawn,
    )


class PushOutcome(StrEnum):
    """How a push ended for its reader: the metric label. Only ``RECEIVED`` means that the tokens came by it."""

    RECEIVED = "received"
    """Everything arrived."""
    FULL_LOCAL_HIT = "full_local_hit"
    """Everything but the last token was here."""
    BELOW_THRESHOLD = "below_threshold"
    """Computing the difference was cheaper."""
    ENGINE_DECLINED = "engine_declined"
    """Tokens were offered and the engine admitted the request without them."""
    DECLINED_UNKNOWN_HANDLE = "declined_unknown_handle"
    """The holder has let go of what the handle named."""
    DECLINED_OTHER_INCARNATION = "declined_other_incarnation"
    """The holder was restarted."""
    DECLINED_INCOMPATIBLE = "declined_incompatible"
    """The holder's KV cannot be used here."""
    DECLINED_OTHER_TOKENS = "declined_other_tokens"
    """The holder computes another prompt under this handle."""
    DECLINED_PREFILL_ENDED = "declined_prefill_ended"
    """The prompt's request ended before it was computed."""
    DECLINED_TOO_MANY = "declined_too_many"
    """The holder keeps no more registrations."""
    DECLINED_UNKNOWN_REGISTRATION = "declined_unknown_registration"
    """The holder has given the registration up: it did not hear of this engine for a whole lease."""
    BAD_ANSWER = "bad_answer"
    """The holder's answer made no sense."""
    REGISTER_FAILED = "register_failed"
    """The side channel gave up on the holder before anything was written."""
    REGISTER_TIMED_OUT = "register_timed_out"
    """The holder did not answer the registration in time."""
    SOURCE_FAILED = "source_failed"
    """The holder says that there will be no commit; the detail names its reason."""
    WENT_QUIET = "went_quiet"
    """The prompt was computed, or its request never came, and nothing arrived for ``push_timeout_s``."""
    WAITED_TOO_LONG = "waited_too_long"
    """Not complete within ``total_wait_s``."""
    LOAD_FAILED = "load_failed"
    """A worker of this engine failed."""
    ABORTED = "aborted"
    """The request ended first."""


@dataclass(frozen=True, slots=True)
class PushLimits:
    """How patient an intake is. ``fetch``: for what it shares with a fetch, and for the fetch it may fall back to.

    ``push_timeout_s``: longest time without a sign of life that counts: blocks that arrive, or the holder's word that
    it still computes. ``confirm_timeout_s``: longest time that the engine waits for the holder to confirm that nothing
    is under way; infinite where failed loads are recomputed in place, which makes a quarantine impossible.
    """

    fetch: FetchLimits
    push_timeout_s: float
    confirm_timeout_s: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.push_timeout_s) and self.push_timeout_s > 0):
            raise ConfigError(f"push_timeout_s: {self.push_timeout_s} is not a positive number of seconds")
        if not self.confirm_timeout_s > 0:
            raise ConfigError(f"confirm_timeout_s: {self.confirm_timeout_s} is not a positive number of seconds")


@dataclass(frozen=True, slots=True)
class RegisterAnswered:
    """The holder answered the registration."""

    answer: Registered | Declined


@dataclass(frozen=True, slots=True)
class RegisterFailed:
    """The registration got no usable answer: timed out, refused, undecodable. The answer may still come."""

    detail: str


@dataclass(frozen=True, slots=True)
class ProceedAnswered:
    """The holder answered a proceed. One without an answer is not reported: the next is due soon."""

    answer: Proceeding | Declined


@dataclass(frozen=True, slots=True)
class WithdrawAnswered:
    """The holder answered a withdrawal of ``lease_id``. One without an answer is not reported."""

    lease_id: str
    answer: Withdrawn | Declined


@dataclass(frozen=True, slots=True)
class BlocksArrived:
    """Some worker has seen blocks arrive."""


@dataclass(frozen=True, slots=True)
class SourceFailed:
    """Some worker was told by the holder's that there will be no commit, or got a commit that cannot be true."""

    reason: str


@dataclass(frozen=True, slots=True)
class SourceDead:
    """The driver knows that the processes of the holder's life that was meant are gone."""

    detail: str


ClaimFact = (
    RegisterAnswered | RegisterFailed | ProceedAnswered | WithdrawAnswered | BlocksArrived | SourceFailed | SourceDead
)

IntakeFact = (
    LoadAdmitted | NothingToRead | ReadEnded | RequestEnded | ClaimFact | AcquireAnswered | RenewAnswered | PeerFailed
)
"""``ReadEnded``: every worker has reported the load. The last three are for the fetch it falls back to."""


@dataclass(frozen=True, slots=True)
class ExpectPush:
    """Have every worker expect so many blocks and report the load when they are complete, each worker once."""

    registration_id: str
    num_blocks: int


@dataclass(frozen=True, slots=True)
class SendRegister:
    """Ask the holder; report ``RegisterAnswered``, or ``RegisterFailed`` after at most ``timeout_s``."""

    message: Register
    timeout_s: float


@dataclass(frozen=True, slots=True)
class SendProceed:
    """Ask the holder; report ``ProceedAnswered`` if it answers within ``timeout_s``."""

    message: Proceed
    timeout_s: float


@dataclass(frozen=True, slots=True)
class SendWithdraw:
    """Ask the holder; report ``WithdrawAnswered`` if it answers within ``timeout_s``."""

    message: Withdraw
    timeout_s: float


@dataclass(frozen=True, slots=True)
class FailPush:
    """Have every worker that has not reported the load report it as failed."""

    outcome: PushOutcome | Outcome


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Keep the destination blocks out of use from now on, whatever the engine does with them."""

    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LiftQuarantine:
    """Nothing can be written to them any more."""


IntakeAction = (
    ExpectPush
    | SendRegister
    | SendProceed
    | SendWithdraw
    | FailPush
    | Quarantine
    | LiftQuarantine
    | SendAcquire
    | SendRenew
    | SendRelease
    | StartRead
)
"""``StartRead``: only workers that have not reported the load read."""
