"""A benchmark's plan as options of the command line, and as the file in a run's directory."""

from __future__ import annotations

import json
import shlex
from dataclasses import MISSING, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeVar

from kvshuttle.bench.run_files import PLAN_FILE, write_whole
from kvshuttle.config.checks import check_number, shortened
from kvshuttle.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from dataclasses import Field
    from pathlib import Path


class Benchmark(StrEnum):
    """What a run measures. The value is the subcommand."""

    HANDOFF = "handoff"
    RUN = "run"
    TURNS = "turns"
    CHURN = "churn"


class Plan(Protocol):
    """A frozen dataclass of knobs. ``growing``: those that a later call may add values to, and all their values."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    benchmark: ClassVar[Benchmark]
    growing: ClassVar[Mapping[str, Sequence[str]]]

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """From what ``mapping_of`` gives, or options. Raises ``ConfigError`` naming an unknown key."""


P = TypeVar("P", bound=Plan)

OPTION_NAMES = {"systems": "system", "modes": "mode", "clients": "client", "is_quiet_wait": "quiet-wait"}
"""Of knobs whose options have other names."""
_BENCHMARK_KEY = "benchmark"
_MOST_DIGITS = 20


def option_of(name: str) -> str:
    """The option of a knob."""
    return f"--{OPTION_NAMES.get(name, name.replace('_', '-'))}"


def check_whole_numbers(name: str, texts: Sequence[str], *, least: int) -> None:
    """Raises ``ConfigError`` naming the option of a knob that lists whole numbers, where something else is in it."""
    numbers = [int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else text for text in texts]
    for number in numbers or ["nothing"]:
        if isinstance(number, str) or number < least:
            raise ConfigError(f"{option_of(name)}: whole numbers from {least} on, got {shortened(number)}")
        check_number(name, number, option_of(name))
    if len(set(numbers)) < len(numbers):
        raise ConfigError(f"{option_of(name)}: each number once, got {', '.join(texts)}")


def mapping_of(plan: Plan) -> dict[str, Any]:
    """A plan's knobs, JSON-able."""
    values = {knob.name: getattr(plan, knob.name) for knob in fields(plan)}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


def knobs_in(kind: type[Plan], values: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``kind`` from what ``mapping_of`` gives. Raises ``ConfigError`` naming an unknown key."""
    unknown = sorted(set(values) - {knob.name for knob in fields(kind)})
    if unknown:
        raise ConfigError(f"{unknown[0]}: unknown key")
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def command_of(plan: Plan) -> str:
    """The command that measures ``plan``, with the options that are not at their defaults."""
    words = ["kvshuttle", "bench", str(plan.benchmark), "--out", "DIR"]
    for knob in fields(plan):
        value = getattr(plan, knob.name)
        assert knob.default is not MISSING, f"{knob.name} has a default"
        if value == knob.default:
            continue
        if isinstance(value, bool):
            words.append(option_of(knob.name) if value else option_of(f"no-{OPTION_NAMES.get(knob.name, knob.name)}"))
        else:
            for each in value if isinstance(value, tuple) else (value,):
                words += [option_of(knob.name), f"{each:g}" if isinstance(each, float) else str(each)]
    return shlex.join(words)


def claim(plan: P, out_dir: Path) -> P:
    """Write ``plan`` into a run's directory; returns it, with what earlier calls have measured there.

    A directory holds one plan of one benchmark, and only ``growing`` knobs may have other values from call to call.
    Raises ``ConfigError`` when it holds another one.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    path = out_dir / PLAN_FILE
    if path.exists():
        is_same_kind = benchmark_in(out_dir) is plan.benchmark
        earlier = read_plan(type(plan), out_dir) if is_same_kind else None
        if earlier is None or replace(earlier, **{name: getattr(plan, name) for name in plan.growing}) != plan:
            raise ConfigError(f"--out: {out_dir} holds a run with other options; choose another directory")
        both = {name: {*getattr(earlier, name), *getattr(plan, name)} for name in plan.growing}
        grown = {name: tuple(value for value in plan.growing[name] if value in both[name]) for name in both}
        plan = replace(plan, **grown)
    text = json.dumps({_BENCHMARK_KEY: plan.benchmark, **mapping_of(plan)}, indent=1)
    write_whole(path, f"{text}\n".encode())
    return plan


def read_plan(kind: type[P], out_dir: Path) -> P:
    """The plan of a run's directory. Raises ``OSError`` when there is none, ``ConfigError`` when it cannot be read."""
    values = _read(out_dir)
    values.pop(_BENCHMARK_KEY, None)
    try:
        return kind.from_mapping(values)
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"--out: {out_dir / PLAN_FILE} is no plan of this benchmark: {error}") from error


def benchmark_in(out_dir: Path) -> Benchmark:
    """What a run's directory holds. Raises ``OSError`` when it is none."""
    # Runs of the time when there was one benchmark do not name it.
    name = _read(out_dir).get(_BENCHMARK_KEY, Benchmark.HANDOFF)
    if name not in tuple(Benchmark):
        raise ConfigError(f"--out: {out_dir / PLAN_FILE} is of no benchmark of this release: {name!r}")
    return Benchmark(name)


def _read(out_dir: Path) -> dict[str, Any]:
    path = out_dir / PLAN_FILE
    try:
        values = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--out: {path} is no plan: {error}; choose another directory") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--out: {path} is no plan, but {values!r}; choose another directory")
    return values
