"""A model that computes, timed from inside its worker: what its trace says of a pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvshuttle.emulate.pass_timer import PassTimer
from kvshuttle.emulate.pattern import prefix_sums, prompt_key
from kvshuttle.emulate.settings import additional_config, trace_path_in
from kvshuttle.emulate.steps import BatchRow
from kvshuttle.emulate.trace import PassedRequest, read_trace

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = np.arange(300, 320, dtype=np.int32)
KEY = prompt_key(int(prefix_sums(PROMPT)[-1]))


class Worker:
    """A model whose forward pass takes 3 s and whose logits take 1 s, and 0.5 s of other things in between."""

    def __init__(self, path: Path) -> None:
        self.now_s = 10.0
        self.batch: list[BatchRow] = []
        timer = PassTimer(path, lambda: self.now_s)
        self.forward = timer.timed_forward(lambda x: self._work(3.0, x), lambda: self.batch)
        self.logits = timer.timed_logits(lambda x: self._work(1.0, x))

    def step(self, *rows: BatchRow) -> int:
        self.batch = list(rows)
        hidden = self.forward(7)
        self.now_s += 0.5
        return self.logits(hidden)

    def _work(self, took_s: float, value: int) -> int:
        self.now_s += took_s
        return value + 1


def row(start: int, end: int) -> BatchRow:
    tokens = np.concatenate([PROMPT, np.arange(5, dtype=np.int32)])[:end]
    return BatchRow("r", start, end, len(PROMPT), tokens, PROMPT, np.arange(3, dtype=np.int32), end - start - 1)


def test_a_pass_lasts_from_forward_to_logits_and_counts_only_those(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    assert Worker(path).step(row(0, 20)) == 9
    ((forward,), _) = read_trace(path)
    assert (forward.start_s, forward.end_s, forward.planned_s) == (10.0, 14.5, 4.0)
    assert forward.requests == (PassedRequest(KEY, 0, 20, 20),)


def test_a_request_keeps_its_name_while_it_decodes(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    worker = Worker(path)
    worker.step(row(0, 20))
    worker.step(row(20, 21))
    passes, _ = read_trace(path)
    assert [request for each in passes for request in each.requests][1] == PassedRequest(KEY, 20, 21, 20)


def test_a_trial_run_and_logits_without_a_pass_are_not_in_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    worker = Worker(path)
    worker.step()
    worker.logits(1)
    assert not path.exists()


def test_a_worker_writes_a_file_of_its_own_where_it_is_told_to(tmp_path: Path) -> None:
    told = additional_config(trace_dir=str(tmp_path / "traces"))
    path = trace_path_in(told)
    assert path is not None
    assert path.parent == tmp_path / "traces"
    assert path.parent.is_dir()
    assert trace_path_in({}) is None
    assert trace_path_in(None) is None
