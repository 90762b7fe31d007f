"""``kvshuttle demo``: a scripted two-turn chat through the router, and a table of what moved. Fails if nothing did."""

from __future__ import annotations

import signal
import textwrap
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvshuttle.launcher.chat import fetch_metrics, stream_chat
from kvshuttle.launcher.metrics import total_of, totals_by
from kvshuttle.launcher.plan import Role
from kvshuttle.launcher.prepare import claimed_port, prepare
from kvshuttle.launcher.up import announce_start, open_fleet

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvshuttle.config import LauncherConfig
    from kvshuttle.launcher.chat import Answer
    from kvshuttle.launcher.fleet import Fleet
    from kvshuttle.launcher.prepare import Surroundings

_MAX_ANSWER_TOKENS = 48
_METRICS_WAIT_S = 5.0
_ARRIVING = ("read", "push")
"""Directions in a decode engine's metrics: it has read, or it was written to."""
_WORDS = {"read": "read", "push": "pushed"}

_LIGHTHOUSE = """\
Read this first. The lighthouse on Grey Rock was built in 1871 after three ships were lost in one winter. It stands
forty-one metres tall and its lamp can be seen for nineteen sea miles. For a hundred years keepers lived there in turns
of six weeks, two at a time, with a cook who was also the one who wrote down the weather. They burned rapeseed oil at
first, then paraffin, and from 1926 on the lamp ran on electricity from a small engine in the cellar. The keepers grew
cabbage and leeks behind a wall that kept the salt wind off, and they kept four goats for milk. Supplies came by boat
every second Thursday when the sea allowed it, and in the winter of 1947 it did not allow it for fifty-three days. The
last keeper, Ann Halloran, switched the lamp over to automatic operation in 1984 and left with the goats. Today a
trust looks after the building. Visitors may climb the two hundred and eleven steps between May and September, and a
room on the fourth floor shows the keepers' weather books, which climate researchers still use. Now answer in one
sentence: why was the lighthouse built, and who was its last keeper?"""

_BRIDGE = """\
Good. Here is a second story. The bridge at Lower Weir was finished in 1903 by a company that had only ever built
cranes. Its engineer, Paul Okafor, asked for steel from two mills, so that a bad batch could never weaken both arches
at once, and he had every tenth rivet drawn and tested while the crew watched. People laughed at the cost. In the flood
of 1931 the river rose over six metres in a night and carried four bridges away, and the one at Lower Weir stayed up
with a barge and two barns pressed against it. Trains crossed it again nine days later, slowly, with a man walking in
front of each. During the repair the workers found that one arch had lost eleven rivets and the other none, and the
mill that had made the weaker steel had closed long before. A copper plate with Okafor's test book engraved on it was
fixed to the eastern pier in 1953. The town repaints the bridge every twelve years, always in the same green, and
schools walk over it once a year to count the rivets that were drawn. Now answer in one sentence: how did the engineer
of the bridge make it safe, and how is that different from the lighthouse?"""

TURNS = (" ".join(_LIGHTHOUSE.split()), " ".join(_BRIDGE.split()))
"""What the user says. Each brings more than two blocks of new tokens, so that each has KV to move."""


@dataclass(frozen=True, slots=True)
class Moved:
    """What the decode engines have got so far, by the engines' own metrics. ``ways``: tokens by direction."""

    num_bytes: float = 0.0
    transfer_s: float = 0.0
    ways: dict[str, float] = field(default_factory=dict)
    outcomes: dict[str, float] = field(default_factory=dict)

    @property
    def num_tokens(self) -> float:
        """Prompt tokens whose KV moved."""
        return sum(self.ways.values())

    def since(self, before: Moved) -> Moved:
        """The difference to an earlier look."""
        return Moved(
            self.num_bytes - before.num_bytes,
            self.transfer_s - before.transfer_s,
            _changes(self.ways, before.ways),
            _changes(self.outcomes, before.outcomes),
        )


@dataclass(frozen=True, slots=True)
class Turn:
    """One row of the table."""

    answer: Answer
    moved: Moved


