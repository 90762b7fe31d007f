"""What engines and the router say to each other on the side channel.

Requests expect exactly one reply; ``Busy`` is the only one-way message. ``Orders`` stay within one engine. What workers
tell each other beside their writes is in ``notifications.py``. Instants never cross a process:
every time is a *remaining duration*. A reader counts a granted duration from the moment it
*sent* its request, the holder from the moment it granted, so the reader's view always ends first
and no clocks need to agree.

History of ``PROTOCOL_VERSION``: 1, first release.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from kvshuttle.handoff.cards import EngineCard, Fingerprint, WorkerCard
from kvshuttle.handoff.orders import Orders, OrdersTaken

PROTOCOL_VERSION = 1


class DenyReason(StrEnum):
    """Why a holder does not lend. Also the metric label on the reader."""

    UNKNOWN_HANDLE = "unknown_handle"
    """Never granted here, or already released, expired or consumed."""
    OTHER_INCARNATION = "other_incarnation"
    """The reader asked for an earlier life of this engine."""
    INCOMPATIBLE = "incompatible"
    """Fingerprints differ; ``detail`` names the fields."""
    NO_COMMON_PREFIX = "no_common_prefix"
    """Not one block of the wanted tokens is held."""


class DeclineReason(StrEnum):
    """Why a holder does not write. Also the metric label on the reader."""

    UNKNOWN_HANDLE = "unknown_handle"
    """What this handle names has been read, dropped, or let go of."""
    OTHER_INCARNATION = "other_incarnation"
    """The reader means an earlier life of this engine: nothing of that life writes any more."""
    INCOMPATIBLE = "incompatible"
    """Fingerprints or workers differ; ``detail`` names the fields."""
    OTHER_TOKENS = "other_tokens"
    """The prompt under this handle is not the reader's, to the last token."""
    PREFILL_ENDED = "prefill_ended"
    """The prompt's request ended before it was computed."""
    TOO_MANY = "too_many"
    """The holder keeps no more registrations."""
    UNKNOWN_REGISTRATION = "unknown_registration"
    """Never granted here, or ended: nothing is written under it any more."""


class Stage(StrEnum):
    """How far the holder is with a registration."""

    AWAITING_PREFILL = "awaiting_prefill"
    """The prompt's request has not arrived."""
    COMPUTING = "computing"
    """It is here: queued, or being computed and written chunk by chunk."""
    COMPUTED = "computed"
    """All of it is computed; what is not written yet is being written."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Who are you? Asked by routers and by readers before their first acquire."""

    protocol_version: int
    sender: str


class HelloAck(msgspec.Struct, frozen=True, tag="hello_ack"):
    """This is who I am."""

    card: EngineCard


class Acquire(msgspec.Struct, frozen=True, tag="acquire"):
    """Lend me what ``handle`` names, as far as it matches these tokens.

    ``links``/``tail``/``num_tokens``/``block_size_tokens``: the wanted token chain. ``duration_s``: lease wanted.
    """

    handle: str
    reader: str
    incarnation: str
    """The holder's incarnation that the reader means; "" for any."""
    fingerprint: Fingerprint
    block_size_tokens: int
    num_tokens: int
    links: tuple[bytes, ...]
    tail: bytes
    duration_s: float


class Acquired(msgspec.Struct, frozen=True, tag="acquired"):
    """Lent. ``block_ids[i]`` holds absolute block index ``i`` of the verified prefix."""

    lease_id: str
    incarnation: str
    num_verified_tokens: int
    block_ids: tuple[int, ...]
    remaining_s: float


class Denied(msgspec.Struct, frozen=True, tag="denied"):
    """Not lent, and why."""

    reason: DenyReason
    detail: str = ""


class Renew(msgspec.Struct, frozen=True, tag="renew"):
    """Extend these leases by ``duration_s`` from now."""

    lease_ids: tuple[str, ...]
    duration_s: float


