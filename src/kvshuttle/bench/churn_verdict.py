"""Judges a run of overload and churn: which failures faults explain, what was left, and whether it passes. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from kvshuttle.bench.churn_faults import ROUTER
from kvshuttle.bench.churn_plan import MODES
from kvshuttle.bench.churn_records import (
    BUG_COUNTERS,
    DIED,
    NOT_OVER,
    AskRecord,
    Client,
    EndRecord,
    How,
    LookRecord,
    OutageRecord,
    RestRecord,
    RoutedRecord,
    WindowRecord,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvshuttle.bench.churn_plan import ChurnPlan
    from kvshuttle.bench.churn_records import Record

MOST_NEW_FDS = 28
"""Open files that a process may have more of at the end than when it was first seen healthy. An engine that has met all
its peers was seen with 17 more; files left open for each dead peer, or each request, soon come to more."""
MOST_NEW_THREADS = 8
"""The same for threads, of which one more was seen."""
FINE = (How.RIGHT, How.LEFT)
_CAPACITY = ":capacity"
_BEFORE_S = 1.0
"""A fault is dated a moment after it was begun."""

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class ChurnResults:
    """A run's directory as its report looks at it."""

    plan: ChurnPlan
    facts: Mapping[str, Any]
    records: Sequence[Record]

    def of(self, kind: type[R]) -> list[R]:
        """All records of one kind, as they were written."""
        return [record for record in self.records if isinstance(record, kind)]

    @property
    def outages(self) -> list[OutageRecord]:
        """Each once, as far as it went."""
        return list({outage.number: outage for outage in self.of(OutageRecord)}.values())

    @property
    def failed(self) -> list[AskRecord]:
        """Requests that got no answer, or not all of it."""
        return [ask for ask in self.of(AskRecord) if ask.how not in (*FINE, How.WRONG)]

    def lives(self) -> dict[tuple[str, int], list[LookRecord]]:
        """Looks at each life of each process, from when it was first healthy on."""
        lives: defaultdict[tuple[str, int], list[LookRecord]] = defaultdict(list)
        for look in self.of(LookRecord):
            if look.is_healthy or (look.name, look.life) in lives:
                lives[look.name, look.life].append(look)
        return dict(lives)


OVERLOAD = "overload: refused by the router's limit"
UNEXPLAINED = ""


