"""Open-loop load for churn: `vllm bench serve` in windows, each answer compared with what its prompt must give."""

from __future__ import annotations

import gzip
import json
import math
import random
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

from kvshuttle.bench.answers import expected_answer, normal_text
from kvshuttle.bench.churn_plan import MODES
from kvshuttle.bench.churn_records import NOT_OVER, AskRecord, Client, How, WindowRecord
from kvshuttle.bench.load import LoadResult, parse_result
from kvshuttle.bench.systems import MODEL_NAME
from kvshuttle.clock import now_s
from kvshuttle.emulate.model_dir import FIRST_WORD, VOCAB_SIZE, words
from kvshuttle.errors import LaunchFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kvshuttle.bench.churn_plan import ChurnPlan
    from kvshuttle.bench.churn_records import Journal
    from kvshuttle.bench.load import LoadGenerator

_BURST_PROMPTS = 24
"""So many are sent at once to see what the engines can do."""
_LONGEST_TAIL_S = 240.0
"""After the last request of a window is sent."""
_SHORTEST_WINDOW_S = 5.0
_DETAIL_CHARACTERS = 200
_STATUS_OF = {status.phrase: int(status) for status in HTTPStatus}
_REFUSALS = ("ClientConnectorError", "ServerDisconnectedError", "ConnectionResetError", "ClientOSError")
"""What the load generator meets where nobody listens, or where a server goes away before it answers."""


@dataclass(frozen=True, slots=True)
class Window:
    """One run of the load generator. ``rate``: requests per second, infinite for all at once."""

    name: str
    mode: str
    rate: float
    num_requests: int


@dataclass(slots=True)
class Windows:
    """Runs windows. ``began_at_s``: from when on they are dated."""

    plan: ChurnPlan
    load: LoadGenerator
    journal: Journal
    out_dir: Path
    tokenizer_dir: Path
    url: str
    say: Callable[[str], None]
    began_at_s: float

    def measure_capacity(self) -> float:
        """Requests per second that the engines answer when there are always some waiting. Raises ``LaunchFailed``."""
        record, asks = self._run(Window("burst", MODES[0], math.inf, _BURST_PROMPTS))
        if record.error or record.num_right < record.num_requests:
            raise LaunchFailed(
                f"before any fault {record.num_right} of {record.num_requests} requests were answered well."
                f" {record.error or f'See {self.journal.path}'}"
            )
        return len(asks) / (max(ask.ended_s for ask in asks) - min(ask.sent_s for ask in asks))

    def run_until(self, end_s: float, capacity: float, is_stopping: Callable[[], bool]) -> None:
        """Windows with more than ``capacity`` and with less, in turns, until the last has sent all it has to send."""
        number = 0
        while not is_stopping() and (left_s := end_s - self._since()) > _SHORTEST_WINDOW_S:
            part = self.plan.calm if number % 2 else self.plan.overload
            rate = capacity * part
            num_requests = max(1, round(rate * min(self.plan.window_s, left_s)))
            window = Window(f"w{number}", MODES[number % len(MODES)], rate, num_requests)
            record, _ = self._run(window)
            took_s = record.ended_s - record.began_s
            self.say(
                f"  {record.ended_s:.0f} s: {window.name}, {window.mode}, {part:g} x capacity: {record.num_right} of"
                f" {record.num_requests} answered in {took_s:.0f} s" + (f"; {record.error}" if record.error else "")
            )
            number += 1

    def _run(self, window: Window) -> tuple[WindowRecord, list[AskRecord]]:
        """One window, written down with all its requests."""
        began_s = self._since()
        prompts = window_prompts(self.plan, window)
        asks: list[AskRecord] = []
        error = ""
        try:
            asks = asks_of(self._serve(window, prompts), window, prompts, self.plan.output_tokens, self.began_at_s)
        except (LaunchFailed, OSError) as failure:
            error = str(failure)
        record = WindowRecord(
            name=window.name,
            began_s=began_s,
            ended_s=self._since(),
            rate=window.rate if math.isfinite(window.rate) else 0.0,
            num_requests=window.num_requests,
            num_right=sum(ask.how == How.RIGHT for ask in asks),
            error=error,
        )
        self.journal.write(*asks, record)
        return record, asks

    def _serve(self, window: Window, prompts: Sequence[Sequence[int]]) -> LoadResult:
        directory = self.out_dir / "raw"
        directory.mkdir(exist_ok=True)
        dataset, result = directory / f"{window.name}.prompts.jsonl", directory / f"{window.name}.json"
        dataset.write_text("".join(json.dumps({"prompt": prompt_text(ids)}) + "\n" for ids in prompts))
        sending_s = window.num_requests / window.rate if math.isfinite(window.rate) else 0.0
        try:
            self.load.run(
                self._arguments(window, dataset, result),
                log_path=self.out_dir / "logs" / "load.log",
                timeout_s=sending_s + _LONGEST_TAIL_S,
            )
            data = result.read_bytes()
        finally:
            dataset.unlink()
        result.with_suffix(".json.gz").write_bytes(gzip.compress(data))
        result.unlink()
        return parse_result(data)

    def _arguments(self, window: Window, dataset: Path, result: Path) -> list[str]:
        options = {
            "--backend": "openai",
            "--base-url": self.url,
            "--endpoint": "/v1/completions",
            "--model": MODEL_NAME,
            "--tokenizer": str(self.tokenizer_dir),
            "--dataset-name": "custom",
            "--dataset-path": str(dataset),
            "--custom-output-len": str(self.plan.output_tokens),
            "--num-prompts": str(window.num_requests),
            "--request-rate": f"{window.rate:.6g}",
            "--request-id-prefix": f"{window.name}-",
            "--header": f"x-kvshuttle-mode={window.mode}",
            "--seed": str(self.plan.seed),
            "--temperature": "0",
            "--result-dir": str(result.parent),
            "--result-filename": result.name,
        }
        switches = ["--skip-chat-template", "--disable-shuffle", "--disable-tqdm", "--save-result", "--save-detailed"]
        return [*switches, *(word for pair in options.items() for word in pair)]

    def _since(self) -> float:
        return now_s() - self.began_at_s


