"""Runs aiperf, a load generator made by others, for the conversations of one cell, and reads what it wrote.

It has 140 packages of its own, so it lives in a virtual environment in the cache, made when it is first asked for. It
sends each turn when the one before is answered, with the real answers in the history, as many conversations at a time
as there are.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from kvshuttle.bench.talk import API_KEY, CONVERSATION_HEADER, digest_of, user_text
from kvshuttle.bench.turns_records import TurnRecord
from kvshuttle.clock import now_s
from kvshuttle.emulate.model_dir import WRONG_KV_TEXT
from kvshuttle.errors import LaunchFailed
from kvshuttle.launcher.logs import tail_of
from kvshuttle.launcher.processes import Guard, signal_group

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from kvshuttle.bench.texts import Writer
    from kvshuttle.bench.turns_plan import TurnsPlan

AIPERF_VERSION = "0.13.0"
_INSTALL_TIMEOUT_S = 1800.0
_STARTUP_S = 300.0
_TURN_TIMEOUT_S = 600.0
_TAIL_LINES = 30
_POLL_S = 0.1
_MARK = "complete"
_RECORDS, _TEXTS, _SUMMARY = "profile_export.jsonl", "outputs.json", "profile_export_aiperf.json"
_NOT_FOR_IT = ("PYTHONPATH", "HF_HUB_OFFLINE")
"""Of our environment: our own sources, and a switch that has it refuse tokenizers in directories."""


@dataclass(frozen=True, slots=True)
class AiperfOrder:
    """One run of it. ``tokenizer``: a directory, or a name that it fetches itself; token counts are the server's."""

    url: str
    model: str
    tokenizer: str
    salt: str
    plan: TurnsPlan
    is_streaming: bool


@dataclass(frozen=True, slots=True)
class AiperfTurns:
    """``names``: what the header called conversations. ``first_at_s``: when the first turn was sent, on our clock."""

    turns: list[TurnRecord]
    names: set[str]
    first_at_s: float


class _Metadata(msgspec.Struct, frozen=True):
    conversation_id: str
    turn_index: int
    x_request_id: str
    x_correlation_id: str
    request_start_ns: int
    benchmark_phase: str = ""


class _Value(msgspec.Struct, frozen=True):
    value: Any = None


class _Line(msgspec.Struct, frozen=True):
    """One request in ``profile_export.jsonl``, as far as it is used; durations in milliseconds."""

    metadata: _Metadata
    metrics: dict[str, _Value] = {}
    error: dict[str, Any] | None = None

    def number(self, name: str) -> float | None:
        value = self.metrics[name].value if name in self.metrics else None
        return float(value) if isinstance(value, int | float) else None


class _Text(msgspec.Struct, frozen=True):
    x_request_id: str
    response_text: str | None = None


class _Texts(msgspec.Struct, frozen=True):
    data: list[_Text]


_LINES = msgspec.json.Decoder(_Line)


def ensure_aiperf(cache_dir: Path, *, env: Mapping[str, str], say: Callable[[str], None]) -> Path:
    """The Python that has it, installed first where it is missing. Raises ``LaunchFailed`` with pip's words."""
    directory = cache_dir / "clients" / f"aiperf-{AIPERF_VERSION}"
    directory.parent.mkdir(parents=True, exist_ok=True)
    python = directory / "bin" / "python"
    with _locked(directory.with_name(f".{directory.name}.lock")):
        if (directory / _MARK).exists():
            return python
        shutil.rmtree(directory, ignore_errors=True)
        say(f"installing aiperf {AIPERF_VERSION} into {directory}: about 140 packages and 800 MB, once")
        log_path = directory.with_name(f"aiperf-{AIPERF_VERSION}.install.log")
        log_path.unlink(missing_ok=True)
        _run([sys.executable, "-m", "venv", str(directory)], env=env, log_path=log_path, timeout_s=_INSTALL_TIMEOUT_S)
        install = [str(python), "-m", "pip", "install", f"aiperf=={AIPERF_VERSION}"]
        _run(install, env=env, log_path=log_path, timeout_s=_INSTALL_TIMEOUT_S)
        (directory / _MARK).touch()
    return python


