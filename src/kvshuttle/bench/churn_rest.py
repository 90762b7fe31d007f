"""What must be true when the load is over: nothing is held anywhere, and requests are answered in every mode."""

from __future__ import annotations

import http.client
import random
import re
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvshuttle.bench.churn_faults import ROUTER
from kvshuttle.bench.churn_plan import MODES
from kvshuttle.bench.churn_records import Client, EndRecord, RestRecord
from kvshuttle.bench.churn_talk import Asker, Manner
from kvshuttle.bench.churn_watch import gauges_of
from kvshuttle.bench.legs import complete
from kvshuttle.bench.texts import emulated_words
from kvshuttle.clock import now_s
from kvshuttle.emulate.model_dir import FIRST_WORD
from kvshuttle.errors import KvshuttleError
from kvshuttle.launcher.chat import fetch_metrics

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from kvshuttle.bench.churn_plan import ChurnPlan
    from kvshuttle.bench.churn_records import AskRecord, Journal
    from kvshuttle.launcher.plan import FleetPlan

ENGINE_RESIDUE = ("running", "waiting", "usage", "held_blocks", "leases_held", "retained_blocks", "quarantined_blocks")
ROUTER_RESIDUE = ("outstanding", "turns")
_SLACK_S = 15.0
"""Beyond what the rules of leases and kept turns add up to: looks, steps and a busy machine."""
_READER_S = 10.0
"""What a read may take, or wait for the word that a push ended, before its blocks are given up or followed."""
_POLL_S = 1.0
_ASKS_IN_EACH_MODE = 4
_LOG_TROUBLE = re.compile(r"Traceback \(most recent call last\)|AssertionError|please report|EngineDeadError|\bBUG\b")
_WRONG_KV_LINE = "has wrong KV"
_MOST_TROUBLES = 20
_TROUBLE_CHARACTERS = 160


@dataclass(slots=True)
class Rest:
    """Looks for what is left once nobody asks any more."""

    plan: ChurnPlan
    fleet_plan: FleetPlan
    journal: Journal
    began_at_s: float

    @property
    def bound_s(self) -> float:
        """Longest time that anything may be kept: a turn's time and its last lease, or a lease and what reads by it."""
        return self.plan.ttl_s + self.plan.lease_s + _READER_S + _SLACK_S

    def wait(self) -> RestRecord:
        """Until nothing is left, or the time is over."""
        began_s = now_s() - self.began_at_s
        while True:
            left = self._left()
            took_s = now_s() - self.began_at_s - began_s
            if not left or took_s > self.bound_s:
                record = RestRecord(began_s=began_s, took_s=took_s, bound_s=self.bound_s, left=left)
                self.journal.write(record)
                return record
            time.sleep(_POLL_S)

    def ask_in_each_mode(self, asker: Asker) -> list[AskRecord]:
        """Several requests in each mode, so that different engines meet."""
        rng = random.Random(f"last {self.plan.seed}")
        records = []
        for mode in MODES:
            for index in range(_ASKS_IN_EACH_MODE):
                messages = [{"role": "user", "content": emulated_words(rng, self.plan.turn_tokens)}]
                manner = Manner(f"last-{mode}-{index}", mode, is_streamed=bool(index % 2))
                record, _ = asker.ask(messages, self.plan.output_tokens, manner, client=Client.LAST)
                records.append(record)
        self.journal.write(*records)
        return records

    def _left(self) -> dict[str, dict[str, float]]:
        left = {}
        for process in self.fleet_plan.processes:
            wanted = ROUTER_RESIDUE if process.name == ROUTER else ENGINE_RESIDUE
            try:
                if process.name != ROUTER:
                    # Blocks let go of while an engine idled return at its next step, and its metrics follow.
                    complete(process.url, [FIRST_WORD], max_tokens=2)
                found = residue(gauges_of(fetch_metrics(process.url)), wanted)
            except (KvshuttleError, OSError, http.client.HTTPException, ValueError) as error:
                found = {f"does not answer: {error}"[:200]: 1.0}
            if found:
                left[process.name] = found
        return left


def residue(gauges: Mapping[str, float], wanted: Sequence[str]) -> dict[str, float]:
    """Of ``wanted`` all that is not 0, and, since nothing is known of it then, what is not told at all."""
    left = {name: gauges[name] for name in wanted if gauges.get(name)}
    return left | {f"no figure of {name}": 1.0 for name in wanted if name not in gauges}


def end_record(log_dir: Path, bugs: dict[str, float]) -> EndRecord:
    """What the logs of all lives of all processes say."""
    num_wrong_kv_lines, troubles = 0, Counter[str]()
    for path in sorted(log_dir.glob("*.log")):
        if path.name == "load.log":
            continue
        for line in path.read_text(errors="replace").splitlines():
            num_wrong_kv_lines += _WRONG_KV_LINE in line
            if _LOG_TROUBLE.search(line):
                troubles[f"{path.stem}: {line.strip()[:_TROUBLE_CHARACTERS]}"] += 1
    most = [f"{text} ({count} times)" for text, count in troubles.most_common(_MOST_TROUBLES)]
    return EndRecord(num_wrong_kv_lines=num_wrong_kv_lines, bugs=bugs, log_troubles=most)
