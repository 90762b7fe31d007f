"""What a load benchmark is asked to do: a plan read from TOML, checked, and the cells that it spans."""

from __future__ import annotations

import itertools
import math
import sys
import tomllib
from dataclasses import MISSING, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvshuttle.bench.kv_room import KvRoom, check_chunk
from kvshuttle.bench.plan_file import Benchmark
from kvshuttle.config.checks import check_dtype, check_numbers, is_int, shortened
from kvshuttle.emulate.profile import effective_profile
from kvshuttle.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvshuttle.emulate.profile import Profile

PLAN_DIR = Path(__file__).parent / "plans"
_MOST_CELLS = 10_000
PROMPTS_OF_A_CELL = 100_000
"""Most that there can be in a cell; each cell has so many numbers for them to itself."""
FEWEST_PROMPTS = 8
"""In a cell whose number of prompts follows from ``duration_s``."""
_ROOM_TOKENS = 64
"""Beyond prompt and answer; also for the warm-up."""
WARM_UP_TOKENS = 1024
WARM_UP_ANSWER_TOKENS = 8


class GridSystem(StrEnum):
    """What is measured: engines with a connector, and what stands in front of them."""

    PLAIN = "plain"
    """One engine without a connector, asked directly: what disaggregation is compared with."""
    UPSTREAM_PULL = "upstream-pull"
    """vLLM's NixlConnector as it ships, behind our plain proxy."""
    UPSTREAM_PULL_QUIET = "upstream-pull-quiet"
    """The same with NIXL's progress thread off."""
    UPSTREAM_PUSH = "upstream-push"
    """vLLM's NixlPushConnector as it ships, both legs at once, behind our plain proxy."""
    UPSTREAM_PUSH_QUIET = "upstream-push-quiet"
    """The same with NIXL's progress thread off."""
    UPSTREAM_PULL_PACED = "upstream-pull-paced"
    UPSTREAM_PUSH_PACED = "upstream-push-paced"
    """The same with NIXL's progress thread pausing for a millisecond where it would spin."""
    SHUTTLE_PULL = "shuttle-pull"
    SHUTTLE_PUSH = "shuttle-push"
    SHUTTLE_AUTO = "shuttle-auto"
    """Our connector behind our router, which pushes or pulls; with ``auto`` it chooses by load."""
    FRONT_NONE = "front-none"
    """The first decode engine asked directly: the measure of what stands in front of it otherwise."""
    FRONT_PROXY = "front-proxy"
    """The same engines behind the proxy, which passes requests on to the decode engines alone."""
    FRONT_ROUTER = "front-router"
    """The same engines behind our router, told to leave the prefill engines out."""
    SHUTTLE_PULL_REAL = "shuttle-pull-real"
    SHUTTLE_PUSH_REAL = "shuttle-push-real"
    """Ours on engines that compute a model, as `kvshuttle up` starts them: what emulated ones are compared with."""


REAL_SYSTEMS = frozenset({GridSystem.SHUTTLE_PULL_REAL, GridSystem.SHUTTLE_PUSH_REAL})


class Prompts(StrEnum):
    """What prompts cells have in common."""

    NEW = "new"
    """Nothing: no engine has seen a cell's prompts before."""
    REPEATED = "repeated"
    """All cells of one length have the same ones, and the prefill engine has them in its prefix cache."""


@dataclass(frozen=True, slots=True)
class GridCell:
    """One run of the load generator. ``rate``: requests per second as the plan has it, before ``time_scale``."""

    slots: int
    input_tokens: int
    output_tokens: int
    rate: float
    seed: int
    repeat: int

    @property
    def text(self) -> str:
        """For progress."""
        where = f"{self.input_tokens} in, {self.output_tokens} out, {self.rate:g}/s, {self.slots} slots"
        return f"{where}, seed {self.seed}" + (f", run {self.repeat + 1}" if self.repeat else "")

    @property
    def file_name(self) -> str:
        """For files of its own, without a suffix."""
        return f"{self.input_tokens}x{self.output_tokens}-{self.rate:g}-slots{self.slots}-seed{self.seed}-{self.repeat}"


