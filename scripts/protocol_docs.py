"""Write ``docs/protocol.md`` from the tables in the code: ``python scripts/protocol_docs.py [--check]``.

Nothing in that file is written by hand, so it cannot disagree with what the engines do.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import msgspec

sys.path.insert(0, str(Path(__file__).parent))

import protocol_diagrams
import protocol_timers

from kvshuttle import handoff as h
from kvshuttle.handoff import (
    break_even,
    cards,
    claim,
    fetch,
    fetch_protocol,
    holdings,
    inbox,
    intake,
    intake_protocol,
    ledger,
    messages,
    notifications,
    orders,
    outbox,
    params,
    push_source,
    reader_lease,
    retention,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from enum import StrEnum

PATH = Path(__file__).parent.parent / "docs" / "protocol.md"

REPLIES: dict[type, str] = {
    messages.Hello: "HelloAck",
    messages.Acquire: "Acquired, Denied",
    messages.Renew: "Renewed",
    messages.Release: "Released",
    messages.Register: "Registered, Declined",
    messages.Proceed: "Proceeding, Declined",
    messages.Withdraw: "Withdrawn, Declined",
    messages.Orders: "OrdersTaken",
    messages.Status: "StatusReport",
}
PARAMS_TYPES = (
    params.PrefillLeg,
    params.DecodeLeg,
    params.LocalLeg,
    params.Peer,
    params.Keep,
    params.History,
    params.PrefillResult,
)
FACT_TYPES = get_args(fetch_protocol.Fact)
ACTION_TYPES = get_args(fetch_protocol.Action)
INTAKE_FACT_TYPES = [each for each in get_args(intake_protocol.IntakeFact) if each not in FACT_TYPES]
INTAKE_ACTION_TYPES = [each for each in get_args(intake_protocol.IntakeAction) if each not in ACTION_TYPES]

INTRO = """\
# The hand-off protocol

This file is written by `scripts/protocol_docs.py` from the tables in `src/kvshuttle/handoff/`; change those.

KV moves between two engines in one of two ways. In **pull** the reader acquires a lease on what the holder keeps under
a handle, its workers read the leased blocks, and it releases the lease. In **push** the reader registers blocks of its
own before the holder has computed anything, and the holder's workers write each chunk while the next one is computed.
The handle is the transfer id that the router minted for this one dispatch. For the next turn of a conversation KV is
**sent back**: the engine that answered keeps it under a handle, and the next prefill engine pulls it. All machines are
pure: they are told facts and the time, and return actions.

| | the holder | the reader |
| --- | --- | --- |
| pull | `LeaseLedger` | `Fetch` |
| push, scheduler half | `PushSource` with a `Registration` for each reader | `Intake` with a `Claim`, and a `Fetch` |
| push, each worker | `PushWriter` with an `Outbox` for each registration | `Inboxes` with an `Inbox` for each |
| sent back | `Retention` over the `LeaseLedger` | `Fetch` |
"""

FENCES = """\
Three things keep a late write out of memory that is used for something else, and none of them is a clock:

- Nothing is written before the reader has said `Proceed` with the lease id that the holder made for this registration.
- The reader does not part with its blocks before `Withdrawn` says that nothing is under way, or every worker has its
  commit, or the holder's life is known to be over. If it cannot wait for that, the blocks are quarantined meanwhile.
- The holder does not part with blocks that a write reads. Where vLLM takes them away (preemption), the source's epoch
  ends: what was written in it never counts, and its writes have ended before the next epoch's begin.
"""

SENT_BACK = """\
The router names a handle in the decode leg's `keep`. When that request is over, the engine's scheduler half pins its
full blocks of prompt and answer under it, with their token chain. The next turn's prefill leg names the handle in its
`history`: that engine acquires what matches its own prompt, reads it, and computes the rest. The release of that lease
does not drop anything, so a handle can be read again, and by several readers at once.