@dataclass(slots=True)
class Causes:
    """Finds what explains a failure."""

    results: ChurnResults
    _routed: dict[str, RoutedRecord] = field(init=False)
    _outages: list[OutageRecord] = field(init=False)

    def __post_init__(self) -> None:
        self._routed = {each.request_id: each for each in self.results.of(RoutedRecord)}
        self._outages = self.results.outages

    def routed(self, ask: AskRecord) -> RoutedRecord | None:
        """What the router logged of it."""
        return self._routed.get(ask.request_id)

    def of(self, ask: AskRecord) -> str:
        """Why it failed: overload, where the router says so of each attempt; a fault that was near; or nothing.

        Where the router names the engines that failed it, the fault must have been theirs, or the router's own.
        """
        routed = self._routed.get(ask.request_id)
        attempts = [] if routed is None else [failure for failure in routed.failures if not failure.endswith(_CAPACITY)]
        if ask.how == How.ERROR and routed is not None and routed.failures and not attempts:
            return OVERLOAD
        near = self._near(ask, 0.0 if routed is None else routed.total_s)
        names = {outage.name for outage in near}
        if not near or not (ROUTER in names or all(attempt.split(":")[1] in names for attempt in attempts)):
            return UNEXPLAINED
        return f"a fault: {', '.join(sorted({outage.kind for outage in near}))}"

    def _near(self, ask: AskRecord, total_s: float) -> list[OutageRecord]:
        """Faults that overlap its life, or were over not long before. ``total_s``: its time by the router's log."""
        ended_s = ask.sent_s + total_s if ask.ended_s == NOT_OVER else ask.ended_s
        within_s = self.results.plan.explained_within_s
        return [
            outage
            for outage in self._outages
            if outage.began_s - _BEFORE_S <= ended_s
            and (outage.ended_s == NOT_OVER or ask.sent_s <= outage.ended_s + within_s)
        ]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a run passes. ``reasons``: why not."""

    reasons: tuple[str, ...]

    @property
    def is_pass(self) -> bool:
        """Nothing speaks against it."""
        return not self.reasons

    @property
    def text(self) -> str:
        """For people."""
        return "PASS" if self.is_pass else "\n".join(["FAIL", *(f"- {reason}" for reason in self.reasons)])


def judge(results: ChurnResults) -> Verdict:
    """All that must hold."""
    parts = (_about_answers, _about_deaths, _about_rest, _about_growth)
    return Verdict(tuple(reason for part in parts for reason in part(results)))


def _about_answers(results: ChurnResults) -> list[str]:
    asks, reasons = results.of(AskRecord), []
    wrong = [ask for ask in asks if ask.how == How.WRONG]
    if wrong:
        reasons.append(f"{len(wrong)} wrong answers, the first: {wrong[0].request_id}, {wrong[0].detail}")
    if not any(ask.how == How.RIGHT for ask in asks):
        reasons.append("not one request was answered")
    causes = Causes(results)
    unexplained = [ask for ask in results.failed if ask.client != Client.LAST and causes.of(ask) == UNEXPLAINED]
    if unexplained:
        first = unexplained[0]
        reasons.append(
            f"{len(unexplained)} requests failed and no fault was near, the first: {first.request_id},"
            f" {first.how}, {first.status or ''} {first.detail}".rstrip()
        )
    reasons += [
        f"window {window.name}: the load generator failed: {window.error.splitlines()[0]}"
        for window in results.of(WindowRecord)
        if window.error
    ]
    return reasons


def _about_deaths(results: ChurnResults) -> list[str]:
    reasons = [
        f"{outage.name} died by itself at {outage.began_s:.0f} s: {(outage.detail.splitlines() or [''])[0]}"
        for outage in results.outages
        if outage.kind == DIED
    ]
    bugs: defaultdict[str, float] = defaultdict(float)
    for (name, _), looks in results.lives().items():
        for counter in BUG_COUNTERS:
            bugs[f"{name} counts {counter}"] += max((look.gauges.get(counter, 0.0) for look in looks), default=0.0)
    for end in results.of(EndRecord):
        if end.num_wrong_kv_lines:
            reasons.append(f"engines found wrong KV {end.num_wrong_kv_lines} times")
        reasons += [f"in a log: {trouble}" for trouble in end.log_troubles]
    return reasons + [f"{text}: {count:g}" for text, count in bugs.items() if count]


def _about_rest(results: ChurnResults) -> list[str]:
    rests, reasons = results.of(RestRecord), []
    if not results.of(EndRecord):
        reasons.append("the run did not come to its end")
    for rest in rests:
        for name, left in rest.left.items():
            found = ", ".join(f"{key} {value:g}" for key, value in left.items())
            reasons.append(f"{name} still has {found} after {rest.took_s:.0f} s at rest")
    last = [ask for ask in results.of(AskRecord) if ask.client == Client.LAST]
    for mode in MODES if rests else ():
        asks = [ask for ask in last if ask.mode == mode]
        num_right = sum(ask.how == How.RIGHT for ask in asks)
        if not asks or num_right < len(asks):
            reasons.append(f"at the end, with mode {mode}, {num_right} of {len(asks)} requests were answered well")
    return reasons


def _about_growth(results: ChurnResults) -> list[str]:
    """Of processes that lived until the end, since only then all are at rest."""
    rests, reasons = results.of(RestRecord), []
    if not rests:
        return []
    for (name, _), looks in results.lives().items():
        first, last = looks[0], looks[-1]
        if last.at_s < rests[-1].began_s or first is last:
            continue
        for what, more, most in (
            ("open files", last.num_fds - first.num_fds, MOST_NEW_FDS),
            ("threads", last.num_threads - first.num_threads, MOST_NEW_THREADS),
        ):
            if more > most:
                minutes = (last.at_s - first.at_s) / 60
                reasons.append(f"{name} has {more} more {what} than {minutes:.1f} minutes before")
    return reasons


def slope_per_hour(points: Sequence[tuple[float, float]]) -> float | None:
    """Of a line through points (seconds, value), least squares; None for fewer than three, or all at one time."""
    if len(points) < 3:
        return None
    mean_x, mean_y = (sum(column) / len(points) for column in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return 3600 * sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else None
