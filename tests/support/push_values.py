"""Small values that push tests are made of."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

import msgspec

from kvshuttle.handoff import (
    Claim,
    Close,
    EngineCard,
    Intake,
    LeaseLedger,
    LoadAdmitted,
    Open,
    Outbox,
    Peer,
    Proceed,
    PushLimits,
    PushSource,
    Register,
    Registered,
    Release,
    SourceBlocks,
    Withdraw,
    WorkerCard,
    registration,
)
from kvshuttle.ids import LeaseId
from support.handoff_values import FINGERPRINT, HANDLE, LIMITS, chain_of, ledger

if TYPE_CHECKING:
    from collections.abc import Callable

TOKENS = tuple(range(10))
"""Two full blocks and a partial one."""
CHAIN = chain_of(TOKENS)
DESTINATIONS = (21, 22, 23)
BLOCKS = (5, 6, 9)
LOAD = LoadAdmitted(0, 10, DESTINATIONS)
PUSH_LIMITS = PushLimits(fetch=LIMITS, push_timeout_s=8.0, confirm_timeout_s=2.0)
HOLDER = Peer(address="127.0.0.1:1", engine_id="prefill-1", incarnation="life-1")
GRANT = Registered("lease-1", "life-1", 30.0)


def card(name: str = "decode-1", incarnation: str = "reader-1", num_ranks: int = 1) -> EngineCard:
    workers = tuple(WorkerCard(rank, f"{incarnation}/{rank}", b"agent", "DRAM", 0, ()) for rank in range(num_ranks))
    return EngineCard(name, incarnation, "kv_both", 1, "0.32.0", FINGERPRINT, workers)


def register(num_ranks: int = 1, **changes: object) -> Register:
    message = registration(
        "reg-1",
        load=LOAD,
        handle=HANDLE,
        holder=HOLDER,
        reader=card(num_ranks=num_ranks),
        wanted=CHAIN,
        duration_s=30.0,
    )
    return msgspec.structs.replace(message, **changes)


def proceed(lease_id: str = "lease-1", **changes: object) -> Proceed:
    return msgspec.structs.replace(Proceed(lease_id, "life-1", 30.0), **changes)


def withdraw(lease_id: str = "lease-1", **changes: object) -> Withdraw:
    return msgspec.structs.replace(Withdraw(lease_id, "life-1", drop=False), **changes)


def push_source(num_ranks: int = 1, **options: int) -> tuple[PushSource, LeaseLedger]:
    made = ledger(**{name: value for name, value in options.items() if name == "max_holdings"})
    rest = {name: value for name, value in options.items() if name != "max_holdings"}
    own = card("prefill-1", "life-1", num_ranks)
    return PushSource(made, card=own, mint=_short_mint(), **rest), made


def _short_mint() -> Callable[[], LeaseId]:
    numbers = itertools.count(1)
    return lambda: LeaseId(f"lease-{next(numbers)}")


def open_order(
    lease_id: str = "lease-1", *, source_id: str = "req-1", first_index: int = 0, address: str = "d/0"
) -> Open:
    worker = WorkerCard(0, address, b"agent", "DRAM", 0, ())
    return Open(lease_id, f"reg-of-{lease_id}", source_id, first_index, DESTINATIONS[first_index:], worker)


def outbox(**source: object) -> Outbox:
    return Outbox(open_order(), dataclasses.replace(SourceBlocks("req-1"), **source))


def close_order(reason: str = "", lease_id: str = "lease-1") -> Close:
    return Close(lease_id, reason)


def claim(**limits: float) -> Claim:
    return Claim(register(), dataclasses.replace(PUSH_LIMITS, **limits), now_s=0.0)


def intake(**limits: object) -> Intake:
    return Intake(
        handle=HANDLE,
        source=HOLDER,
        wanted=CHAIN,
        reader=card(),
        registration_id="reg-1",
        limits=dataclasses.replace(PUSH_LIMITS, **limits),
    )


RELEASE_HANDLE = Release(handles=(HANDLE,))