def window_prompts(plan: ChurnPlan, window: Window) -> list[list[int]]:
    """Prompts of one window: other ones in each window of a seed, and the same in each run."""
    rng = random.Random(f"prompts {plan.seed} {window.name}")
    lengths = [
        rng.randint(plan.prompt_tokens // 2 or 1, plan.longest_prompt_tokens) for _ in range(window.num_requests)
    ]
    return [[rng.randrange(FIRST_WORD, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def prompt_text(ids: Sequence[int]) -> str:
    """The text that is made into exactly these tokens, which are words."""
    vocabulary = words()
    return "".join(f" {vocabulary[token - FIRST_WORD]}" for token in ids)


def asks_of(
    result: LoadResult, window: Window, prompts: Sequence[Sequence[int]], num_tokens: int, began_at_s: float
) -> list[AskRecord]:
    """What became of each request of a window, by what the load generator wrote down."""
    asks = []
    for index, ids in enumerate(prompts):
        text, error = normal_text(result.generated_texts[index]), result.errors[index].strip()
        # A stream that broke off leaves an error. Without one the client took the answer for whole, so it must be.
        how = judged(text, expected_answer(ids, num_tokens), is_whole=not error)
        status = _STATUS_OF.get(error, 0)
        if how == How.CUT and not text:
            how = How.ERROR if status else How.REFUSED if any(name in error for name in _REFUSALS) else How.CUT
        sent_s = result.start_times[index] - began_at_s
        is_timed = how == How.RIGHT or not error
        asks.append(
            AskRecord(
                client=Client.LOAD,
                request_id=f"{window.name}-{index}",
                sent_s=sent_s,
                ended_s=sent_s + result.latencies[index] if is_timed else NOT_OVER,
                how=how,
                mode=window.mode,
                status=status,
                num_tokens=len(text.split()),
                detail="" if how == How.RIGHT else error.rpartition("\n")[2][-_DETAIL_CHARACTERS:],
            )
        )
    return asks


def judged(text: str, expected: str, *, is_whole: bool) -> How:
    """What an answer is: ``RIGHT``, ``CUT`` when it begins right and ends early, or ``WRONG``.

    ``is_whole``: it came with a length, or a word that it is complete, so that it must not end early.
    """
    if text == expected:
        return How.RIGHT
    begins_right = not text or expected.startswith(f"{text} ")
    return How.CUT if begins_right and not is_whole else How.WRONG