@dataclass(frozen=True, slots=True)
class GridPlan:
    """Keys of a plan of ``kvshuttle bench run``. Raises ``ConfigError`` naming the key."""

    benchmark: ClassVar = Benchmark.RUN
    growing: ClassVar[Mapping[str, Sequence[str]]] = {"systems": tuple(GridSystem)}

    systems: tuple[str, ...]
    """What to measure, in this order; see the names below."""
    rates: tuple[float, ...]
    """Requests per second, of accelerators at full speed: they are sent ``time_scale`` times slower."""
    input_tokens: tuple[int, ...]
    """Lengths of prompts."""
    output_tokens: tuple[int, ...] = (128,)
    """Lengths of answers."""
    num_prompts: int = 0
    """Requests in each cell; or 0 where ``duration_s`` says it."""
    duration_s: float = 0.0
    """Seconds for which each cell sends requests, on this machine's clock; or 0 where ``num_prompts`` says it."""
    prompts: str = Prompts.NEW
    """``new``: no engine has seen a cell's prompts before. ``repeated``: all cells of a length have the same ones, and
    the prefill engine has computed them once before the first cell, as in the published push/pull study."""
    burstiness: float = 1.0
    """Of arrivals: 1 is a Poisson process, more is more even."""
    seeds: tuple[int, ...] = (0,)
    """Of arrivals and prompts; each cell is run once for each."""
    repeats: int = 1
    """Runs of each cell with the same seed, so the same arrivals."""
    num_prefill: int = 1
    """Prefill engines."""
    num_decode: int = 1
    """Decode engines."""
    decode_slots: tuple[int, ...] = (8,)
    """vLLM's ``--max-num-seqs`` of decode engines and of the plain engine; each cell is run with each."""
    prefill_slots: int = 8
    """vLLM's ``--max-num-seqs`` of prefill engines."""
    has_prefill_prefix_cache: bool = True
    """Prefix caching on prefill engines and on the plain engine."""
    has_decode_prefix_cache: bool = False
    """Prefix caching on decode engines."""
    profile: str = "h200-tp8-qwen3-32b"
    """Accelerator profile: one that comes with the package, or the path of a TOML file."""
    time_scale: float = 4.0
    """Multiplies every duration of the profile, and divides the rates."""
    bytes_scale: float = 0.0625
    """Multiplies the layers of the profile's KV cache, and so the bytes of a token."""
    chunk_tokens: int = 8192
    """vLLM's ``--max-num-batched-tokens``: how much of a prompt one step computes. 8192 is what vLLM takes on H200."""
    prefill_kv_gib: int = 4
    """KV cache of each prefill engine, and of the plain engine."""
    decode_kv_gib: int = 4
    """KV cache of each decode engine."""
    is_quiet_wait: bool = True
    """vLLM's processes sleep while they wait for each other instead of spinning, in every system alike."""
    model: str = "smollm2"
    """Of systems on engines that compute: the bundled model, or the directory of another."""
    dtype: str = "auto"
    """vLLM's ``--dtype`` for that model."""
    startup_timeout_s: float = 300.0
    """Longest wait until the engines of a system are healthy."""
    first_token_timeout_s: float = 120.0
    """Longest wait of a request for the answer to a leg, or for its first data; then it fails. In proxy and router."""
    cell_timeout_s: float = 600.0
    """Longest time that one run of the load generator may take."""

    def __post_init__(self) -> None:
        check_numbers(self)
        for name in self.systems:
            if name not in tuple(GridSystem):
                raise ConfigError(f"systems: names among {', '.join(GridSystem)}, got {name!r}")
        if self.prompts not in tuple(Prompts):
            raise ConfigError(f"prompts: one of {', '.join(Prompts)}, got {self.prompts!r}")
        for knob in fields(self):
            _check_kind(knob.name, str(knob.type), getattr(self, knob.name))
        check_dtype("dtype", self.dtype)
        if len({f"{rate:g}" for rate in self.rates}) < len(self.rates):
            raise ConfigError(f"rates: different in their first six digits, got {list(self.rates)}")
        self._check_amount()
        self._check_repeated_prompts()
        self._check_scales()
        self._check_room()

    def _check_amount(self) -> None:
        """One knob says how many requests there are, and all of them come before the time of a cell is over."""
        if bool(self.num_prompts) == bool(self.duration_s):
            raise ConfigError(
                f"num_prompts, duration_s: one of them above 0, got {self.num_prompts} and {self.duration_s:g}"
            )
        num_cells = self.repeats * math.prod(len(getattr(self, name)) for name in _SPANNING)
        if num_cells > _MOST_CELLS:
            raise ConfigError(
                f"{', '.join(_SPANNING)}, repeats: up to {_MOST_CELLS:,} cells for a system, got {num_cells:,}"
            )
        for cell in self.cells:
            self._check_cell(cell)

    def _check_cell(self, cell: GridCell) -> None:
        name = "num_prompts" if self.num_prompts else "duration_s"
        if self.num_prompts_of(cell) > PROMPTS_OF_A_CELL:
            raise ConfigError(
                f"{name}: up to {PROMPTS_OF_A_CELL:,} requests in a cell, and at rate {cell.rate:g} it has"
                f" {self.num_prompts_of(cell):,}"
            )
        if self.arrival_s(cell) > self.cell_timeout_s:
            raise ConfigError(
                f"cell_timeout_s: longer than a cell sends requests, and at rate {cell.rate:g} that is"
                f" {self.arrival_s(cell):g} s, got {self.cell_timeout_s:g}; give it more, or lower {name}"
            )

    def _check_repeated_prompts(self) -> None:
        if self.prompts != Prompts.REPEATED:
            return
        if not self.has_prefill_prefix_cache or self.num_prefill > 1:
            raise ConfigError("prompts: repeated takes one prefill engine, with has_prefill_prefix_cache = true")
        if self.has_decode_prefix_cache:
            raise ConfigError("prompts: repeated takes has_decode_prefix_cache = false, or nothing would be handed off")

    def _check_scales(self) -> None:
        """A model that computes can be neither slowed nor made smaller, and its KV has the profile's format."""
        dtype = self.effective_profile().geometry.dtype
        # By itself vLLM takes 16 bits, also for a model that is written in 32.
        alike = (dtype,) if dtype == "float32" else ("auto", dtype)
        if REAL_SYSTEMS & set(self.systems) and self.dtype not in alike:
            raise ConfigError(f"dtype: {dtype} as in the profile {self.profile}, got {self.dtype!r}")
        for name in ("time_scale", "bytes_scale"):
            if REAL_SYSTEMS & set(self.systems) and getattr(self, name) != 1:
                raise ConfigError(f"{name}: 1 beside systems on a model that computes, got {getattr(self, name):g}")

    def _check_room(self) -> None:
        """A request of full length fits every engine; repeated prompts of a length all fit the prefill engine."""
        check_chunk(self.chunk_tokens, max(self.prefill_slots, *self.decode_slots), named_by="chunk_tokens")
        bytes_per_token = self.effective_profile().geometry.kv_bytes_per_token
        for name in ("prefill_kv_gib", "decode_kv_gib"):
            room = KvRoom(name, getattr(self, name), bytes_per_token)
            room.check(self.max_model_len, "one request of this plan takes", "lower bytes_scale")
        repeated_tokens = max(self.num_prompts_of(cell) * cell.input_tokens for cell in self.cells)
        room_tokens = KvRoom("prefill_kv_gib", self.prefill_kv_gib, bytes_per_token).num_tokens
        if self.prompts == Prompts.REPEATED and repeated_tokens > room_tokens:
            raise ConfigError(
                f"prompts: the repeated ones take {repeated_tokens} tokens of KV, but prefill_kv_gib ="
                f" {self.prefill_kv_gib} holds {room_tokens}; give it more, or lower bytes_scale or num_prompts"
            )

    @property
    def cells(self) -> list[GridCell]:
        """All cells, for each system: slots outermost, then lengths, so that the same prompts follow each other."""
        repeats = range(self.repeats)
        spans = (self.decode_slots, self.input_tokens, self.output_tokens, self.rates, self.seeds, repeats)
        return [GridCell(*place) for place in itertools.product(*spans)]

    @property
    def max_model_len(self) -> int:
        """Room for the longest request."""
        longest = max(*self.input_tokens, WARM_UP_TOKENS) + max(*self.output_tokens, WARM_UP_ANSWER_TOKENS)
        return longest + _ROOM_TOKENS

    def sent_rate(self, rate: float) -> float:
        """Requests per second that are really sent."""
        return rate / self.time_scale

    def num_prompts_of(self, cell: GridCell) -> int:
        """How many requests a cell sends."""
        if self.num_prompts:
            return self.num_prompts
        return max(FEWEST_PROMPTS, round(self.sent_rate(cell.rate) * self.duration_s))

    def arrival_s(self, cell: GridCell) -> float:
        """How long a cell sends requests."""
        return self.num_prompts_of(cell) / self.sent_rate(cell.rate)

    def effective_profile(self) -> Profile:
        """The plan's profile, slowed and with its bytes scaled. Raises ``ConfigError``."""
        return effective_profile(self)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> GridPlan:
        """From a parsed TOML or JSON table. Raises ``ConfigError`` naming the key."""
        known = {knob.name: str(knob.type) for knob in fields(cls)}
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ConfigError(f"{unknown[0]}: unknown key; known are {', '.join(known)}")
        missing = [knob.name for knob in fields(cls) if knob.default is MISSING and knob.name not in values]
        if missing:
            raise ConfigError(f"{missing[0]}: missing; a plan names at least systems, rates and input_tokens")
        return cls(**{key: _from_toml(known[key], value) for key, value in values.items()})


