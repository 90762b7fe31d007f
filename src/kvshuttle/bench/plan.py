"""What a benchmark of hand-offs is asked to do: its knobs, and the cells that they span."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

from kvshuttle.bench.kv_room import KvRoom, check_chunk
from kvshuttle.bench.plan_file import Benchmark, check_whole_numbers, knobs_in, option_of
from kvshuttle.config.checks import check_numbers
from kvshuttle.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PAIR_SLOTS = 32
"""Requests that each engine of a pair runs at a time."""
BLOCK_SIZE_TOKENS = 128
"""Of engines that benchmarks start with pools of a given number of blocks; vLLM's default on the CPU."""


class SystemName(StrEnum):
    """A connector and how it is run."""

    SHUTTLE_PUSH = "shuttle-push"
    SHUTTLE_PULL = "shuttle-pull"
    UPSTREAM_PUSH = "upstream-push"
    """vLLM's NixlPushConnector as it ships, both legs sent at once."""
    UPSTREAM_PULL = "upstream-pull"
    """vLLM's NixlConnector as it ships."""
    UPSTREAM_PUSH_QUIET = "upstream-push-quiet"
    """The same with NIXL's progress thread off."""
    UPSTREAM_PULL_QUIET = "upstream-pull-quiet"
    """The same with NIXL's progress thread off."""
    UPSTREAM_PUSH_PACED = "upstream-push-paced"
    """The same with NIXL's progress thread pausing for a millisecond where it would spin."""
    UPSTREAM_PULL_PACED = "upstream-pull-paced"
    """The same with NIXL's progress thread pausing for a millisecond where it would spin."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of the grid. ``background``: requests that decode on D all the while."""

    prompt_tokens: int
    concurrency: int
    background: int

    @property
    def text(self) -> str:
        """For progress and records."""
        return f"{self.prompt_tokens} tokens x {self.concurrency}, {self.background} decoding"


@dataclass(frozen=True, slots=True)
class HandoffPlan:
    """Knobs of ``kvshuttle bench handoff``. Raises ``ConfigError`` naming the option."""

    benchmark: ClassVar = Benchmark.HANDOFF
    growing: ClassVar[Mapping[str, Sequence[str]]] = {"systems": tuple(SystemName)}

    systems: tuple[str, ...] = tuple(SystemName)
    """What to measure; all when not given."""
    profile: str = "h200-tp8-qwen3-32b"
    """Accelerator profile: one that comes with the package, or the path of a TOML file."""
    time_scale: float = 4.0
    """Multiplies every duration of the profile: this machine moves bytes slower than the profile's does."""
    bytes_scale: float = 0.25
    """Multiplies the layers of the profile's KV cache, and so the bytes of a token."""
    prompt_tokens: tuple[str, ...] = ("1024", "2048", "4096", "6144")
    """Lengths of prompts."""
    concurrency: tuple[str, ...] = ("1", "8")
    """Hand-offs at a time."""
    background: tuple[str, ...] = ("0", "4")
    """Requests that decode on D meanwhile; with any, time per output token is measured too."""
    repeats: int = 10
    """Rounds of each cell with one at a time; cells with several take as many rounds as give twice as many requests."""
    chunk_tokens: int = 512
    """vLLM's ``--max-num-batched-tokens`` on P and D: how much of a prompt one step computes."""
    output_tokens: int = 8
    """Tokens that D answers each hand-off with."""
    seed: int = 0
    """Of prompts, so that every system sees the same ones."""
    kv_cache_gib: int = 4
    """KV cache of each engine."""
    is_quiet_wait: bool = True
    """vLLM's processes sleep while they wait for each other instead of spinning, in every system alike."""
    startup_timeout_s: float = 300.0
    """Longest wait until a pair of engines is healthy."""

    def __post_init__(self) -> None:
        check_numbers(self, option_of)
        for name in self.systems:
            if name not in tuple(SystemName):
                raise ConfigError(f"--system: one of {', '.join(SystemName)}, got {name!r}")
        for option in ("prompt_tokens", "concurrency", "background"):
            check_whole_numbers(option, getattr(self, option), least=0 if option == "background" else 1)
        for option in (
            "time_scale", "bytes_scale", "repeats", "chunk_tokens", "output_tokens", "kv_cache_gib",
            "startup_timeout_s",
        ):  # fmt: skip
            if not getattr(self, option) > 0:
                raise ConfigError(f"--{option.replace('_', '-')}: a number above 0, got {getattr(self, option)}")
        check_chunk(self.chunk_tokens, PAIR_SLOTS, named_by="--chunk-tokens")

    @property
    def cells(self) -> list[Cell]:
        """The grid, background load outermost."""
        return [
            Cell(int(tokens), int(concurrency), int(background))
            for background in self.background
            for concurrency in self.concurrency
            for tokens in self.prompt_tokens
        ]

    def num_rounds(self, cell: Cell) -> int:
        """How often a cell is run."""
        return max(2, round(2 * self.repeats / cell.concurrency)) if cell.concurrency > 1 else self.repeats

    @property
    def max_model_len(self) -> int:
        """Room for the longest prompt and for background requests."""
        return max(int(text) for text in self.prompt_tokens) + BACKGROUND_TOKENS + self.output_tokens

    def check_room(self, bytes_per_token: int) -> None:
        """Raises ``ConfigError`` where what is in use at a time does not fit an engine's KV memory."""
        room = KvRoom("--kv-cache-gib", self.kv_cache_gib, bytes_per_token)
        lower = "lower --bytes-scale"
        room.check(
            self.max_model_len, "one request of full length takes", f"{lower}, --prompt-tokens or --output-tokens"
        )
        cell = max(self.cells, key=self._tokens_at_a_time)
        together = f"what is there at a time ({cell.text}) takes"
        room.check(
            self._tokens_at_a_time(cell),
            together,
            f"{lower}, --prompt-tokens, --output-tokens, --concurrency or --background",
        )

    def _tokens_at_a_time(self, cell: Cell) -> int:
        return cell.concurrency * (cell.prompt_tokens + self.output_tokens) + cell.background * BACKGROUND_TOKENS

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> HandoffPlan:
        """From what ``mapping_of`` gives, or options. Raises ``ConfigError`` naming an unknown key."""
        return cls(**knobs_in(cls, values))


BACKGROUND_TOKENS = 2048
"""Longest prompt and answer of a background request."""
