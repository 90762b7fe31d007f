"""Write ``docs/protocol.md`` from the tables in the code: ``python scripts/protocol_docs.py [--check]``.

Nothing in that file is written by hand, so it cannot disagree with what the engines do.
"""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from kvshuttle.handoff import fetch, fetch_protocol, fetch_states, ledger, messages, params, reader_lease

if TYPE_CHECKING:
    from enum import StrEnum

PATH = Path(__file__).parent.parent / "docs" / "protocol.md"

REPLIES: dict[type, str] = {
    messages.Hello: "HelloAck",
    messages.Acquire: "Acquired, Denied",
    messages.Renew: "Renewed",
    messages.Release: "Released",
    messages.Status: "StatusReport",
}
PARAMS_TYPES = (params.PrefillLeg, params.DecodeLeg, params.Peer, params.PrefillResult)
FACT_TYPES = get_args(fetch_protocol.Fact)
ACTION_TYPES = get_args(fetch_protocol.Action)

INTRO = """\
# The hand-off protocol

This file is written by `scripts/protocol_docs.py` from the tables in `src/kvshuttle/handoff/`; change those.

One primitive moves KV between engines, in either direction: the reader **acquires** a lease on what the holder keeps
under a handle, its workers **read** the leased blocks, and it **releases** the lease. For a hand-off the handle is the
transfer id that the router minted for this one dispatch. The holder's side is `LeaseLedger`, the reader's is `Fetch`;
both are pure: they are told facts and the time, and return actions.
"""

CLOCKS = """\
Instants never cross a process: a message carries a *remaining duration*. The holder counts it from when it granted; the
reader from when it sent its request, which is earlier, and only {share:.1%} of it, since clocks run at slightly
different rates. So the reader's lease ends first. No read starts within `submit_margin_s` of that end, and a read that
completes after it is discarded, however successful.
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
    share = 1 - reader_lease.MAX_CLOCK_RATE_SKEW
    sections = [
        INTRO,
        f"## Messages (version {messages.PROTOCOL_VERSION})\n",
        "msgpack of tagged structs over the side channel. `Refused` may answer any request.\n",
        _table(["Message", "Reply", "Meaning", "Fields"], [_message_row(each) for each in get_args(messages.Message)]),
        "### Why a holder denies\n",
        _enum_table(messages.DenyReason),
        "### What the router tells an engine\n",
        f"Under the key `{params.KEY}` of `kv_transfer_params`.\n",
        _table(["Object", "Meaning", "Fields"], [_params_row(each) for each in PARAMS_TYPES]),
        "## The reader's machine\n",
        "### States\n",
        _enum_table(fetch_states.State),
        "### Moves\n",
        "A repeated fact changes nothing. What is not in this table is a bug of the driver and is refused.\n",
        _table(["In state", "when", "goes to"], _transition_rows()),
        "### What moves it\n",
        _enum_table(fetch_states.Trigger),
        "```mermaid\n" + _diagram() + "```\n",
        "### Facts\n",
        _table(["Fact", "Meaning"], [[f"`{each.__name__}`", _summary(each)] for each in FACT_TYPES]),
        "### Actions\n",
        _table(["Action", "Meaning"], [[f"`{each.__name__}`", _summary(each)] for each in ACTION_TYPES]),
        "### Outcomes\n",
        "Each fetch reports exactly one; only `read_ok` means that the tokens are here.\n",
        _enum_table(fetch_protocol.Outcome),
        "## Timers\n",
        CLOCKS.format(share=share),
        _table(["Timer", "Side", "Length", "When it ends"], _timer_rows()),
        "## Invariants\n",
        "Of the holder:\n",
        _paragraph(ledger, "Fencing"),
        "Of the reader:\n",
        _numbered(fetch),
    ]
    return "\n".join(sections)


def _message_row(message: type) -> list[str]:
    reply = REPLIES.get(message, "")
    return [f"`{_tag(message)}`", reply, _summary(message), _fields(message)]


def _params_row(struct: type) -> list[str]:
    return [f"`{struct.__name__}`", _summary(struct), _fields(struct)]


def _tag(message: type) -> str:
    return str(message.__struct_config__.tag)  # type: ignore[attr-defined]


def _fields(struct: type) -> str:
    return ", ".join(f"`{each.name}`" for each in msgspec.structs.fields(struct))


def _transition_rows() -> list[list[str]]:
    rows: dict[tuple[str, str], list[str]] = {}
    for (state, trigger), target in fetch_states.TRANSITIONS.items():
        rows.setdefault((state.upper(), target.upper()), []).append(str(trigger))
    return [[state, ", ".join(triggers), target] for (state, target), triggers in rows.items()]


def _diagram() -> str:
    lines = ["stateDiagram-v2", "    [*] --> NEW"]
    lines += [
        f"    {state} --> {target}: {triggers}" for state, triggers, target in _transition_rows() if state != target
    ]
    return "\n".join([*lines, "    ENDED --> [*]"]) + "\n"


def _timer_rows() -> list[list[str]]:
    renewals = reader_lease.RENEWALS_PER_LEASE
    return [
        ["acquire", "reader", "`acquire_timeout_s`", "`acquire_timed_out`: the prompt is computed here"],
        [
            "renewal",
            "reader",
            f"1/{renewals} of the lease",
            f"a renew is sent; {renewals - 1} may be lost in a row",
        ],
        [
            "last submit",
            "reader",
            "lease less `submit_margin_s`",
            "before a read: `lease_lost`; no read starts from here on",
        ],
        ["read", "reader", "`read_timeout_s`, at most until the last submit", "the workers report the read as failed"],
        ["wait", "reader", "`total_wait_s`", "`waited_too_long`: the lease is given back"],
        ["lease", "reader", f"{1 - reader_lease.MAX_CLOCK_RATE_SKEW:.1%} of the granted duration", "`read_too_late`"],
        [
            "lease",
            "holder",
            f"what the reader wants, at most {ledger.MAX_LEASE_S:g} s",
            "the lease is gone; renewals get a negative number",
        ],
        ["holding", "holder", "as granted, and never before a lease on it", "the blocks are let go"],
    ]


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
    text = (module.__doc__ or "").partition("Invariants:\n\n")[2]
    return text.replace("``", "`")


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
