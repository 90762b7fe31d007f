"""What engines and the router say to each other on the side channel.

Requests expect exactly one reply; ``Busy`` is the only one-way message. Instants never cross a process:
every time is a *remaining duration*. A reader counts a granted duration from the moment it
*sent* its request, the holder from the moment it granted, so the reader's view always ends first
and no clocks need to agree.

History of ``PROTOCOL_VERSION``: 1, first release.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

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


class Region(msgspec.Struct, frozen=True):
    """One registered span of KV memory: a layer (or K or V of it).

    Block ``b`` occupies ``[base_address + b * block_stride_bytes, + block_len_bytes)``.
    """

    base_address: int
    block_len_bytes: int
    block_stride_bytes: int
    num_blocks: int


class WorkerCard(msgspec.Struct, frozen=True):
    """How to reach one worker (one tensor-parallel rank) of an engine."""

    rank: int
    address: str
    """``host:port`` of the worker's own side channel."""
    agent_metadata: bytes
    """Opaque transport metadata (NIXL agent metadata)."""
    device: str
    """"DRAM" or "VRAM"."""
    device_id: int
    regions: tuple[Region, ...]


class Fingerprint(msgspec.Struct, frozen=True):
    """What must agree before one engine may use another's KV bytes."""

    model: str
    """A digest of the model's architecture-relevant configuration plus its served name."""
    kv_dtype: str
    block_size_tokens: int
    num_layers: int
    num_kv_heads: int
    head_size: int
    tensor_parallel_size: int
    kv_layout: str
    """Order of a page's content; includes the attention backend, and on CPU the instruction set."""
    region_len_bytes: tuple[int, ...]
    chain_scheme: str

    def differences(self, other: Fingerprint) -> list[str]:
        """Each differing field as ``name: ours != theirs``; empty when the two are compatible."""
        return [
            f"{name}: {getattr(self, name)!r} != {getattr(other, name)!r}"
            for name in self.__struct_fields__
            if getattr(self, name) != getattr(other, name)
        ]


class EngineCard(msgspec.Struct, frozen=True):
    """Who an engine is; the body of ``HelloAck``."""

    engine_id: str
    incarnation: str
    kv_role: str
    protocol_version: int
    vllm_version: str
    fingerprint: Fingerprint
    workers: tuple[WorkerCard, ...]


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
    | Status
    | StatusReport
    | Busy
    | Refused
)
