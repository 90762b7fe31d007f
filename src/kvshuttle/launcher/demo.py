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
from kvshuttle.launcher.prepare import prepare
from kvshuttle.launcher.up import announce_start, open_fleet

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvshuttle.config import LauncherConfig
    from kvshuttle.launcher.chat import Answer
    from kvshuttle.launcher.fleet import Fleet
    from kvshuttle.launcher.prepare import Surroundings

_MAX_ANSWER_TOKENS = 48
_METRICS_WAIT_S = 5.0
_READ = "read"

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
    """What the decode engines have read so far, by their own metrics."""

    num_tokens: float = 0.0
    num_bytes: float = 0.0
    transfer_s: float = 0.0
    outcomes: dict[str, float] = field(default_factory=dict)

    def since(self, before: Moved) -> Moved:
        """The difference to an earlier look."""
        outcomes = {key: value - before.outcomes.get(key, 0.0) for key, value in self.outcomes.items()}
        return Moved(
            self.num_tokens - before.num_tokens,
            self.num_bytes - before.num_bytes,
            self.transfer_s - before.transfer_s,
            {key: value for key, value in outcomes.items() if value},
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
    plan = prepare(config, around)
    with open_fleet(plan, config, around) as fleet:
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


def moved_in(metrics: Sequence[str]) -> Moved:
    """Sum up what the ``/metrics`` texts of the decode engines say of reads."""

    def total(name: str) -> float:
        return sum(total_of(text, f"kvshuttle:{name}", direction=_READ) for text in metrics)

    outcomes: dict[str, float] = {}
    for text in metrics:
        for outcome, count in totals_by(text, "kvshuttle:transfers_total", "outcome", direction=_READ).items():
            outcomes[outcome] = outcomes.get(outcome, 0.0) + count
    return Moved(
        num_tokens=total("transfer_tokens_total"),
        num_bytes=total("transfer_bytes_total"),
        transfer_s=total("transfer_post_seconds_sum") + total("transfer_wire_seconds_sum"),
        outcomes=outcomes,
    )


def table_of(turns: Sequence[Turn]) -> str:
    """The figures of each turn, for a person."""
    rows = [("turn", "prompt tokens", "KV moved", "bytes", "transfer", "TTFT", "tokens/s", "answer")]
    for number, turn in enumerate(turns, start=1):
        answer, moved = turn.answer, turn.moved
        rows.append(
            (
                str(number),
                str(answer.num_prompt_tokens),
                f"{moved.num_tokens:.0f} tokens",
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
    decode_urls = [engine.url for engine in fleet.plan.engines if engine.role is Role.DECODE]
    messages: list[dict[str, str]] = []
    turns = []
    for number, text in enumerate(TURNS, start=1):
        around.report(f"turn {number}: asking")
        messages.append({"role": "user", "content": text})
        before = _look(decode_urls)
        answer = stream_chat(fleet.endpoint, fleet.plan.model_name, messages, max_tokens=_MAX_ANSWER_TOKENS)
        around.report(textwrap.fill(answer.text, 100, initial_indent="  ", subsequent_indent="  "))
        messages.append({"role": "assistant", "content": answer.text})
        turns.append(Turn(answer, _moved_since(before, decode_urls)))
    return turns


def _moved_since(before: Moved, urls: Sequence[str]) -> Moved:
    """What moved since ``before``. Engines publish after a step, so the figures may come a moment after the answer."""
    deadline_at_s = time.monotonic() + _METRICS_WAIT_S
    while True:
        moved = _look(urls).since(before)
        if moved.num_tokens > 0 or time.monotonic() > deadline_at_s:
            return moved
        time.sleep(0.2)


def _look(urls: Sequence[str]) -> Moved:
    return moved_in([fetch_metrics(url) for url in urls])


def _outcome_of(turn: Turn) -> str:
    """In words, what the decode engines did instead of reading."""
    if not turn.moved.outcomes:
        return "the decode engines were asked for no transfer; see the router's log"
    return "transfers ended as " + ", ".join(f"{name} ({count:.0f})" for name, count in turn.moved.outcomes.items())