def run_demo(config: LauncherConfig, around: Surroundings) -> int:
    """Start, chat, show, stop. 0 when KV moved in every turn, else 1. Raises ``KvshuttleError`` if something breaks."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    with claimed_port(config), open_fleet(plan := prepare(config, around), config, around) as fleet:
        announce_start(plan, around)
        fleet.start(timeout_s=config.startup_timeout_s)
        turns = _chat(fleet, around)
        around.report(table_of(turns))
    still = [str(number) for number, turn in enumerate(turns, start=1) if turn.moved.num_tokens <= 0]
    if not still:
        return 0
    reasons = "; ".join(f"turn {number}: {_outcome_of(turns[int(number) - 1])}" for number in still)
    around.report(f"No KV moved in turn {' and '.join(still)} ({reasons}). Logs: {around.log_dir}")
    return 1


def moved_in(decodes: Sequence[str], prefills: Sequence[str]) -> Moved:
    """Sum up what the engines' ``/metrics`` texts say. Whoever posts a transfer, by read or by write, has timed it."""
    outcomes: dict[str, float] = {}
    ways: dict[str, float] = {}
    for text in decodes:
        _add(outcomes, totals_by(text, "kvshuttle:transfers_total", "outcome"))
        _add(ways, totals_by(text, "kvshuttle:transfer_tokens_total", "direction"))
    return Moved(
        num_bytes=sum(_total(text, "bytes_total", direction) for text in decodes for direction in _ARRIVING),
        transfer_s=_timed(decodes, "read") + _timed(prefills, "write"),
        ways={way: num_tokens for way, num_tokens in ways.items() if way in _ARRIVING},
        outcomes=outcomes,
    )


def table_of(turns: Sequence[Turn]) -> str:
    """The figures of each turn, for a person."""
    rows = [("turn", "prompt tokens", "KV moved", "way", "bytes", "transfer", "TTFT", "tokens/s", "answer")]
    for number, turn in enumerate(turns, start=1):
        answer, moved = turn.answer, turn.moved
        rows.append(
            (
                str(number),
                str(answer.num_prompt_tokens),
                f"{moved.num_tokens:.0f} tokens",
                ", ".join(_WORDS[way] for way in moved.ways) or "-",
                f"{moved.num_bytes / 1e6:.1f} MB",
                f"{moved.transfer_s * 1e3:.1f} ms",
                f"{answer.ttft_s * 1e3:.0f} ms",
                f"{answer.tokens_per_s:.1f}",
                textwrap.shorten(answer.text, 60, placeholder=" …"),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        lines.append("  ".join([*cells, row[-1]]))
    lines.insert(1, "-" * (sum(widths) + 2 * (len(widths) - 1)))
    return "\n".join(["", *lines, ""])


def _chat(fleet: Fleet, around: Surroundings) -> list[Turn]:
    assert fleet.endpoint is not None
    messages: list[dict[str, str]] = []
    turns = []
    for number, text in enumerate(TURNS, start=1):
        around.report(f"turn {number}: asking")
        messages.append({"role": "user", "content": text})
        before = _look(fleet)
        answer = stream_chat(fleet.endpoint, fleet.plan.model_name, messages, max_tokens=_MAX_ANSWER_TOKENS)
        around.report(textwrap.fill(answer.text, 100, initial_indent="  ", subsequent_indent="  "))
        messages.append({"role": "assistant", "content": answer.text})
        turns.append(Turn(answer, _moved_since(before, fleet)))
    return turns


def _moved_since(before: Moved, fleet: Fleet) -> Moved:
    """What moved since ``before``. Engines publish after a step, so the figures may come a moment after the answer."""
    for url in _urls(fleet, Role.PREFILL):
        # It has written its last chunk after its last step, so it needs another one.
        stream_chat(url, fleet.plan.model_name, [{"role": "user", "content": "Hi"}], max_tokens=1)
    deadline_at_s = time.monotonic() + _METRICS_WAIT_S
    while True:
        moved = _look(fleet).since(before)
        if moved.num_tokens > 0 or time.monotonic() > deadline_at_s:
            return moved
        time.sleep(0.2)


def _look(fleet: Fleet) -> Moved:
    decodes, prefills = ([fetch_metrics(url) for url in _urls(fleet, role)] for role in (Role.DECODE, Role.PREFILL))
    return moved_in(decodes, prefills)


def _urls(fleet: Fleet, role: Role) -> list[str]:
    return [engine.url for engine in fleet.plan.engines if engine.role is role]


def _timed(metrics: Sequence[str], direction: str) -> float:
    stages = ("post_seconds_sum", "wire_seconds_sum")
    return sum(_total(text, stage, direction) for text in metrics for stage in stages)


def _total(text: str, name: str, direction: str) -> float:
    return total_of(text, f"kvshuttle:transfer_{name}", direction=direction)


def _add(totals: dict[str, float], more: dict[str, float]) -> None:
    for key, value in more.items():
        totals[key] = totals.get(key, 0.0) + value


def _changes(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    changes = {key: value - before.get(key, 0.0) for key, value in after.items()}
    return {key: value for key, value in changes.items() if value}


def _outcome_of(turn: Turn) -> str:
    """In words, what the decode engines did instead."""
    if not turn.moved.outcomes:
        return "the decode engines were asked for no transfer; see the router's log"
    return "transfers ended as " + ", ".join(f"{name} ({count:.0f})" for name, count in turn.moved.outcomes.items())
