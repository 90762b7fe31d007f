"""Judges a run of overload and churn: which failures faults explain, what was left, and whether it passes. Pure."""

from __future__ import annotations

import math
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
from kvshuttle.bench.plan import BLOCK_SIZE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from kvshuttle.bench.churn_plan import ChurnPlan
    from kvshuttle.bench.churn_records import Record

MOST_NEW_FDS = 28
"""Open files that a process may have more of at the end than when it had fewest. An engine that has met all its peers
was seen with 17 more; files left open for each dead peer, or each request, soon come to more."""
MOST_NEW_THREADS = 8
"""The same for threads, of which one more was seen."""
FINE = (How.RIGHT, How.LEFT)
_CAPACITY = ":capacity"
_BEFORE_S = 1.0
"""A fault is dated a moment after it was begun."""
_OVERLOAD_PART = 0.99
"""Windows with so much of the highest rate are those with more load than engines can carry."""

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
        """Looks at each life of each process, from when it was first healthy on.

        What was killed has threads until its parent has asked for them, but no memory any more.
        """
        lives: defaultdict[tuple[str, int], list[LookRecord]] = defaultdict(list)
        for look in self.of(LookRecord):
            if not look.rss_mib:
                continue
            if look.is_healthy or (look.name, look.life) in lives:
                lives[look.name, look.life].append(look)
        return dict(lives)


OVERLOAD = "overload: refused by the router's limit"
UNEXPLAINED = ""
_FAILED_BY_ENGINES = ("unavailable", "broken_stream")
"""What the router says of a request that its engines failed. Anything else that failed is the router's own doing, or
never came to its log: that only an end of the router itself can explain."""
HANDED_OFF = {"push": "push received", "pull": "read read_ok"}
"""What decode engines count where a hand-off of a mode went well."""


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

        Where the router says that engines failed it, the fault must have been theirs, or the router's own; where it
        does not, the router's own. Nothing explains a client that waited in silence until its patience ended.
        """
        if ask.how == How.SILENT:
            return UNEXPLAINED
        routed = self._routed.get(ask.request_id)
        attempts = [] if routed is None else [failure for failure in routed.failures if not failure.endswith(_CAPACITY)]
        ended_s = self._ended_s(ask)
        near = self._near(ask.sent_s, ended_s)
        if ask.how == How.ERROR and routed is not None and routed.failures and not attempts:
            return OVERLOAD if near or self._is_overloaded(ask.sent_s, ended_s) else UNEXPLAINED
        names = {outage.name for outage in near}
        is_engines = routed is not None and routed.outcome in _FAILED_BY_ENGINES
        is_theirs = is_engines and all(attempt.split(":")[1] in names for attempt in attempts)
        if not near or not (ROUTER in names or is_theirs):
            return UNEXPLAINED
        return f"a fault: {', '.join(sorted({outage.kind for outage in near}))}"

    def _ended_s(self, ask: AskRecord) -> float:
        """Its client's word, or the router's where the client does not say."""
        routed = self._routed.get(ask.request_id)
        if ask.ended_s != NOT_OVER:
            return ask.ended_s
        return ask.sent_s + (0.0 if routed is None else routed.total_s)

    def _near(self, sent_s: float, ended_s: float) -> list[OutageRecord]:
        """Faults that overlap a request's life, or were over not long before."""
        spans = [(outage, *_explaining(outage, self.results.plan)) for outage in self._outages]
        return [outage for outage, start_s, end_s in spans if start_s <= ended_s and sent_s <= end_s]

    def _is_overloaded(self, sent_s: float, ended_s: float) -> bool:
        """Whether the load generator sent, or waited for, more than engines can answer at any time of a life."""
        windows = self.results.of(WindowRecord)
        most = max((window.rate for window in windows), default=0.0)
        return any(
            window.rate > most * _OVERLOAD_PART and window.began_s <= ended_s and sent_s <= window.ended_s
            for window in windows
        )


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
            f"{len(unexplained)} requests failed and nothing explains that, the first: {first.request_id},"
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