def run_aiperf(python: Path, order: AiperfOrder, write: Writer, raw_dir: Path, *, env: Mapping[str, str]) -> None:
    """Hold all conversations to their ends. What it wrote stays in ``raw_dir``, compressed.

    Raises ``LaunchFailed`` with the end of its log when it fails or does not end.
    """
    shutil.rmtree(raw_dir, ignore_errors=True)
    raw_dir.mkdir(parents=True)
    dataset, work_dir = raw_dir / "conversations.jsonl", raw_dir / "work"
    dataset.write_text(dataset_text(order.plan, write))
    timeout_s = _STARTUP_S + order.plan.turns * (_TURN_TIMEOUT_S + order.plan.think_s)
    argv = [str(python), "-m", "aiperf", *aiperf_arguments(order, dataset, work_dir)]
    log_path = raw_dir / "aiperf.log"
    _run(argv, env=env, log_path=log_path, timeout_s=timeout_s)
    for path in (dataset, log_path, *(work_dir / name for name in (_RECORDS, _TEXTS, _SUMMARY))):
        if not path.exists():
            raise LaunchFailed(f"aiperf wrote no {path.name}. {_end_of(log_path)}")
        with gzip.open(raw_dir / f"{path.name}.gz", "wb") as packed:
            packed.write(path.read_bytes())
    for path in (dataset, log_path):
        path.unlink()
    shutil.rmtree(work_dir)


def dataset_text(plan: TurnsPlan, write: Writer) -> str:
    """All conversations as its data set ``multi_turn``: the same texts that the other client says. Pauses are in ms."""
    lines = []
    for number in range(plan.conversations):
        turns = []
        for turn in range(1, plan.turns + 1):
            pause = {"delay": round(plan.think_s * 1000)} if plan.think_s and turn > 1 else {}
            turns.append({"text": user_text(plan, number, turn, write), **pause})
        lines.append(json.dumps({"session_id": str(number), "turns": turns}))
    return "\n".join(lines) + "\n"


def aiperf_arguments(order: AiperfOrder, dataset: Path, work_dir: Path) -> list[str]:
    """What it is started with."""
    inputs = {"temperature": 0, "max_tokens": order.plan.output_tokens, "cache_salt": order.salt}
    options = {
        "--model": order.model,
        "--url": order.url,
        "--endpoint-type": "chat",
        "--tokenizer": order.tokenizer,
        "--input-file": str(dataset),
        "--custom-dataset-type": "multi-turn",
        "--dataset-sampling-strategy": "sequential",
        "--concurrency": str(order.plan.conversations),
        "--num-conversations": str(order.plan.conversations),
        "--session-header": CONVERSATION_HEADER,
        "--api-key": API_KEY,
        "--extra-inputs": json.dumps(inputs),
        "--request-timeout-seconds": f"{_TURN_TIMEOUT_S:g}",
        "--export-level": "records",
        "--output-artifact-dir": str(work_dir),
        "--ui": "none",
        "--workers-max": "1",
        "--random-seed": str(order.plan.seed),
    }
    switches = [
        "--use-server-token-count",
        "--use-legacy-max-tokens",
        "--export-outputs-json",
        "--no-server-metrics",
        "--no-gpu-telemetry",
        *(["--streaming"] if order.is_streaming else []),
    ]
    return ["profile", *switches, *(word for pair in options.items() for word in pair)]


