"""Small values that hand-off tests are made of."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

from kvshuttle.blocks import ContentIdentity, TokenChain, token_chain
from kvshuttle.handoff import Acquire, Fetch, FetchLimits, Fingerprint, LeaseLedger, Peer
from kvshuttle.ids import Handle, LeaseId

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BLOCK_SIZE_TOKENS = 4
HANDLE = Handle("xfer-1")
FINGERPRINT = Fingerprint(
    model="tiny",
    kv_dtype="bfloat16",
    block_size_tokens=BLOCK_SIZE_TOKENS,
    num_layers=2,
    num_kv_heads=1,
    head_size=8,
    tensor_parallel_size=1,
    kv_layout="HND",
    region_len_bytes=(64, 64),
    chain_scheme="test",
)
LIMITS = FetchLimits(acquire_timeout_s=2.0, lease_s=30.0, read_timeout_s=10.0, submit_margin_s=1.0, total_wait_s=300.0)


def chain_of(tokens: Sequence[int]) -> TokenChain:
    return token_chain(tokens, BLOCK_SIZE_TOKENS, ContentIdentity())


def block_contents(chain: TokenChain) -> tuple[bytes, ...]:
    """What a correct block of each absolute index contains: a name for everything up to its end."""
    return (*chain.links, chain.tail) if chain.tail else chain.links


def lease_mint(prefix: str) -> Callable[[], LeaseId]:
    numbers = count(1)
    return lambda: LeaseId(f"{prefix}-lease-{next(numbers)}")


def ledger(incarnation: str = "life-1", **options: float) -> LeaseLedger:
    return LeaseLedger(incarnation=incarnation, fingerprint=FINGERPRINT, mint=lease_mint(incarnation), **options)


def acquire(tokens: Sequence[int] | TokenChain, handle: str = HANDLE, **changes: object) -> Acquire:
    chain = tokens if isinstance(tokens, TokenChain) else chain_of(tokens)
    fields: dict[str, object] = {
        "handle": handle,
        "reader": "decode-1",
        "incarnation": "life-1",
        "fingerprint": FINGERPRINT,
        "block_size_tokens": chain.block_size_tokens,
        "num_tokens": chain.num_tokens,
        "links": chain.links,
        "tail": chain.tail,
        "duration_s": 30.0,
    }
    return Acquire(**{**fields, **changes})


def fetch(
    tokens: Sequence[int] = tuple(range(10)),
    *,
    handle: Handle = HANDLE,
    incarnation: str = "life-1",
    limits: FetchLimits = LIMITS,
    now_s: float = 0.0,
    is_read_once: bool = True,
) -> Fetch:
    return Fetch(
        handle=handle,
        source=Peer(address="127.0.0.1:1", engine_id="prefill-1", incarnation=incarnation),
        wanted=chain_of(tokens),
        fingerprint=FINGERPRINT,
        reader="decode-1",
        limits=limits,
        now_s=now_s,
        is_read_once=is_read_once,
    )