def load_grid_plan(name: str) -> GridPlan:
    """A plan of ours by name, or the TOML file at a path. Raises ``ConfigError`` naming the file and the key."""
    path = Path(name) if name.endswith(".toml") else PLAN_DIR / f"{name}.toml"
    try:
        values = tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(
            f"plan: no {name!r}; known are {', '.join(grid_plan_names())}, or give a path that ends in .toml"
        ) from error
    except (OSError, ValueError, RecursionError) as error:  # what is no TOML, or no path, is a ValueError
        raise ConfigError(f"plan: {path}: {error}") from error
    try:
        return GridPlan.from_mapping(values)
    except ConfigError as error:
        raise ConfigError(f"{path.name}: {error}") from error


def grid_plan_names() -> list[str]:
    """The plans that come with the package."""
    return sorted(path.stem for path in PLAN_DIR.glob("*.toml"))


def _from_toml(kind: str, value: Any) -> Any:
    """TOML's lists become tuples; a single value may stand for a list of one; whole numbers may stand for others."""
    if kind.startswith("tuple"):
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(_as_float(item) if "float" in kind else item for item in items)
    return _as_float(value) if kind == "float" else value


def _as_float(value: Any) -> Any:
    """A whole number as the other kind, where it is not too large for that; what is none as it is."""
    return float(value) if is_int(value) and abs(value) <= sys.float_info.max else value