The keeping has a time of its own. A reader that comes at its end and dies pins the blocks for little longer; one that
lives renews its lease while it waits to be admitted (`total_wait_s` at most) and while it reads (`read_timeout_s` at
most).
"""

CLOCKS = """\
Instants never cross a process: a message carries a *remaining duration*. The holder counts it from when it granted; the
reader from when it sent its request, which is earlier, and only {share:.1%} of it, since clocks run at slightly
different rates. So the reader's lease ends first. No read is submitted within `submit_margin_s` of that end, and a read
that completes after it is discarded, however successful.
"""


def main() -> int:
    text = document()
    if "--check" in sys.argv[1:]:
        is_current = PATH.exists() and PATH.read_text() == text
        print(f"{PATH.name} is {'up to date' if is_current else 'stale: run scripts/protocol_docs.py'}")
        return 0 if is_current else 1
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(text)
    return 0


def document() -> str:
    return "\n".join([INTRO, *_messages(), *_pull(), *_push(), *_sent_back(), *_timers(), *_invariants()])


def _messages() -> list[str]:
    return [
        f"## Messages (version {messages.PROTOCOL_VERSION})\n",
        "msgpack of tagged structs over the side channel. `Refused` may answer any request.\n",
        _table(["Message", "Reply", "Meaning", "Fields"], [_message_row(each) for each in get_args(messages.Message)]),
        "### Orders\n",
        "In `orders`, between the scheduler half and the workers of one engine.\n",
        _table(["Order", "Meaning", "Fields"], [_struct_row(each) for each in (orders.Open, orders.Close)]),
        "### Notifications\n",
        "Between workers, through the transport itself.\n",
        _table(
            ["Notification", "Meaning", "Fields"], [_struct_row(each) for each in get_args(notifications.Notification)]
        ),
        "### Why a holder denies a lease\n",
        _enum_table(messages.DenyReason),
        "### Why a holder declines to write\n",
        _enum_table(messages.DeclineReason),
        "### How far a holder is with a registration\n",
        _enum_table(messages.Stage),
        "### What an engine may say that it can\n",
        "In `features` of its card, whose absence means none. The version says who can talk to whom at all.\n",
        _enum_table(cards.Feature),
        "### What the router tells an engine\n",
        f"Under the key `{params.KEY}` of `kv_transfer_params`.\n",
        _table(["Object", "Meaning", "Fields"], [_params_row(each) for each in PARAMS_TYPES]),
        "### Modes\n",
        _enum_table(params.Mode),
    ]


def _pull() -> list[str]:
    return [
        "## Pull\n",
        _mermaid(protocol_diagrams.diagram(protocol_diagrams.PULL)),
        *_machine("The reader's fetch", h.State, h.Trigger, h.TRANSITIONS),
        "### Facts\n",
        _table(["Fact", "Meaning"], [[f"`{each.__name__}`", _summary(each)] for each in FACT_TYPES]),
        "### Actions\n",
        _table(["Action", "Meaning"], [[f"`{each.__name__}`", _summary(each)] for each in ACTION_TYPES]),
        "### Outcomes\n",
        "Each fetch reports exactly one; only `read_ok` means that the tokens are here.\n",
        _enum_table(fetch_protocol.Outcome),
    ]


def _push() -> list[str]:
    return [
        "## Push\n",
        _mermaid(protocol_diagrams.diagram(protocol_diagrams.PUSH)),
        FENCES,
        *_machine("The reader's intake", h.IntakeState, h.IntakeTrigger, h.INTAKE_TRANSITIONS),
        *_machine("Its claim", h.ClaimState, h.ClaimTrigger, h.CLAIM_TRANSITIONS),
        "### Facts beside a fetch's\n",
        _table(["Fact", "Meaning"], [[f"`{each.__name__}`", _summary(each)] for each in INTAKE_FACT_TYPES]),
        "### Actions beside a fetch's\n",
        _table(["Action", "Meaning"], [[f"`{each.__name__}`", _summary(each)] for each in INTAKE_ACTION_TYPES]),
        "### Outcomes of a push\n",
        "Where a fetch has taken over, its outcome counts instead.\n",
        _enum_table(intake_protocol.PushOutcome),
        *_machine("The inbox of a reader's worker", h.InboxState, h.InboxTrigger, h.INBOX_TRANSITIONS),
        *_machine("The holder's registration", h.RegistrationState, h.RegistrationTrigger, h.REGISTRATION_TRANSITIONS),
        *_machine("The outbox of a holder's worker", h.OutboxState, h.OutboxTrigger, h.OUTBOX_TRANSITIONS),
    ]


def _sent_back() -> list[str]:
    return [
        "## Sent back\n",
        SENT_BACK,
        "### What becomes of a wish to keep\n",
        _enum_table(retention.KeepOutcome),
        "### How the keeping ends\n",
        _enum_table(holdings.EndReason),
        "### From how many tokens on a read pays\n",
        f"With `kv_recompute_threshold: auto`; {break_even.DEFAULT_THRESHOLD_TOKENS} until both costs are measured.\n",
        _block(break_even.break_even_tokens),
    ]


def _machine(
    title: str, states: type[StrEnum], triggers: type[StrEnum], transitions: dict[tuple[Any, Any], Any]
) -> list[str]:
    """A machine's states, triggers, table and picture."""
    rows = _transition_rows(transitions)
    first = next(iter(states))
    ends = [state for state in states if all(target is state for (s, _), target in transitions.items() if s is state)]
    lines = ["stateDiagram-v2", f"    [*] --> {first.upper()}"]
    lines += [f"    {state} --> {target}: {when}" for state, when, target in rows if state != target]
    lines += [f"    {state.upper()} --> [*]" for state in ends]
    return [
        f"### {title}\n",
        _enum_table(states),
        _table(["In state", "when", "goes to"], rows),
        _enum_table(triggers),
        "A repeated fact changes nothing. What is not in the table is a bug of the driver and is refused.\n",
        _mermaid("\n".join(lines) + "\n"),
    ]