def read_aiperf(raw_dir: Path, plan: TurnsPlan, write: Writer, cell: str) -> AiperfTurns:
    """What it measured, turn by turn. Raises ``LaunchFailed`` when it wrote something else."""
    try:
        lines = [_LINES.decode(line) for line in _unpacked(raw_dir, _RECORDS).splitlines()]
        texts = msgspec.json.decode(_unpacked(raw_dir, _TEXTS), type=_Texts)
    except (OSError, msgspec.DecodeError) as error:
        raise LaunchFailed(f"{raw_dir}: what aiperf wrote cannot be read: {error}") from error
    lines = [line for line in lines if line.metadata.benchmark_phase in ("", "profiling")]
    if not lines:
        raise LaunchFailed(f"{raw_dir}: aiperf measured no request")
    answers = {text.x_request_id: text.response_text or "" for text in texts.data}
    first_ns = min(line.metadata.request_start_ns for line in lines)
    of_conversation: dict[int, list[_Line]] = {}
    for line in sorted(lines, key=lambda each: each.metadata.turn_index):
        of_conversation.setdefault(int(line.metadata.conversation_id), []).append(line)
    turns = [
        record
        for number, its in sorted(of_conversation.items())
        for record in _conversation(its, number, answers, plan, write, cell, first_ns)
    ]
    # Its instants are of the wall clock, everything else is of the host's monotonic one.
    first_at_s = first_ns / 1e9 - time.time() + now_s()
    return AiperfTurns(turns, {line.metadata.x_correlation_id for line in lines}, first_at_s)


def _conversation(
    lines: Sequence[_Line],
    number: int,
    answers: Mapping[str, str],
    plan: TurnsPlan,
    write: Writer,
    cell: str,
    first_ns: int,
) -> Iterator[TurnRecord]:
    messages: list[dict[str, str]] = []
    for line in lines:
        turn, text = line.metadata.turn_index + 1, answers.get(line.metadata.x_request_id, "")
        messages.append({"role": "user", "content": user_text(plan, number, turn, write)})
        latency_ms, ttft_ms = line.number("request_latency"), line.number("time_to_first_token")
        is_whole = line.error is None and latency_ms is not None
        yield TurnRecord(
            cell=cell,
            conversation=number,
            turn=turn,
            sent_at_s=(line.metadata.request_start_ns - first_ns) / 1e9,
            prompt_digest=digest_of(messages),
            error="" if is_whole else _error_text(line.error),
            request_id=line.metadata.x_request_id,
            prompt_tokens=int(line.number("input_sequence_length") or 0),
            answer_tokens=int(line.number("output_sequence_length") or 0),
            ttft_s=-1.0 if ttft_ms is None else ttft_ms / 1000,
            total_s=(latency_ms or 0.0) / 1000,
            answer_digest=digest_of(text),
            is_wrong=WRONG_KV_TEXT in text,
        )
        messages.append({"role": "assistant", "content": text})


def _error_text(error: Mapping[str, Any] | None) -> str:
    if error is None:
        return "aiperf: no answer"
    return f"aiperf: {error.get('type') or 'error'}: {error.get('message') or error}"


def _unpacked(raw_dir: Path, name: str) -> bytes:
    return gzip.decompress((raw_dir / f"{name}.gz").read_bytes())


def _run(argv: Sequence[str], *, env: Mapping[str, str], log_path: Path, timeout_s: float) -> None:
    """A process to its end, with what it starts; it does not outlive us. Raises ``LaunchFailed``."""
    own = {key: value for key, value in env.items() if key not in _NOT_FOR_IT}
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=own, start_new_session=True
        )
    guard = Guard(env)
    guard.add(process.pid)
    try:
        # Looked at without reaping: while the dead leader keeps its number, the group's number cannot be a stranger's.
        deadline_at_s = now_s() + timeout_s
        while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if now_s() > deadline_at_s:
                raise LaunchFailed(f"{argv[0]} did not end within {timeout_s:.0f} s; see {log_path}")
            time.sleep(_POLL_S)
    finally:
        signal_group(process.pid, signal.SIGKILL)
        code = process.wait()
        guard.remove(process.pid)
        guard.close()
    if code:
        raise LaunchFailed(f"aiperf: exit code {code}. {_end_of(log_path)}")


def _end_of(log_path: Path) -> str:
    return f"The end of {log_path}:\n{tail_of(log_path, num_lines=_TAIL_LINES)}"


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
