"""The two ways of a hand-off as sequence diagrams, checked against the tables as they are drawn.

Each step names a message, notification, fact or action by its class, and the moves that it causes by state and trigger.
A move that its machine's table does not have, or that does not begin where that machine's last one ended, is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvshuttle import handoff as h

if TYPE_CHECKING:
    from collections.abc import Sequence
    from enum import StrEnum

PARTICIPANTS = {
    "R": "router",
    "DS": "D scheduler half",
    "DW": "D workers",
    "PS": "P scheduler half",
    "PW": "P workers",
}
TABLES: dict[str, dict[Any, Any]] = {
    "Fetch": h.TRANSITIONS,
    "Intake": h.INTAKE_TRANSITIONS,
    "Claim": h.CLAIM_TRANSITIONS,
    "Inbox": h.INBOX_TRANSITIONS,
    "Registration": h.REGISTRATION_TRANSITIONS,
    "Outbox": h.OUTBOX_TRANSITIONS,
}


@dataclass(frozen=True)
class Move:
    """A machine takes a row of its table."""

    machine: str
    state: StrEnum
    trigger: StrEnum

    @property
    def target(self) -> StrEnum:
        target: StrEnum = TABLES[self.machine][self.state, self.trigger]
        return target


@dataclass(frozen=True)
class Step:
    """``what``: a class, or words where nothing of the protocol passes. ``moves``: what the receiver's side does."""

    sender: str
    receiver: str
    what: type | str
    words: str = ""
    moves: tuple[Move, ...] = ()


@dataclass(frozen=True)
class Loop:
    """Steps that are repeated."""

    words: str
    steps: tuple[Step, ...]


F, C, I, N, O, G = h.State, h.ClaimState, h.IntakeState, h.InboxState, h.OutboxState, h.RegistrationState  # noqa: E741

PULL: tuple[Step | Loop, ...] = (
    Step("R", "PS", h.PrefillLeg, "mode pull"),
    Step("PS", "R", h.PrefillResult, "computed, and held under the transfer id"),
    Step("R", "DS", h.DecodeLeg, "mode pull"),
    Step("DS", "PS", h.Acquire, moves=(Move("Fetch", F.NEW, h.Trigger.START),)),
    Step("PS", "DS", h.Acquired, moves=(Move("Fetch", F.ACQUIRING, h.Trigger.GRANTED),)),
    Step("DS", "DW", h.StartRead, "blocks reserved", moves=(Move("Fetch", F.LEASED, h.Trigger.LOAD_ADMITTED),)),
    Step("DW", "PW", "NIXL READ"),
    Step("DW", "DS", h.ReadEnded, moves=(Move("Fetch", F.READING, h.Trigger.READ_ENDED),)),
    Step("DS", "PS", h.Release),
)

PUSH: tuple[Step | Loop, ...] = (
    Step("R", "PS", h.PrefillLeg, "mode push"),
    Step("R", "DS", h.DecodeLeg, "mode push, at the same time"),
    Step(
        "DS",
        "DW",
        h.ExpectPush,
        "blocks reserved",
        moves=(
            Move("Intake", I.NEW, h.IntakeTrigger.LOAD_ADMITTED),
            Move("Inbox", N.EARLY, h.InboxTrigger.EXPECTED),
        ),
    ),
    Step("DS", "PS", h.Register),
    Step("PS", "DS", h.Registered, moves=(Move("Claim", C.REGISTERING, h.ClaimTrigger.GRANTED),)),
    Step("DS", "PS", h.Proceed, moves=(Move("Registration", G.REGISTERED, h.RegistrationTrigger.OPENED),)),
    Step("PS", "PW", h.Open),
    Loop(
        "each chunk of the prompt",
        (
            Step("PS", "PW", h.Progress, "with the step that computes it"),
            Step(
                "PW",
                "DW",
                h.Written,
                "NIXL WRITE with",
                moves=(
                    Move("Outbox", O.WRITING, h.OutboxTrigger.SUBMITTED),
                    Move("Outbox", O.WRITING, h.OutboxTrigger.WRITE_ENDED),
                    Move("Inbox", N.EXPECTING, h.InboxTrigger.NOTED),
                ),
            ),
        ),
    ),
    Step("PS", "R", h.PrefillResult, "held, pinned for the writers"),
    Step(
        "PW",
        "DW",
        h.Commit,
        moves=(
            Move("Outbox", O.WRITING, h.OutboxTrigger.ALL_WRITTEN),
            Move("Inbox", N.EXPECTING, h.InboxTrigger.COMPLETED),
        ),
    ),
    Step(
        "DW",
        "DS",
        h.ReadEnded,
        moves=(
            Move("Intake", I.RECEIVING, h.IntakeTrigger.RECEIVED),
            Move("Claim", C.STANDING, h.ClaimTrigger.FINISHED),
        ),
    ),
    Step("DS", "PS", h.Withdraw, moves=(Move("Registration", G.OPEN, h.RegistrationTrigger.WITHDRAWN),)),
    Step(
        "PS",
        "PW",
        h.Close,
        moves=(
            Move("Outbox", O.COMMITTED, h.OutboxTrigger.CLOSED),
            Move("Outbox", O.CLOSED, h.OutboxTrigger.DRAINED),
        ),
    ),
    Step("PW", "PS", h.OrdersTaken, moves=(Move("Registration", G.CLOSING, h.RegistrationTrigger.DRAINED),)),
)


def diagram(steps: Sequence[Step | Loop]) -> str:
    """Mermaid source. Raises ``ValueError`` for a move that contradicts the tables."""
    stands: dict[str, StrEnum] = {}
    lines = ["sequenceDiagram"]
    used = [each for step in steps for part in _flat(step) for each in (part.sender, part.receiver)]
    lines += [f"    participant {key} as {name}" for key, name in PARTICIPANTS.items() if key in used]
    for step in steps:
        if isinstance(step, Loop):
            lines.append(f"    loop {step.words}")
        for part in _flat(step):
            lines += _lines(part, stands)
        if isinstance(step, Loop):
            lines.append("    end")
    return "\n".join(lines) + "\n"


def _flat(step: Step | Loop) -> tuple[Step, ...]:
    return step.steps if isinstance(step, Loop) else (step,)


def _lines(step: Step, stands: dict[str, StrEnum]) -> list[str]:
    name = step.what if isinstance(step.what, str) else step.what.__name__
    words = f"{step.words} {name}" if step.words.endswith("with") else f"{name}: {step.words}" if step.words else name
    lines = [f"    {step.sender}->>{step.receiver}: {words}"]
    for move in step.moves:
        _check(move, stands)
        if move.target is not move.state:
            where = step.sender if move.machine == "Outbox" and step.sender == "PW" else step.receiver
            where = "DS" if move.machine in ("Fetch", "Intake", "Claim") else where
            lines.append(f"    Note over {where}: {move.machine} {move.state.upper()} → {move.target.upper()}")
    return lines


def _check(move: Move, stands: dict[str, StrEnum]) -> None:
    if (move.state, move.trigger) not in TABLES[move.machine]:
        raise ValueError(f"{move.machine} has no row for {move.state.upper()}, {move.trigger}")
    stood = stands.get(move.machine, move.state)
    if stood is not move.state:
        raise ValueError(f"{move.machine} stands at {stood.upper()}, not at {move.state.upper()}")
    stands[move.machine] = move.target