def _timers() -> list[str]:
    share = 1 - reader_lease.MAX_CLOCK_RATE_SKEW
    return [
        "## Timers\n",
        CLOCKS.format(share=share),
        _table(["Timer", "Side", "Length", "When it ends"], protocol_timers.rows()),
    ]


def _invariants() -> list[str]:
    return [
        "## Invariants\n",
        "Of the ledger:\n",
        _paragraph(ledger, "Fencing"),
        "Of what is kept for later turns:\n",
        _numbered(retention),
        "Of a fetch:\n",
        _numbered(fetch),
        "Of the holder's scheduler half in a push:\n",
        _numbered(push_source),
        "Of an outbox:\n",
        _numbered(outbox),
        "Of an inbox:\n",
        _numbered(inbox),
        "Of a claim:\n",
        _numbered(claim),
        "Of an intake:\n",
        _numbered(intake),
    ]


def _message_row(message: type) -> list[str]:
    reply = REPLIES.get(message, "")
    return [f"`{_tag(message)}`", reply, _summary(message), _fields(message)]


def _struct_row(message: type) -> list[str]:
    return [f"`{_tag(message)}`", _summary(message), _fields(message)]


def _params_row(struct: type) -> list[str]:
    return [f"`{struct.__name__}`", _summary(struct), _fields(struct)]


def _tag(message: type) -> str:
    return str(message.__struct_config__.tag)  # type: ignore[attr-defined]


def _fields(struct: type) -> str:
    return ", ".join(f"`{each.name}`" for each in msgspec.structs.fields(struct))


def _transition_rows(transitions: dict[tuple[Any, Any], Any]) -> list[list[str]]:
    rows: dict[tuple[str, str], list[str]] = {}
    for (state, trigger), target in transitions.items():
        rows.setdefault((state.upper(), target.upper()), []).append(str(trigger))
    return [[state, ", ".join(triggers), target] for (state, target), triggers in rows.items()]


def _block(function: Callable[..., Any]) -> str:
    """The indented block of a docstring, as it stands."""
    text = inspect.getdoc(function) or ""
    body = text.split("::\n", 1)[1].strip("\n").split("\n\n")
    shown = [part for part in body if part.startswith("    ")]
    return "```text\n" + textwrap.dedent("\n\n".join(shown)) + "\n```\n"


def _mermaid(source: str) -> str:
    return f"```mermaid\n{source}```\n"


def _enum_table(enum: type[StrEnum]) -> str:
    notes = _member_notes(enum)
    return _table(["Name", "Meaning"], [[f"`{each.value}`", notes.get(each.name, "")] for each in enum])


def _member_notes(enum: type[StrEnum]) -> dict[str, str]:
    """The string below each member, which Python itself does not keep."""
    (body,) = ast.parse(inspect.getsource(enum)).body
    assert isinstance(body, ast.ClassDef)
    notes = {}
    for statement, following in zip(body.body, body.body[1:], strict=False):
        if isinstance(statement, ast.Assign) and isinstance(following, ast.Expr):
            (target,) = statement.targets
            notes[ast.unparse(target)] = _flat(ast.literal_eval(following.value))
    return notes


def _summary(subject: Any) -> str:
    return _flat(inspect.getdoc(subject) or "")


def _flat(text: str) -> str:
    return " ".join(text.replace("``", "`").replace("|", "\\|").split())


def _paragraph(module: Any, first_word: str) -> str:
    (found,) = [each for each in (module.__doc__ or "").split("\n\n") if each.lstrip().startswith(first_word)]
    return _flat(found) + "\n"


def _numbered(module: Any) -> str:
    text = (module.__doc__ or "").partition("Invariants:\n\n")[2].partition("\n\n")[0] + "\n"
    return text.replace("``", "`")


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
