"""What a run of overload and churn is asked to do: its knobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kvshuttle.bench.plan import BLOCK_SIZE_TOKENS
from kvshuttle.bench.plan_file import Benchmark, knobs_in, option_of
from kvshuttle.blocks import num_blocks_for
from kvshuttle.config.checks import check_numbers
from kvshuttle.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvshuttle.launcher.plan import Machine

MODES = ("auto", "push", "pull")
"""What clients ask for, in turns."""
CHUNK_TOKENS = 1024
"""How much of a prompt one step of the engines computes."""
SHORTEST_FAULT_PAUSE_S = 5.0
"""Between two faults that are not meant to fall together."""
_TEMPLATE_TOKENS = 32
"""What a chat template adds for a turn, at most."""
_FEWEST_MINUTES = 1.0
_SECONDS_OF_MARGINS = 3.0
"""Leases are longer than three times the connector's ``submit_margin_s``."""


@dataclass(frozen=True, slots=True)
class ChurnPlan:
    """Knobs of ``kvshuttle bench churn``. Raises ``ConfigError`` naming the option."""

    benchmark: ClassVar = Benchmark.CHURN
    growing: ClassVar[Mapping[str, Sequence[str]]] = {}

    minutes: float = 30.0
    """For how long load comes; starting the engines and coming to rest are not counted."""
    seed: int = 0
    """Of faults, prompts and what clients do."""
    num_prefill: int = 2
    """Prefill engines."""
    num_decode: int = 2
    """Decode engines."""
    overload: float = 1.5
    """Load of every other window, in times of what the engines were measured to answer before the first fault."""
    calm: float = 0.4
    """Load of the windows between."""
    window_s: float = 40.0
    """How long one run of the load generator sends requests."""
    prompt_tokens: int = 1024
    """Its prompts have between half and one and a half times so many tokens."""
    output_tokens: int = 48
    """Tokens of every answer."""
    conversations: int = 6
    """Clients beside it that hold one conversation after the other, and sometimes leave in the middle of an answer."""
    turns: int = 6
    """Most turns of a conversation; it may be a single one."""
    turn_tokens: int = 200
    """New tokens of each turn."""
    leaving: float = 0.15
    """Part of the streamed turns in which the client leaves."""
    fault_every_s: float = 60.0
    """Mean time between faults: half to one and a half times so much."""
    longest_stop_s: float = 15.0
    """Engines that are stopped and not killed are stopped for 2 s up to this."""
    lease_s: float = 9.0
    """The engines' ``lease_s``."""
    ttl_s: float = 20.0
    """How long engines keep a turn: their ``decoder_kv_blocks_ttl``."""
    prefill_blocks: int = 96
    """KV blocks of each prefill engine, of 128 tokens."""
    decode_blocks: int = 64
    """KV blocks of each decode engine."""
    decode_slots: int = 6
    """vLLM's ``--max-num-seqs`` of decode engines."""
    max_engine_connections: int = 24
    """The router's: what is more is refused with 503."""
    explained_within_s: float = 20.0
    """A request that failed up to this long after a fault was over may have failed by it."""
    profile: str = "h200-tp8-qwen3-32b"
    """Accelerator profile: one that comes with the package, or the path of a TOML file."""
    time_scale: float = 8.0
    """Multiplies every duration of the profile, so that a small machine can run engines and start others besides."""
    bytes_scale: float = 0.0625
    """Multiplies the layers of the profile's KV cache, and so the bytes of a token."""
    startup_timeout_s: float = 400.0
    """Longest wait until engines are healthy."""

    def __post_init__(self) -> None:
        check_numbers(self, option_of)
        for name in (
            "num_prefill", "num_decode", "overload", "calm", "window_s", "prompt_tokens", "output_tokens",
            "conversations", "turns", "turn_tokens", "decode_slots", "max_engine_connections", "explained_within_s",
            "time_scale", "bytes_scale", "startup_timeout_s", "ttl_s",
        ):  # fmt: skip
            if not getattr(self, name) > 0:
                raise ConfigError(f"{option_of(name)}: a number above 0, got {getattr(self, name)}")
        self._check_times()
        if not 0 <= self.leaving <= 1:
            raise ConfigError(f"--leaving: a part between 0 and 1, got {self.leaving:g}")
        if self.decode_slots > CHUNK_TOKENS:
            raise ConfigError(f"--decode-slots: up to {CHUNK_TOKENS}, got {self.decode_slots}")
        self._check_blocks()

    def _check_times(self) -> None:
        if not self.minutes >= _FEWEST_MINUTES:
            raise ConfigError(f"--minutes: {_FEWEST_MINUTES:g} or more, got {self.minutes:g}")
        if self.window_s > self.duration_s:
            raise ConfigError(
                f"--window-s: no longer than the load (--minutes {self.minutes:g}), got {self.window_s:g}"
            )
        if not self.fault_every_s >= 2 * SHORTEST_FAULT_PAUSE_S:
            raise ConfigError(f"--fault-every-s: {2 * SHORTEST_FAULT_PAUSE_S:g} or more, got {self.fault_every_s:g}")
        if not self.longest_stop_s >= 2:
            raise ConfigError(f"--longest-stop-s: 2 or more, got {self.longest_stop_s:g}")
        if not self.lease_s > _SECONDS_OF_MARGINS:
            raise ConfigError(f"--lease-s: more than {_SECONDS_OF_MARGINS:g}, got {self.lease_s:g}")

    def _check_blocks(self) -> None:
        for name in ("prefill_blocks", "decode_blocks"):
            fewest = self.max_model_len // BLOCK_SIZE_TOKENS + 1
            if getattr(self, name) < fewest:
                raise ConfigError(
                    f"{option_of(name)}: {fewest} or more, which the longest request takes, got {getattr(self, name)};"
                    " fewer --turns, --turn-tokens, --prompt-tokens or --output-tokens make it shorter"
                )

    def check_machine(self, machine: Machine, bytes_per_token: int) -> None:
        """Raises ``ConfigError`` for more engines, or larger ones, than it can carry."""
        machine.check_engines(self.num_prefill + self.num_decode, named_by="--num-prefill, --num-decode")
        for name in ("prefill_blocks", "decode_blocks"):
            num_bytes = getattr(self, name) * BLOCK_SIZE_TOKENS * bytes_per_token
            machine.check_memory(num_bytes, named_by=option_of(name))

    @property
    def duration_s(self) -> float:
        """Of the load."""
        return self.minutes * 60

    @property
    def longest_prompt_tokens(self) -> int:
        """Of the load generator."""
        return self.prompt_tokens * 3 // 2

    @property
    def max_model_len(self) -> int:
        """Room for the longest request, in whole blocks."""
        conversation = self.turns * (self.turn_tokens + self.output_tokens + _TEMPLATE_TOKENS)
        longest = max(self.longest_prompt_tokens + self.output_tokens, conversation)
        return num_blocks_for(longest, BLOCK_SIZE_TOKENS) * BLOCK_SIZE_TOKENS

    @property
    def engine_names(self) -> tuple[str, ...]:
        """Of all engines."""
        prefill = tuple(f"prefill-{index}" for index in range(self.num_prefill))
        return (*prefill, *(f"decode-{index}" for index in range(self.num_decode)))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> ChurnPlan:
        """From what ``mapping_of`` gives, or options. Raises ``ConfigError`` naming an unknown key."""
        return cls(**knobs_in(cls, values))