_SPANNING = ("decode_slots", "input_tokens", "output_tokens", "rates", "seeds")
_MAY_BE_ZERO = frozenset({"num_prompts", "duration_s", "seeds"})


def _check_kind(name: str, kind: str, value: Any) -> None:
    """Raises ``ConfigError`` where a value is not what its field says. Numbers are above 0, lists not empty."""
    if kind == "bool" and not isinstance(value, bool):
        raise ConfigError(f"{name}: true or false, got {value!r}")
    is_list = kind.startswith("tuple")
    if is_list and (not value or len(set(map(repr, value))) < len(value)):
        raise ConfigError(f"{name}: a list of different values, at least one, got {list(value)!r}")
    for each in value if is_list else (value,):
        if "int" in kind and not (is_int(each) and _is_in_range(name, each)):
            raise ConfigError(f"{name}: {_range_text(name, 'whole number')}, got {shortened(repr(each))}")
        if "float" in kind and not (isinstance(each, float) and math.isfinite(each) and _is_in_range(name, each)):
            raise ConfigError(f"{name}: {_range_text(name, 'number')}, got {shortened(repr(each))}")
        if "str" in kind and not isinstance(each, str):
            raise ConfigError(f"{name}: text, got {shortened(repr(each))}")


def _is_in_range(name: str, value: float) -> bool:
    return value >= 0 if name in _MAY_BE_ZERO else value > 0


def _range_text(name: str, kind: str) -> str:
    return f"a {kind}, 0 or more" if name in _MAY_BE_ZERO else f"a {kind} above 0"