class Renewed(msgspec.Struct, frozen=True, tag="renewed"):
    """Remaining seconds per lease asked for, in order; a negative number says the lease is gone."""

    remaining_s: tuple[float, ...]


class Release(msgspec.Struct, frozen=True, tag="release"):
    """The reader is done with these leases, or the router with these handles.

    ``drop``: what the leases read from is not needed any more (a hand-off is read once).
    """

    lease_ids: tuple[str, ...] = ()
    handles: tuple[str, ...] = ()
    drop: bool = True


class Released(msgspec.Struct, frozen=True, tag="released"):
    """Done; ids that were unknown are ignored, since a release may arrive after an expiry."""


class Register(msgspec.Struct, frozen=True, tag="register"):
    """Write what ``handle`` names into my blocks, as it gets computed, once I say ``Proceed``.

    ``registration_id``: the reader's name for it, in every notification. ``links``/``tail``/``num_tokens``/
    ``block_size_tokens``: the chain of the whole prompt, which has to be equal. ``destination_block_ids[i]`` is for
    absolute block index ``first_index + i``, up to the prompt's last. ``workers``: the reader's, by rank.
    """

    registration_id: str
    handle: str
    reader: str
    incarnation: str
    fingerprint: Fingerprint
    block_size_tokens: int
    num_tokens: int
    links: tuple[bytes, ...]
    tail: bytes
    first_index: int
    destination_block_ids: tuple[int, ...]
    workers: tuple[WorkerCard, ...]
    duration_s: float


class Registered(msgspec.Struct, frozen=True, tag="registered"):
    """Noted under ``lease_id``, a name that is given out once. Nothing is written before the reader proceeds."""

    lease_id: str
    incarnation: str
    remaining_s: float


class Declined(msgspec.Struct, frozen=True, tag="declined"):
    """Nothing is written under this registration from now on, and why. Earlier writes may still be under way."""

    reason: DeclineReason
    detail: str = ""


class Proceed(msgspec.Struct, frozen=True, tag="proceed"):
    """The first one: you may write. Each one: I still want it, for ``duration_s`` from now."""

    lease_id: str
    incarnation: str
    duration_s: float


class Proceeding(msgspec.Struct, frozen=True, tag="proceeding"):
    """The registration stands for ``remaining_s``."""

    remaining_s: float
    stage: Stage


class Withdraw(msgspec.Struct, frozen=True, tag="withdraw"):
    """Stop writing. Asked again until the answer is yes. ``drop``: what the handle names is not needed any more."""

    lease_id: str
    incarnation: str
    drop: bool


class Withdrawn(msgspec.Struct, frozen=True, tag="withdrawn"):
    """``is_drained``: no write under this registration is under way, on any rank, or will ever be submitted."""

    is_drained: bool


class Status(msgspec.Struct, frozen=True, tag="status"):
    """How are you? Asked by the router."""


class StatusReport(msgspec.Struct, frozen=True, tag="status_report"):
    """Load and holdings of an engine, as of its last step."""

    engine_id: str
    incarnation: str
    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_held_blocks: int
    num_holdings: int
    num_leases: int
    num_loading: int = 0
    """Waiting requests that have their blocks already, and wait for KV to arrive in them."""
    num_slots: int = 0
    """Requests that the engine may run at a time; 0 when it does not say."""


class Busy(msgspec.Struct, frozen=True, tag="busy"):
    """One-way, worker to worker: I am reading your memory, poll your transport for ``duration_s``.

    NIXL without its progress thread moves bytes only while both ends poll.
    """

    sender: str
    duration_s: float


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The request could not be handled at all (bad version, undecodable, internal error)."""

    reason: str


Message = (
    Hello
    | HelloAck
    | Acquire
    | Acquired
    | Denied
    | Renew
    | Renewed
    | Release
    | Released
    | Register
    | Registered
    | Declined
    | Proceed
    | Proceeding
    | Withdraw
    | Withdrawn
    | Orders
    | OrdersTaken
    | Status
    | StatusReport
    | Busy
    | Refused
)
