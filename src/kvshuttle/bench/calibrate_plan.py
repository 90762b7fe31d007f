"""What a calibration is asked to do: its knobs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvshuttle.bench.kv_room import KvRoom, check_chunk
from kvshuttle.bench.plan import PAIR_SLOTS
from kvshuttle.bench.plan_file import check_whole_numbers, option_of
from kvshuttle.config.checks import check_dtype, check_numbers
from kvshuttle.config.router import EngineRole, EngineSpec
from kvshuttle.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,99}")
_FEWEST_LENGTHS = 3


@dataclass(frozen=True, slots=True)
class CalibratePlan:
    """Knobs of ``kvshuttle bench calibrate``. Raises ``ConfigError`` naming the option."""

    name: str = "calibrated"
    """Of the profile, and of its file."""
    prefill: str = ""
    """``URL,SIDE`` of the prefill engine of a running pair, as for the router; give the decode engine's, too. Without
    them a pair is started, as `kvshuttle up` does."""
    decode: str = ""
    """``URL,SIDE`` of the decode engine of a running pair."""
    step_overhead_ms: float = 0.0
    """With a running pair: what its engines do between forward passes in each step; taken off every step."""
    model: str = "smollm2"
    """Model of a pair that is started: the bundled one, or the directory of another."""
    dtype: str = "auto"
    """vLLM's ``--dtype`` of a pair that is started."""
    prompt_tokens: tuple[str, ...] = ("64", "128", "256", "512")
    """Lengths of prompts to compute, and to hand off. These suit a CPU; profiles of accelerators take longer ones."""
    contexts: tuple[str, ...] = ("128", "512")
    """Tokens before the first one that is decoded, about."""
    batches: tuple[str, ...] = ("1", "2", "4", "8")
    """Requests that decode at a time."""
    repeats: int = 8
    """Rounds, each with a prompt of every length, handed off by pull and by push in turn, and every batch once."""
    steps: int = 16
    """Tokens that each request decodes in a round."""
    chunk_tokens: int = 2048
    """vLLM's ``--max-num-batched-tokens`` of a pair that is started; that of a running pair, whose prompts must not be
    longer."""
    kv_cache_gib: int = 2
    """KV cache of each engine that is started."""
    startup_timeout_s: float = 600.0
    """Longest wait until a pair that is started is healthy."""

    def __post_init__(self) -> None:
        check_numbers(self, option_of)
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"--name: up to 100 small letters, digits, points and dashes, got {self.name!r}")
        check_dtype("--dtype", self.dtype)
        self._check_numbers()
        if bool(self.prefill) != bool(self.decode):
            missing = "--decode" if self.prefill else "--prefill"
            raise ConfigError(f"{missing}: a running pair is named by both engines, --prefill and --decode")
        for option in ("prefill", "decode"):
            if getattr(self, option):
                engine_address(option, getattr(self, option))
        if len(self.lengths) < _FEWEST_LENGTHS:
            raise ConfigError(f"--prompt-tokens: three different lengths or more, got {', '.join(self.prompt_tokens)}")
        if self.prefill and max(self.lengths) > self.chunk_tokens:
            raise ConfigError(
                f"--prompt-tokens: {max(self.lengths)} is more than one step computes (--chunk-tokens"
                f" {self.chunk_tokens}); a running pair is timed by whole prompts, so leave longer ones out"
            )
        if not self.prefill:
            check_chunk(self.chunk_tokens, PAIR_SLOTS, named_by="--chunk-tokens")
        if not self.prefill and self.batch_sizes[-1] > PAIR_SLOTS:
            raise ConfigError(
                f"--batches: up to {PAIR_SLOTS}, which engines that are started take at a time, got"
                f" {self.batch_sizes[-1]}"
            )

    def check_room(self, bytes_per_token: int) -> None:
        """Raises ``ConfigError`` where what is in use at a time does not fit the KV of a pair that is started."""
        room = KvRoom("--kv-cache-gib", self.kv_cache_gib, bytes_per_token)
        room.check(self.max_model_len, "one request takes", "lower --prompt-tokens, --contexts or --steps")
        decoding = self.batch_sizes[-1] * (self.context_tokens[-1] + 1 + self.steps)
        room.check(decoding, f"{self.batch_sizes[-1]} that decode take", "lower --batches, --contexts or --steps")

    def _check_numbers(self) -> None:
        for option in ("prompt_tokens", "contexts", "batches"):
            check_whole_numbers(option, getattr(self, option), least=1)
        lowest = {"repeats": 2, "steps": 4, "chunk_tokens": 1, "kv_cache_gib": 1, "startup_timeout_s": 1}
        for option, least in lowest.items():
            if not getattr(self, option) >= least:
                raise ConfigError(f"--{option.replace('_', '-')}: {least} or more, got {getattr(self, option)}")
        if not self.step_overhead_ms >= 0:
            raise ConfigError(f"--step-overhead-ms: 0 or more, got {self.step_overhead_ms}")

    @property
    def lengths(self) -> list[int]:
        """Of prompts, rising."""
        return sorted({int(text) for text in self.prompt_tokens})

    @property
    def context_tokens(self) -> list[int]:
        """Rising."""
        return sorted({int(text) for text in self.contexts})

    @property
    def batch_sizes(self) -> list[int]:
        """Rising."""
        return sorted({int(text) for text in self.batches})

    @property
    def max_model_len(self) -> int:
        """Room for the longest request."""
        return max(self.lengths[-1], self.context_tokens[-1]) + self.steps + 64

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> CalibratePlan:
        """From options. Raises ``ConfigError``."""
        given: dict[str, Any] = {key: tuple(each) if isinstance(each, list) else each for key, each in values.items()}
        return cls(**given)


def engine_address(option: str, text: str) -> tuple[str, str]:
    """URL and side channel of ``URL,SIDE``. Raises ``ConfigError`` naming the option."""
    try:
        engine = EngineSpec.parse(text, EngineRole(option), 0)
    except ConfigError as error:
        raise ConfigError(f"--{option}: {error}") from error
    if engine.is_tls:
        raise ConfigError(f"--{option}: an engine is timed over http://, got {text!r}")
    return f"http://{engine.http_address}", engine.side_address