def explained_part(results: ChurnResults, names: Collection[str] = ()) -> float:
    """Part of the time of the load at which a failure could be put down to a fault of one of ``names``, or of any."""
    outages = [outage for outage in results.outages if not names or outage.name in names]
    return _covered(results, [_explaining(outage, results.plan) for outage in outages])


def well_part(results: ChurnResults, name: str) -> float:
    """Part of the time of the load in which a process was under no fault."""
    outages = [outage for outage in results.outages if outage.name == name]
    return 1.0 - _covered(results, [(outage.began_s, _end_of(outage)) for outage in outages])


def _explaining(outage: OutageRecord, plan: ChurnPlan) -> tuple[float, float]:
    """From when until when a fault explains failures."""
    return outage.began_s - _BEFORE_S, _end_of(outage) + plan.explained_within_s


def _end_of(outage: OutageRecord) -> float:
    return math.inf if outage.ended_s == NOT_OVER else outage.ended_s


def _covered(results: ChurnResults, spans: Sequence[tuple[float, float]]) -> float:
    """Part of the time, from the first to the last request under load, that lies in any of ``spans``."""
    sent_s = [ask.sent_s for ask in results.of(AskRecord) if ask.client != Client.LAST]
    start_s, end_s = min(sent_s, default=0.0), max(sent_s, default=0.0)
    covered_s, until_s = 0.0, start_s
    for span_start_s, span_end_s in sorted(spans):
        begin_s, stop_s = max(span_start_s, until_s), min(span_end_s, end_s)
        covered_s += max(0.0, stop_s - begin_s)
        until_s = max(until_s, stop_s)
    return covered_s / (end_s - start_s) if end_s > start_s else 0.0


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
    return reasons + _about_last_hand_offs(results, last)


def _about_last_hand_offs(results: ChurnResults, last: Sequence[AskRecord]) -> list[str]:
    """An answer is right without a hand-off, too: the prompt is computed again. So what engines count must grow."""
    # Shorter turns do not fill a block, and nothing is handed off.
    if not last or results.plan.turn_tokens < BLOCK_SIZE_TOKENS:
        return []
    began_s = min(ask.sent_s for ask in last)
    return [
        f"at the end, with mode {mode}, requests were sent and no engine counts {counter}"
        for mode, counter in HANDED_OFF.items()
        if not sum(_growth(looks, counter, began_s) for looks in results.lives().values())
    ]


def _growth(looks: Sequence[LookRecord], counter: str, since_s: float) -> float:
    """By how much a counter of one life grew after an instant."""
    told = [look for look in looks if look.gauges]
    before = [look.gauges.get(counter, 0.0) for look in told if look.at_s <= since_s]
    after = [look.gauges.get(counter, 0.0) for look in told if look.at_s > since_s]
    return max(after, default=0.0) - max(before, default=0.0) if after else 0.0


def _about_growth(results: ChurnResults) -> list[str]:
    """Of processes that lived until the end, since only then all are at rest."""
    rests, reasons = results.of(RestRecord), []
    if not rests:
        return []
    for (name, _), looks in results.lives().items():
        last = looks[-1]
        if last.at_s < rests[-1].began_s:
            continue
        # Not beside its first look: a router that is restarted under load has many connections at once.
        for what, more, most in (
            ("open files", last.num_fds - min(look.num_fds for look in looks), MOST_NEW_FDS),
            ("threads", last.num_threads - min(look.num_threads for look in looks), MOST_NEW_THREADS),
        ):
            if more > most:
                minutes = (last.at_s - looks[0].at_s) / 60
                reasons.append(f"{name} has {more} more {what} than at another time of its {minutes:.1f} minutes")
    return reasons


def slope_per_hour(points: Sequence[tuple[float, float]]) -> float | None:
    """Of a line through points (seconds, value), least squares; None for fewer than three, or all at one time."""
    if len(points) < 3:
        return None
    mean_x, mean_y = (sum(column) / len(points) for column in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return 3600 * sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else None
